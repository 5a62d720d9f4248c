"""The places of a timeline's spans: one row for each rank, and under its bars a thin lane for the background."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from course_lib.figures.axis import ticks
from course_lib.timeline import Span, Timeline


def share_of(timeline: Timeline, start: float, end: float) -> tuple[float, float]:
    """Two moments as shares of the timeline."""
    return (start - timeline.began) / timeline.makespan, (end - timeline.began) / timeline.makespan


class Scale(NamedTuple):
    left: float
    right: float
    seconds: float

    def pixels(self, seconds: float) -> float:
        return (self.right - self.left) * seconds / self.seconds if self.seconds else 0.0

    def ticks(self) -> list[float]:
        return ticks(self.seconds, round((self.right - self.left) / 60))


class Lanes(NamedTuple):
    """Heights in pixels: of a rank's bars, of the lane for the background under them, and of both with the gap."""

    bar: float
    lane: float
    pitch: float


class PlacedSpan(NamedTuple):
    """A span and its place in the picture."""

    span: Span
    x: float
    y: float
    width: float
    height: float


LANE, GHOST = 5.0, 4.0  # pixels under a rank's bars, for its background and for those of another run
ROOM, LEAST, GAP = 184.0, 11.0, 3.0  # pixels: for all ranks, if they can have it; of a bar at least; between ranks
MOST = {False: 31.0, True: 46.0}  # for one rank, by whether few take as much room as many


class TimelinePanel(NamedTuple):
    """The place of a drawn timeline, in pixels. top: of the row of rank 0."""

    timeline: Timeline
    scale: Scale
    lanes: Lanes
    top: float

    @property
    def bottom(self) -> float:
        return self.row(self.timeline.world_size)

    def row(self, rank: int) -> float:
        """The y at which the row of a rank begins."""
        return self.top + rank * self.lanes.pitch

    def bars(self) -> Iterator[PlacedSpan]:
        """Every span, rank by rank, by start time."""
        zero = self.timeline.began
        for rank in range(self.timeline.world_size):
            for span in self.timeline.of(rank):
                x, width = self.scale.left + self.scale.pixels(span.start - zero), self.scale.pixels(span.duration)
                if span.background:
                    yield PlacedSpan(span, x, self.row(rank) + self.lanes.bar + 1, width, self.lanes.lane - 1)
                else:
                    yield PlacedSpan(span, x, self.row(rank), width, self.lanes.bar)


def lanes_of(timeline: Timeline, has_ghost: bool = False, fills: bool = False) -> Lanes:
    """The heights of a timeline's rows. fills: whether few ranks take as much room as many, as far as they can."""
    lane = LANE if any(span.background for span in timeline.spans) else 0.0
    below = lane + GHOST * has_ghost + GAP
    bar = max(LEAST, min(ROOM / timeline.world_size, MOST[fills]) - below)
    return Lanes(bar, lane, bar + below)
