"""Activations in flight: the micro-batches whose activations each rank holds, over time, from a timeline."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate
from typing import NamedTuple

from course_lib.timeline import Span, Timeline


class Activations(NamedTuple):
    """The micro-batches in flight on one rank. steps: when their number changes (seconds), and the new number."""

    rank: int
    steps: list[tuple[float, float]]

    @property
    def most(self) -> float:
        return max((count for _, count in self.steps), default=0.0)


def held_activations(timeline: Timeline) -> list[Activations]:
    """The number of micro-batches whose activations each rank holds, over time, from its recorded computations.

    A micro-batch is held from the start of its forward to the end of its backward, or of its weight gradient where
    the backward was split. On a rank with several stages, each stage counts with its share of a micro-batch.
    """
    return [Activations(rank, _steps(timeline.of(rank), timeline.began)) for rank in range(timeline.world_size)]


def _steps(spans: list[Span], zero: float) -> list[tuple[float, float]]:
    lives: dict[tuple[int | None, int | None], list[float]] = defaultdict(list)
    for span in spans:
        if span.micro_batch is not None:
            lives[span.stage, span.micro_batch] += [span.start, span.end]
    weight = 1 / max(1, len({stage for stage, _ in lives}))
    changes = [(min(times), weight) for times in lives.values()] + [(max(times), -weight) for times in lives.values()]
    # Of two events at the same time, the one that frees comes first.
    changes = sorted((round(when - zero, 9), change) for when, change in changes)
    counts = accumulate(change for _, change in changes)
    return [(0.0, 0.0), *((when, round(count, 6)) for (when, _), count in zip(changes, counts, strict=True))]
