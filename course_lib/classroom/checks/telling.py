"""A wrong result whose idea no check knows, in words: where it is wrong, and what stands there instead.

Each sentence is true of the numbers, in any exercise, and none guesses at a cause. Of each wrong value, the first look
that sees something is told; what it says stands in texts.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from course_lib.classroom.checks.evidence import Difference, Evidence, is_same, kind
from course_lib.classroom.checks.prose import TEXTS
from course_lib.ranks import listing

SENT = "what rank {} sent"


def told(found: Evidence, again: Evidence | None = None) -> str:
    """A sentence or two about what is wrong in a run that ended well. again: of the same program in a later case."""
    wrong, programs = found.differences, (found.observed, found.right)
    sends = [any(seen.sent for seen in observed) for observed in programs]
    if any(seen.ended_group for seen in found.observed):
        return TEXTS["ended"]
    if wrong and wrong[0].is_change:
        return TEXTS["changed"].format(name=wrong[0].name)
    if wrong and kind(wrong[0].expected) != kind(wrong[0].got):
        return _another_kind(found, wrong[0])
    if sends == [False, True]:
        return TEXTS["silent"]
    arrives = any(sent.operation != "allreduce" for seen in found.observed for sent in seen.sent)  # which fills nothing
    if arrives and any(isinstance(one.got, Tensor) and one.got.isnan().any() for one in wrong):
        return TEXTS["holes"]
    if rule := found.exercise.rule(found.observed):
        return rule
    if not wrong:
        return TEXTS["apart"].format(rank=found.disagreeing[0])
    if all(is_same(one.before, one.got) for one in wrong):
        return TEXTS["before"].format(names=_names([one.name for one in wrong]))
    each = (look(found, one) for one in wrong[:12] for look in (_first_relation, _sum)[: 1 + found.exercise.by_rank])
    differs = TEXTS["different"].format(rank=found.disagreeing[0]) if found.disagreeing else TEXTS["wrong"]
    looks = _same_relation(found, wrong, again) or next(filter(None, each), "") or differs
    return f"{looks} {_where(found)}".strip()


def _say(found: Evidence, heading: str, one: Difference, **fields: Any) -> str:
    text = TEXTS[heading].format(rank=one.rank, name=one.name, **fields)
    return text if found.exercise.by_rank else text.removeprefix(f"On rank {one.rank}, ").replace("in `", "In `", 1)


def _another_kind(found: Evidence, one: Difference) -> str:
    """The difference of two values that are not of one type, dtype and shape."""
    expected, got = one.expected, one.got
    if isinstance(expected, str) and isinstance(got, str):
        return found.exercise.rule(found.observed) or _say(found, "other word", one, got=got)
    if isinstance(got, str) and got in ("None", "nothing"):
        return _say(found, "none", one, got=got.replace("nothing", "missing"))
    both = isinstance(expected, Tensor) and isinstance(got, Tensor) and _same_numbers(found, one)
    return _say(found, "other kind", one, what=one.differs_in) + f" {TEXTS['right numbers']}" * both


# What all wrong numbers have in common


def _off(found: Evidence, one: Difference) -> Tensor:
    """Which numbers of a value are wrong."""
    expected, got = one.expected.double(), one.got.double()  # type: ignore[union-attr]
    return ~torch.isclose(got, expected, 0, found.tolerance, equal_nan=True)


def _wrong_numbers(found: Evidence, wrong: list[Difference]) -> list[Tensor]:
    """The right numbers and those that stand there, where some values are wrong."""
    masks = [(one, _off(found, one)) for one in wrong]
    return [torch.cat([one[i][mask].double() for one, mask in masks]) for i in (3, 4)]  # type: ignore[union-attr,index]


def _same_relation(found: Evidence, wrong: list[Difference], again: Evidence | None = None) -> str:
    """A relation to the right number that all wrong numbers of some values have."""
    expected, got = _wrong_numbers(found, wrong)
    if not got.isfinite().all():
        return _infinite(found, got) if expected.isfinite().all() else ""
    is_amount = all(one.expected.is_floating_point() for one in wrong)  # type: ignore[union-attr]  # or else a name
    is_whole, largest = is_same(expected, expected.round()), float(expected.abs().max())
    moved = [float((one[3] - one[2]).abs().max()) for one in wrong if kind(one.before) == kind(one.got)]  # type: ignore[operator]
    most = 0.0 if is_whole else float((got - expected).abs().max())
    if 0 < most < 0.02 * min([largest, *moved]) and got.numel() > 1:
        return TEXTS["digits"].format(share=most / largest)
    if not got.any():
        return TEXTS["zero"]
    if factor := is_amount and _factor(found, wrong):
        return _by_a_factor(factor, found, again)
    if len(expected.unique()) > 1 and all(_same_numbers(found, one) for one in wrong):
        return TEXTS["places"]
    more = float((got - expected).mean())
    if is_amount and len(expected.unique()) > 1 and is_same(got, expected + more, found.tolerance + 1e-12 * largest):
        return TEXTS["constant"].format(amount=abs(more), more="more" if more > 0 else "less")
    return ""


def _infinite(found: Evidence, got: Tensor) -> str:
    """Which numbers are there that are not finite, and whether what a rank sends has some, too."""
    kinds = ["inf"] * bool(got.isinf().any()) + ["nan"] * bool(got.isnan().any())
    ranks = [r for r, seen in enumerate(found.observed) if not all(one.content.isfinite().all() for one in seen.sent)]
    also = [TEXTS["sent infinite"].format(rank=rank) for rank in ranks[:1]]
    return " ".join([TEXTS["infinite"].format(what=" and ".join(kinds)), *also])


def _same_numbers(found: Evidence, one: Difference) -> bool:
    """Whether a value has the right numbers, in whatever order."""
    expected, got = (value.double().flatten().sort()[0] for value in (one.expected, one.got))  # type: ignore[union-attr]
    return is_same(expected, got, found.tolerance)


def _factor(found: Evidence, wrong: list[Difference]) -> float:
    """The number by which all wrong numbers of some values are too large; 0 if there is none."""
    if any(kind(one.expected) != kind(one.got) for one in wrong):
        return 0.0
    expected, got = _wrong_numbers(found, wrong)
    if not (expected.any() and expected.isfinite().all() and got.isfinite().all()):
        return 0.0
    factor, largest = float(got @ expected / (expected @ expected)), float(expected.abs().max())
    off = max(1.0, float(got.abs().max()) / largest) * found.tolerance + 1e-12 * largest
    is_common = is_same(got, factor * expected, off) and (len(expected.unique()) > 1 or _is_whole(factor))
    return factor * (is_common and round(factor, 2) != 1)


def _is_whole(factor: float) -> bool:
    return factor != 0 and any(abs(one - round(one)) < 1e-4 for one in (factor, 1 / factor))


def _times(factor: float) -> float:
    return round(max(abs(factor), 1 / abs(factor)), 2) if factor else 0.0


def _by_a_factor(factor: float, found: Evidence, again: Evidence | None) -> str:
    """A factor in words, and what is so many: in another case, too, if there is one."""
    if abs(factor + 1) < 1e-3:
        return TEXTS["sign"]
    is_confirmed, also = bool(again and again.differences), ""
    reasons = _so_many(found, factor, is_confirmed)
    if again and is_confirmed:
        other = _factor(again, again.differences)
        reasons = {name: one for name, one in reasons.items() if name in _so_many(again, other, is_confirmed)}
        is_another = other and again.case.text != found.case.text
        also = TEXTS["also"].format(case=again.case.text, times=_times(other)) if is_another else ""
    text = TEXTS["factor"].format(times=_times(factor), size="large" if abs(factor) > 1 else "small")
    return " ".join(filter(None, [text, also, *reasons.values(), TEXTS["sign"] * (factor < 0)]))


def _so_many(found: Evidence, factor: float, is_confirmed: bool) -> dict[str, str]:
    """Sentences about what there is so many times, by what it is. Of ranks, 4 / 2 may be chance, and 3 / 2 is not."""
    times, ranks = _times(factor), len(found.observed) * any(seen.sent for seen in found.observed + found.right)
    groups = [some for some in range(1, ranks) if is_confirmed or some == 1 or ranks % some]
    said = [""] * any(abs(times - ranks / some) < 5e-3 for some in groups)
    given = {name: one for name, one in found.right[0].before.items() if found.exercise.is_seen(name)}
    rows = {name: len(one) for name, one in given.items() if isinstance(one, Tensor) and one.dim()}
    said += [name for name, n in rows.items() if name.isidentifier() and abs(times - n) < 5e-3]
    return {name: TEXTS["as many rows" if name else "ranks"].format(name=name, ranks=ranks) for name in said}


# What stands there instead


def _by_rank(found: Evidence, one: Difference) -> dict[str, list[Tensor | None]]:
    """What ranks have, in the shape of a value, by names that leave out the rank; None for what has another shape."""
    before, right = [seen.before for seen in found.right], found.exercise.compared(found.right)
    given, made = ([*filter(found.exercise.is_seen, of[one.rank])] for of in (before, right))
    known: dict[str, list[Any]] = {f"`{n}` of rank {{}} as it was": [of.get(n) for of in before] for n in given}
    known |= {f"piece {one.rank} of {name}": [_piece(v, one.rank, len(of)) for v in of] for name, of in known.items()}
    known |= {f"what `{n}` of rank {{}} should be": [of.get(n) for of in right] for n in made}
    known[SENT] = [seen.sent[0].content if seen.sent else None for seen in found.observed]
    return {name: [_shaped(value, one.got) for value in values] for name, values in known.items()}


def _piece(value: Any, rank: int, n: int) -> Tensor | None:
    return value.tensor_split(n)[rank] if isinstance(value, Tensor) and value.dim() else None


def _shaped(value: Any, got: Any) -> Tensor | None:
    """A tensor in the shape of another, if it is as long, or if it is one of its rows."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.dim():
        return None
    if value.numel() == got.numel():
        return value.double().reshape(got.shape)
    return value.double().expand_as(got) if value.shape == got.shape[got.dim() - value.dim() :] else None


def _parts(found: Evidence, one: Difference) -> list[dict[str, Tensor]]:
    """Tensors that a value may be a sum of: those of all ranks, or the right one and another one."""
    by_rank, expected = _by_rank(found, one), one.expected.double()  # type: ignore[union-attr]
    of_all = {n: some for n, of in by_rank.items() if len(some := [v for v in of if v is not None]) == len(of)}
    others = {n.format(r): v for n, of in by_rank.items() for r, v in enumerate(of) if v is not None}
    others |= {TEXTS["largest"].format(what=n.format("r")): torch.stack(of).amax(0) for n, of in of_all.items()}
    sums = {n: {n.format(rank): v for rank, v in enumerate(of)} for n, of in of_all.items()}
    sent = [sums.pop(SENT)] if SENT in sums else []  # last, as it says least about a value
    return [*sums.values(), *({"what it should be": expected, name: value} for name, value in others.items()), *sent]


def _sum(found: Evidence, one: Difference) -> str:
    """Whether a value is what all ranks have, each some number of times, or the right one and another one."""
    got = one.got.double()  # type: ignore[union-attr]
    off = min(found.tolerance, 1e-5 * float(got.abs().max())) + 1e-12 * float(got.abs().max())
    for parts in _parts(found, one):
        columns = torch.stack([*parts.values()]).reshape(len(parts), -1).T
        if len(columns) <= len(parts) or torch.linalg.matrix_rank(columns) < len(parts):
            continue
        shares = torch.linalg.lstsq(columns, got.reshape(-1, 1)).solution.flatten()
        is_plain = all(abs(share - round(share)) < 1e-6 and abs(share) < 1.5 for share in shares.tolist())
        if is_same(columns @ shares, got.flatten(), off) and (is_plain or (got != got.round()).any()):
            return _added_up(found, one, dict(zip(parts, shares.tolist(), strict=True)))
    return ""


def _added_up(found: Evidence, one: Difference, parts: dict[str, float]) -> str:
    (first, *_, last), times = parts, next(iter(parts.values()))
    if first == "what it should be" and last.endswith("as it was") and abs(sum(parts.values()) - 1) < 1e-6:
        return _say(found, "change", one, times=times)
    often = {name: "" if abs(abs(n) - 1) < 1e-4 else f"{abs(n):.3g} times " for name, n in parts.items()}
    terms = [f" {'plus' if n > 0 else 'minus'} {often[name]}{name}" for name, n in parts.items() if abs(n) > 1e-6]
    return _say(found, "sum", one, what="".join(terms).removeprefix(" plus "))


def _first_relation(found: Evidence, one: Difference) -> str:
    text = _same_relation(found, [one]) if int(_off(found, one).sum()) > 1 else ""
    return text and _say(found, "of one", one, text=text)


# Where


def _where(found: Evidence) -> str:
    """Which values are wrong, and which are right."""
    first, wrong = found.differences[0], found.differences
    every = set(range(len(found.observed)))
    ranks, right = sorted({one.rank for one in wrong} if found.exercise.by_rank else every), _right(found)
    off = _off(found, first)
    place = f"{off.sum()} of the {off.numel()} elements of " * (not off.all())
    if len(ranks) == len(every) and not (right or place):
        return ""
    at = f" on {listing(ranks)}" * (len(ranks) < len(every))
    text = TEXTS["where"].format(place=place, names=_names([one.name for one in wrong]), at=at)
    if sound := sorted(every.difference(ranks)):
        text += f" {TEXTS['sound'].format(ranks=listing(sound))}"
    return f"{text} {TEXTS['right'].format(names=_names(right))}" if right else text


def _right(found: Evidence) -> list[str]:
    """The names of the numbers that are made on the first wrong rank, and right everywhere."""
    rank, wrong = found.differences[0].rank, {one.name for one in found.differences}
    before, made = found.right[rank].before, found.exercise.compared(found.right)[rank]
    changed = [name for name, one in made.items() if isinstance(one, Tensor) and not is_same(one, before.get(name, ""))]
    return [name for name in changed if name not in wrong]


def _names(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    return f"`{names[0]}`" + f" and {len(names) - 1} more" * (len(names) > 1)
