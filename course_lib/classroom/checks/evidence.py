"""The evidence of a check: results of the student's function and of the right solution, and their differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from course_lib.classroom.checks.part import Case, Mistake, Observed, Part, Value
from course_lib.instruments.watch import Sent


class Difference(NamedTuple):
    """One value on one rank that differs from the right solution's."""

    rank: int
    name: str
    before: Value
    expected: Value
    got: Value

    @property
    def is_change(self) -> bool:
        """Whether the value should have stayed unchanged."""
        return is_same(self.before, self.expected) and self.before != "nothing"

    @property
    def differs_in(self) -> str:
        """The first difference of the two values' kinds: type, dtype or shape."""
        tensors = [value.dtype for value in (self.expected, self.got) if isinstance(value, Tensor)]
        return "type" if len(tensors) < 2 else "shape" if tensors[0] == tensors[1] else "dtype"

    def facts(self, by_rank: bool = True) -> tuple[tuple[str, str], ...]:
        """What was expected, what is there, and where, as far as it says something; with the rank if `by_rank`."""
        where, pair = f"rank {self.rank}, " * by_rank + self.name, [self.expected, self.got]
        short = all(not isinstance(value, Tensor) or value.numel() <= 12 for value in pair)
        if kind(self.expected) != kind(self.got) and (not short or self.differs_in == "dtype"):
            pair = [*map(kind, pair)]
        elif not short and isinstance(self.expected, Tensor):
            off = (self.expected - self.got).abs().nan_to_num(torch.inf)  # type: ignore[operator]
            at = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
            where, pair = f"{where}{[*at]}", [value[at] for value in pair]  # type: ignore[index]
        expected, got = ((value if isinstance(value, str) else _numbers(value)) or "nothing" for value in pair)
        return (*[("Where", where)] * (where != "the result"), ("Expected", expected), ("Got", got))


@dataclass(frozen=True, eq=False)
class Evidence:
    """The results of two programs in one case, by rank: the student's function and the right solution."""

    exercise: Part
    case: Case
    observed: list[Observed]
    right: list[Observed]

    @cached_property
    def differences(self) -> list[Difference]:
        """All values that differ from the right solution's by more than rounding; the one to report comes first."""
        found = self._between(self.right, self.observed)
        return sorted(found, key=lambda one: (not one.is_change, kind(one.expected) == kind(one.got)))

    @cached_property
    def tolerance(self) -> float:
        return self._rounding(self.right)

    def _rounding(self, observed: list[Observed]) -> float:
        """How far rounding may move a number, from the largest one that a program has made."""
        pairs = ((v, seen.before.get(name, "")) for seen in observed for name, v in seen.values.items())
        made = [v for v, before in pairs if isinstance(v, Tensor) and v.numel() and not is_same(v, before)]
        return self.exercise.rounding * max((float(v.nan_to_num(0, 0, 0).abs().max()) for v in made), default=0.0)

    def _between(self, wanted: list[Observed], given: list[Observed]) -> Iterator[Difference]:
        tolerance = self.tolerance if wanted is self.right else self._rounding(wanted)
        for rank, both in enumerate(zip(*map(self.exercise.compared, (wanted, given)), strict=True)):
            for name in both[0] | both[1]:
                expected, got = (values.get(name, "nothing") for values in both)
                if not is_same(expected, got, tolerance):
                    yield Difference(rank, name, self.right[rank].before.get(name, "nothing"), expected, got)

    @cached_property
    def disagreeing(self) -> list[int]:
        """Ranks that differ from rank 0, by even one bit, where the right solution leaves all ranks the same."""
        got, right = map(self.exercise.compared, (self.observed, self.right))
        same = [name for name in right[0] if all(is_same(one.get(name, ""), right[0][name]) for one in right)]
        return [r for r, one in enumerate(got) if not all(is_same(one.get(n, ""), got[0].get(n, "")) for n in same)]

    @cached_property
    def is_right(self) -> bool:
        return not (self.differences or self.disagreeing or any(seen.ended_group for seen in self.observed))

    def mistakes(self) -> list[Mistake]:
        """The mistakes with the same values; of several, those that also sent the same numbers, if there are any.

        Where a wrong value is nan or infinite, as it is after many a mistake, they have to have sent the same.
        """
        fitting = {mistake: seen for mistake, seen in self.exercise.run_mistakes(self.case).items() if self._fits(seen)}
        closer = [one for one, seen in fitting.items() if all(map(_sent_the_same, self.observed, seen))]
        wild = any(isinstance(one.got, Tensor) and not one.got.isfinite().all() for one in self.differences)
        return closer if closer or wild else list(fitting)

    def _fits(self, theirs: list[Observed]) -> bool:
        """Whether the messages fit a mistake: the same if the result is right, else messages on the same ranks.

        Whoever sends as few as the right solution does not have an idea that sends more.
        """
        programs = self.observed, theirs, self.right
        mine, other, right = ([Counter(map(traffic, seen.sent)) for seen in observed] for observed in programs)
        many, more, least = (sum(one.total() for one in sent) for sent in (mine, other, right))
        alike = [*map(bool, mine)] == [*map(bool, other)] and not many == least < more
        return (alike if self.differences else mine == other) and self.is_like(theirs)

    def is_like(self, theirs: list[Observed]) -> bool:
        """Whether the values are those of another program."""
        return not any(self._between(theirs, self.observed))

    def would_pass(self, mistake: Mistake) -> bool:
        """Whether this wrong solution passes this case."""
        observed = self.exercise.run_mistakes(self.case)[mistake]
        return not any(self._between(self.right, observed)) and not self.exercise.breach(observed)


def kind(value: Value) -> str:
    if isinstance(value, str):
        return value
    return f"{str(value.dtype).removeprefix('torch.')}, shape {list(value.shape)}"


def is_same(one: Value, other: Value, tolerance: float = 0.0) -> bool:
    """Whether two values have the same dtype and shape, and the same numbers up to a tolerance."""
    if isinstance(one, str) or isinstance(other, str):
        return isinstance(one, str) and isinstance(other, str) and one == other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one, other) or torch.allclose(one.double(), other.double(), 0, tolerance, equal_nan=True)


def _numbers(value: Tensor) -> str:
    return ", ".join(f"{number:.6g}" for number in value.flatten().tolist())


def traffic(sent: Sent) -> tuple[str, int, int]:
    """The operation, peer and number of elements of a message."""
    return sent.operation, sent.peer, sent.content.numel()


def _sent_the_same(seen: Observed, other: Observed) -> bool:
    """Whether two programs sent the same floating-point tensors up to a factor, in any pieces and order."""
    sent = ([s.content for s in one.sent if s.content.is_floating_point() and s.content.dim()] for one in (seen, other))
    contents = ([tensor.double().flatten() for tensor in tensors] for tensors in sent)
    mine, theirs = (torch.cat([torch.zeros(1), *content]).sort()[0] for content in contents)
    return is_same(mine / (mine.norm() + 1e-300), theirs / (theirs.norm() + 1e-300), 1e-5)
