"""A wrong result whose idea no check knows, in words: where it is wrong, and what stands there instead.

Each sentence is true of the numbers, in any exercise, and none guesses at a cause. The first look that sees something
is told; what it says stands in texts.md.
"""

from __future__ import annotations

from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from course_lib.classroom.checks.evidence import Difference, Evidence, is_same, kind, traffic
from course_lib.classroom.checks.part import Value
from course_lib.classroom.checks.prose import TEXTS
from course_lib.ranks import listing


def told(found: Evidence) -> str:
    """A sentence or two about what is wrong in a run that ended well."""
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
    by_messages = any(sent.operation == "send" for seen in found.observed for sent in seen.sent)
    if by_messages and any(isinstance(one.got, Tensor) and one.got.isnan().any() for one in wrong):
        return TEXTS["holes"]
    if rule := found.exercise.rule(found.observed):
        return rule
    if not wrong:
        return TEXTS["apart"].format(rank=found.disagreeing[0])
    if all(is_same(one.before, one.got) for one in wrong):
        return TEXTS["before"].format(names=_names([one.name for one in wrong]))
    looks = _same_relation(found, wrong) or next(filter(None, (look(found, wrong[0]) for look in LOOKS)), "")
    return f"{looks or _fallback(found, any(sends))} {_where(found)}".strip()


def _fallback(found: Evidence, sends: bool) -> str:
    if found.disagreeing:
        text = TEXTS["different"].format(rank=found.disagreeing[0])
    else:
        text = TEXTS["wrong together" if sends and found.differences[0].name in found.common else "wrong"]
    return f"{text} {_messages(found) if sends else ''}".strip()


def _messages(found: Evidence) -> str:
    """The first wrong message, or that all are right, if they are as many and as long as the right ones."""
    both = [(rank, *pair) for rank, pair in enumerate(zip(found.observed, found.right, strict=True))]
    if any(not one.content.any() for seen in found.observed for one in seen.sent if one.content.numel() > 1):
        return TEXTS["sends zeros"]
    if not all([*map(traffic, seen.sent)] == [*map(traffic, right.sent)] for _, seen, right in both):
        return ""
    pairs = ((i, rank, pair) for rank, a, b in both for i, pair in enumerate(zip(a.sent, b.sent, strict=True)))
    off = [(i, rank) for i, rank, (a, b) in pairs if not is_same(a.content, b.content, found.tolerance)]
    number, rank = min(off, default=(-1, 0))
    return TEXTS["sends other" if off else "sends right"].format(rank=rank, number=number + 1)


def _say(heading: str, one: Difference, **fields: Any) -> str:
    return TEXTS[heading].format(rank=one.rank, name=one.name, **fields)


def _another_kind(found: Evidence, one: Difference) -> str:
    """The difference of two values that are not of one type, dtype and shape."""
    expected, got = one.expected, one.got
    if isinstance(expected, str) and isinstance(got, str):
        return found.exercise.rule(found.observed) or _say("other word", one)
    if isinstance(got, str) and got in ("None", "nothing"):
        return _say("none", one, got=got.replace("nothing", "missing"))
    text = _say("other kind", one, what=one.differs_in)
    if isinstance(expected, str) or isinstance(got, str):
        return text
    numbers = [value.double().flatten().sort()[0] for value in (expected, got)]
    return text + f" {TEXTS['right numbers']}" * is_same(numbers[0], numbers[1], found.tolerance)


# What all wrong numbers have in common


def _off(found: Evidence, one: Difference) -> Tensor:
    """Which numbers of a value are wrong."""
    expected, got = one.expected.double(), one.got.double()  # type: ignore[union-attr]
    return ~torch.isclose(got, expected, 0, found.tolerance, equal_nan=True)


def _same_relation(found: Evidence, wrong: list[Difference]) -> str:
    """A relation to the right number that all wrong numbers of some values have."""
    masks = [(one, _off(found, one)) for one in wrong]
    expected, got = (torch.cat([one[i][mask].double() for one, mask in masks]) for i in (3, 4))  # type: ignore[union-attr,index]
    if not got.isfinite().all():
        return TEXTS["infinite"].format(what="nan" if got.isnan().any() else "inf") * bool(expected.isfinite().all())
    largest = float(expected.abs().max())
    if (most := float((got - expected).abs().max())) < 0.02 * largest:
        return TEXTS["digits"].format(share=most / largest)
    scale = max(1.0, float(got.abs().max()) / largest) if largest else 1.0
    same = partial(is_same, got, tolerance=scale * found.tolerance + 1e-12 * largest)
    if not got.any():
        return TEXTS["zero"]
    factor = float(got @ expected / (expected @ expected))
    if same(factor * expected) and (len(expected.unique()) > 1 or _is_whole(factor)):
        return _by_a_factor(factor, found)
    more = float((got - expected).mean())
    if len(expected.unique()) > 1 and same(expected + more):
        return TEXTS["constant"].format(amount=abs(more), more="more" if more > 0 else "less")
    return ""


def _is_telling(value: Tensor) -> bool:
    """Whether it is no coincidence if other numbers are the same as these."""
    return len(value.unique()) > 1 or bool((value.double() != value.double().round()).any())


def _is_whole(factor: float) -> bool:
    return factor != 0 and isfinite(factor) and any(abs(one - round(one)) < 1e-4 for one in (factor, 1 / factor))


def _by_a_factor(factor: float, found: Evidence) -> str:
    if abs(factor + 1) < 1e-3:
        return TEXTS["sign"]
    times, size = max(abs(factor), abs(1 / factor)), "large" if abs(factor) > 1 else "small"
    text = TEXTS["factor"].format(times=f"{times:,.0f}" if _is_whole(times) else f"{times:.3g}", size=size)
    ranks = len(found.observed) if any(seen.sent for seen in found.observed + found.right) else 0
    if any(abs(times - ranks / some) < 1e-3 for some in range(1, ranks)):
        text += f" There are {ranks} ranks."
    given = ((name, one) for name, one in found.right[0].before.items() if isinstance(one, Tensor) and one.dim())
    if same := [name for name, one in given if abs(times - len(one)) < 1e-3 and "." not in name]:
        text += f" {TEXTS['as many rows'].format(name=same[0])}"
    return text + f" {TEXTS['sign']}" * (factor < 0)


# What stands there instead


def _known(found: Evidence, one: Difference) -> dict[str, Tensor]:
    """Other tensors in this case, each with a name that a student knows."""
    right, known = found.exercise.compared(found.right), dict[str, Value]()
    for rank, seen in sorted(enumerate(found.right), key=lambda pair: pair[0] != one.rank):
        known |= {f"`{name}` of rank {rank} as it was": value for name, value in seen.before.items()}
        flat = {name: it for name, it in seen.before.items() if isinstance(it, Tensor) and it.dim() == 1}
        pieces = {name: value.tensor_split(len(right))[one.rank] for name, value in flat.items()}
        known |= {f"piece {one.rank} of `{name}` of rank {rank}": value for name, value in pieces.items()}
    known |= {f"what `{name}` should be": value for name, value in right[one.rank].items() if name != one.name}
    known |= {f"what rank {r} should have": seen.get(one.name, "") for r, seen in enumerate(right) if r != one.rank}
    for rank, seen in enumerate(found.observed):
        known |= {f"what rank {rank} sent": sent.content for sent in reversed(seen.sent)}
    return {name: value for name, value in known.items() if isinstance(value, Tensor) and value.is_floating_point()}


def _in_another_place(found: Evidence, one: Difference) -> str:
    """Whether the numbers of a value are right ones, of another place."""
    expected, got = one.expected, one.got
    assert isinstance(expected, Tensor) and isinstance(got, Tensor)
    same = partial(is_same, tolerance=found.tolerance)
    if not _is_telling(got):
        return ""
    if what := next((name for name, value in _known(found, one).items() if same(got, value)), ""):
        return _say("of another", one, what=what)
    if not same(*(value.double().flatten().sort()[0] for value in (expected, got))):
        return ""
    shifts = [(by, dim) for dim, size in enumerate(got.shape) for by in range(1, min(size, 32))]
    ways = {f": moved on by {by}": expected.roll(by, dim) for by, dim in shifts}
    ways |= {": transposed": expected.T} if got.dim() == 2 else {}
    ways[": reversed"] = expected.flatten().flip(0).view_as(got)
    return _say("order", one, how=next((way for way, value in ways.items() if same(got, value)), ""))


def _one_more(found: Evidence, one: Difference) -> str:
    """Whether another tensor was added to a value, or taken from it."""
    expected, got = one.expected.double(), one.got.double()  # type: ignore[union-attr]
    for what, other in _known(found, one).items():
        if other.dim() and other.any() and other.shape == expected.shape[expected.dim() - other.dim() :]:
            more = other.double().expand_as(expected)
            times = float((got - expected).flatten() @ more.flatten() / more.square().sum())
            if _is_whole(times) and is_same(got, expected + times * more, found.tolerance):
                often = "" if abs(abs(times) - 1) < 1e-4 else f"{abs(times):.3g} times "
                return _say("one more", one, what=f"{'plus' if times > 0 else 'minus'} {often}{what}")
    return ""


def _first_relation(found: Evidence, one: Difference) -> str:
    text = _same_relation(found, [one]) if one.expected.numel() > 1 else ""  # type: ignore[union-attr]
    return text and _say("of one", one, text=text)


def _change(found: Evidence, one: Difference) -> str:
    """How much more or less a value changes than it should, as parameters do with another gradient."""
    if kind(one.before) != kind(one.got) or one.got.numel() < 2:  # type: ignore[union-attr]
        return ""
    before, expected, got = (value.double().flatten() for value in one[2:])  # type: ignore[union-attr]
    times = float((got - before) @ (expected - before) / (expected - before).square().sum())
    is_common = is_same(got, before + times * (expected - before), max(1.0, abs(times)) * found.tolerance)
    return _say("change", one, times=times) * is_common


def _elsewhere(found: Evidence, one: Difference) -> str:
    both = (torch.cat([wrong[i].double().flatten() for wrong in found.differences]) for i in (3, 4))  # type: ignore[union-attr]
    expected, got = (numbers.sort()[0] for numbers in both)
    return TEXTS["places"] * is_same(expected, got, found.tolerance)


LOOKS = (_in_another_place, _one_more, _first_relation, _change, _elsewhere)


# Where


def _where(found: Evidence) -> str:
    """Which values are wrong, and which are right."""
    first, wrong = found.differences[0], found.differences
    ranks, names = sorted({one.rank for one in wrong}), {one.name for one in wrong}
    right = [name for name in _made(found, first.rank) if name not in names]
    place = _part_of(_off(found, first))
    if len(ranks) == len(found.observed) and not (right or place):
        return ""
    at = f" on {listing(ranks)}" * (len(ranks) < len(found.observed))
    text = TEXTS["where"].format(place=place and f"{place} of ", names=_names([one.name for one in wrong]), at=at)
    if sound := sorted(set(range(len(found.observed))) - set(ranks)):
        text += f" {TEXTS['sound'].format(ranks=listing(sound))}"
    return f"{text} {TEXTS['right'].format(names=_names(right))}" if right else text


def _made(found: Evidence, rank: int) -> list[str]:
    """The names of the numbers that the right solution makes on a rank."""
    before, made = found.right[rank].before, found.exercise.compared(found.right)[rank]
    return [name for name, one in made.items() if isinstance(one, Tensor) and not is_same(one, before.get(name, ""))]


def _names(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    return f"`{names[0]}`" + f" and {len(names) - 1} more" * (len(names) > 1)


def _part_of(mask: Tensor) -> str:
    """Some numbers of a value in words: rows, columns or elements; "" for all of them."""
    if mask.all() or not mask.dim():
        return ""
    if mask.dim() == 2:
        for dim, what in ((1, "row"), (0, "column")):
            lines = mask.any(dim)
            if (lines.unsqueeze(dim) == mask).all():
                return _places(lines.nonzero().flatten().tolist(), what)
    at = mask.flatten().nonzero().flatten().tolist()
    return _places(at) if mask.dim() == 1 else f"{len(at)} of the {mask.numel()} elements"


def _places(at: list[int], what: str = "element") -> str:
    """Places in words: "element 3", "rows 2 to 5", "columns 0, 2, 4", or how many there are."""
    if len(at) == 1:
        return f"{what} {at[0]}"
    if at[-1] - at[0] == len(at) - 1:
        return f"{what}s {at[0]} to {at[-1]}"
    return f"{what}s {', '.join(map(str, at))}" if len(at) <= 6 else f"{len(at)} {what}s"
