"""The picture of a collective: devices on a circle, pieces on their way along the edges, sums that fill like pies.

            [rank 7]  [rank 0]           a slot in a device is a piece of the tensor; a pie in it is a sum,
        [6]                    [1]       and each of its wedges points to the device whose numbers are in it
        [5]                    [2]
            [rank 4]  [rank 3]           under a device: the bytes that it has sent so far

All moments are drawn, each with its time: a player shows the moment at its cursor; without a player the picture shows
the middle one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from course_lib.figures.axis import counted, data_size, listed
from course_lib.figures.frame import begin
from course_lib.figures.lanes import share_of
from course_lib.figures.palette import INK, RANKS
from course_lib.figures.picture import Clock, Picture, table
from course_lib.figures.svg import BACKGROUND, HALO, Sheet, moving
from course_lib.figures.vocabulary import draw_device, draw_machine
from course_lib.timeline import RECEIVING, Timeline

PITCH, IN_A_ROW, ROUND = 20.5, 4, 156.0  # pixels from pie to pie, of eight ranks; pies; pixels of the circle
HALF = 0.5  # of the time
COLUMNS = "received (ms)", "from rank", "to rank", "piece", "ranks in the sum"
Members = tuple[int, ...]  # the ranks in a sum


class Sum(NamedTuple):
    """A sum that a rank had, or sent to another one, from start to end (seconds on the timeline)."""

    source: int
    target: int
    piece: int
    members: Members
    start: float
    end: float


class _Circle(NamedTuple):
    """The places of devices around a center."""

    ranks: int
    x: float
    y: float

    @property
    def pitch(self) -> float:
        """Pixels from pie to pie: as large as there is room."""
        return PITCH * max(1.0, min(6.5 / self.ranks, 1.75))

    @property
    def radius(self) -> float:
        return 0.41 * self.pitch

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of a device."""
        return self.pitch * min(self.ranks, IN_A_ROW) + 2, self.pitch * -(-self.ranks // IN_A_ROW) + 2

    def angle(self, rank: float) -> float:
        return 2 * math.pi * ((rank + 0.5) / self.ranks - 0.25)

    def center(self, rank: int) -> tuple[float, float]:
        return self.x + ROUND * math.cos(self.angle(rank)), self.y + ROUND * math.sin(self.angle(rank))

    def slot(self, rank: int, piece: int) -> tuple[float, float]:
        (x, y), (width, height) = self.center(rank), self.size
        column, row = piece % IN_A_ROW + 0.5, piece // IN_A_ROW + 0.5
        return x - width / 2 + 1 + self.pitch * column, y - height / 2 + 1 + self.pitch * row

    def wedge(self, x: float, y: float, rank: int) -> str:
        """The path of a wedge of a pie at x, y: it points to where the rank's device is."""
        ends = [self.angle(rank - 0.5 + side) for side in (0, 1)]
        (left, top), (right, bottom) = ((x + self.radius * math.cos(a), y + self.radius * math.sin(a)) for a in ends)
        return f"M{x:.1f},{y:.1f}L{left:.1f},{top:.1f}A{self.radius},{self.radius} 0 0 1 {right:.1f},{bottom:.1f}z"


def exchange(
    timeline: Timeline, sums: Sequence[Sum], width: int = 415, title: str | None = None, per_machine: int | None = None
) -> Picture:
    """Draw the content of every rank over time. sums: those of ranks, and those on their way.

    per_machine: the number of ranks in each of two machines; None if nobody asks.
    """
    sheet, top = begin(width, title, [timeline.origin])
    circle = _Circle(timeline.world_size, width / 2, top + ROUND + 52)
    _draw_devices(sheet, circle, sums, per_machine)
    _draw_sent(sheet, circle, timeline)
    seen = defaultdict(list)
    for one in sums:
        seen[one[:4]].append(share_of(timeline, one.start, one.end))
    for (source, target, piece, members), periods in sorted(seen.items(), key=lambda one: one[0][0] != one[0][1]):
        (x, y), (to_x, to_y) = circle.slot(source, piece), circle.slot(target, piece)
        flies = {} if source == target else {"data_fly": f"{to_x - x:.1f} {to_y - y:.1f}"}
        with sheet.group(**moving(periods, None if flies else HALF), **flies, stroke=INK, stroke_width=0.5):
            _draw_pie(sheet, circle, (x, y), members, len(members) == circle.ranks)
    sheet.height = circle.y + ROUND + 46
    zero = timeline.began
    moved = [one for one in sums if one.source != one.target]
    rows = ((1e3 * (one.end - zero), *one[:3], listed([str(rank) for rank in one.members])) for one in moved)
    return Picture(sheet, _summary(timeline, sums), table(COLUMNS, rows), clock=Clock.of(timeline, _says(sums)))


def _draw_devices(sheet: Sheet, circle: _Circle, sums: Sequence[Sum], per_machine: int | None) -> None:
    """Draw machines, the edges that are used, and over them the devices with empty slots."""
    if per_machine:
        for number, left in enumerate((sheet.width / 2 + 4, 4.0)):  # the circle begins at the right
            draw_machine(sheet, left, circle.y - ROUND - 46, sheet.width / 2 - 8, 2 * ROUND + 86, f"machine {number}")
    with sheet.group(stroke="currentColor", stroke_opacity=0.35, stroke_width=2):
        for one, other in sorted({(min(s.source, s.target), max(s.source, s.target)) for s in sums}):
            if one != other:
                sheet.line(*circle.center(one), *circle.center(other))
    for rank in range(circle.ranks):
        (x, y), (width, height) = circle.center(rank), circle.size
        draw_device(sheet, x - width / 2, y - height / 2, width, height, rank)
        with sheet.group(stroke="currentColor", stroke_opacity=0.25, fill="none"):
            for piece in range(circle.ranks):
                sheet.circle(*circle.slot(rank, piece), circle.radius)


def _draw_sent(sheet: Sheet, circle: _Circle, timeline: Timeline) -> None:
    """Write under each device the bytes that it has sent so far."""
    received = [span for span in timeline.spans if span.kind == "transfer" and span.name in RECEIVING]
    for rank in range(circle.ranks):
        (x, y), (_, height) = circle.center(rank), circle.size
        sent = sorted((span.end, span.bytes) for span in received if span.peer == rank)
        times = [timeline.began, *dict(sent), math.inf]
        for start, end in pairwise(times):
            text = f"sent {data_size(sum(count for when, count in sent if when <= start))}"
            with sheet.group(
                **moving([share_of(timeline, start, end)], HALF), text_anchor="middle", font_size=11, **HALO
            ):
                sheet.text(x, y + height / 2 + 13, text)


def _draw_pie(sheet: Sheet, circle: _Circle, at: tuple[float, float], members: Members, is_full: bool) -> None:
    sheet.circle(*at, circle.radius, fill=BACKGROUND, stroke="currentColor", stroke_width=2.5 if is_full else 1)
    for rank in members:
        sheet.path(circle.wedge(*at, rank), fill=RANKS[rank].fill)


def _says(sums: Sequence[Sum]) -> Iterator[tuple[float, str]]:
    """Sentences about the pieces on their way and those complete, for each change."""
    most = max(len(one.members) for one in sums)
    for when in sorted({time for one in sums for time in (one.start, one.end) if time < math.inf}):
        now = [one for one in sums if one.start <= when < one.end]
        flying = sum(one.source != one.target for one in now)
        done = sum(one.source == one.target and len(one.members) == most for one in now)
        yield when, f"{counted(flying, 'piece')} on the way; {done} complete, on all ranks together."


def _summary(timeline: Timeline, sums: Sequence[Sum]) -> str:
    most = max(len(one.members) for one in sums)
    complete = sum(one.end == math.inf and len(one.members) == most for one in sums) // timeline.world_size
    what = f"the sum over {most} ranks" if most > 1 else "from one rank each"
    who = f"{counted(timeline.world_size, 'rank')}, {timeline.origin}"
    return f"{who}: in the end each has {counted(complete, 'piece')} complete, {what}."
