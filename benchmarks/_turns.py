"""Steps of two implementations that took turns in one run, so that other load on the machine hit both."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NOTE = (
    "target: ratios of at most 1.00. In brackets, between which bounds the middle half of the ratios of two steps in a "
    "row lies:\nwhere 1.00 is between them, both take the same time as far as this run can tell."
)


@dataclass(frozen=True)
class Turns:
    """Seconds of each step, in order, on the rank that took longest."""

    ours: list[float]
    theirs: list[float]

    @classmethod
    def of(cls, by_rank: Iterable[Iterable[Sequence[float]]]) -> Turns:
        """Take the slowest rank's time of each step. by_rank: the seconds of our steps and of theirs, for each rank."""
        return cls(*([max(step) for step in zip(*times, strict=True)] for times in zip(*by_rank, strict=True)))

    @property
    def medians(self) -> tuple[float, float]:
        return statistics.median(self.ours), statistics.median(self.theirs)

    @property
    def ratio(self) -> str:
        """The ratio of the medians, and the middle half of all ratios: "1.02 (0.97-1.06)"."""
        ours, theirs = self.medians
        low, _, high = statistics.quantiles((a / b for a, b in zip(self.ours, self.theirs, strict=True)), n=4)
        return f"{ours / theirs:.2f} ({low:.2f}-{high:.2f})"
