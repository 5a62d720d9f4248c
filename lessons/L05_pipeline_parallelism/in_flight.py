r"""The micro-batches in flight: the number whose activations each rank holds, over time.

    rank 0      _/~~~\_/~\___     up when a forward begins, down when its backward has ended
    at most 3
    rank 1      __/~\_/~\____
    at most 1
                0   time

The axis is that of `gantt` with the same width, so the two can stand below each other.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from course_lib.figures.activations import Activations, held_activations
from course_lib.figures.axis import TIMES, counted, number
from course_lib.figures.chart import Axis, Chart, Curve, Label, Mark, Panel, Point
from course_lib.figures.frame import MARGIN
from course_lib.figures.gantt_chart import GUTTER
from course_lib.figures.palette import LINES
from course_lib.figures.picture import Picture, Row
from course_lib.timeline import Timeline

ROOM, ROW, GAP = 216.0, 24.0, 3.0  # pixels: of all rows, if each gets enough; of a row; between two


def in_flight(timeline: Timeline, width: int = 800, title: str | None = None, usual: float = 0.0) -> Picture:
    """Draw what each rank holds over time, the whole minibatch as high as a row.

    usual: seconds on the axis of time, see `gantt`.
    """
    ranks = held_activations(timeline)
    time, size = Axis.in_unit("time", timeline.makespan, TIMES, round((width - MARGIN - GUTTER) / 60), usual=usual)
    time = replace(time, high=time.high or 1, has_grid=False)
    all_of_them = len({span.micro_batch for span in timeline.spans} - {None})
    most = max([1.0, all_of_them, *(one.most for one in ranks)])
    height = max(ROW, ROOM / len(ranks) - GAP)
    panels = [_panel(one, most, size, replace(time, title="", ticks=()), height) for one in ranks]
    panels[-1] = replace(panels[-1], x=time, foot=GAP + MARGIN)
    rows: list[Row] = [{"rank": one.rank, "held at most (micro-batches)": one.most} for one in ranks]
    return Picture.of(Chart(panels, [timeline.origin], title, width), _summary(ranks, timeline.origin), rows)


def _panel(one: Activations, most: float, size: float, time: Axis, height: float) -> Panel:
    """A rank's row. size: the seconds of 1 on the time axis."""
    above = -2 - min(height / 2, 15)
    names = (f"rank {one.rank}", above, 12), (f"at most {number(one.most)}", -2, 11)
    marks: list[Mark] = [
        Point(0, 0, "", Label(name, -8, down, "end", font, is_bold=False)) for name, down, font in names
    ]
    steps = pairwise([(0.0, 0.0), *dict(one.steps).items()])  # of two events at once, the last
    stairs = [Point(when / size, n) for (_, before), (when, after) in steps for n in (before, after)]
    marks.append(Curve(f"rank {one.rank}", stairs, LINES[0], is_filled=True))
    return Panel(time, Axis("", 0, most, has_grid=False), marks, height, GUTTER, MARGIN, head=0.0, foot=GAP)


def _summary(ranks: list[Activations], origin: str) -> str:
    most, least = (choose(ranks, key=lambda one: one.most) for choose in (max, min))
    who = "each" if most.most == least.most else f"rank {most.rank}"
    other = "" if most.most == least.most else f", rank {least.rank} of up to {number(least.most)}"
    held = counted(most.most, "micro-batch")
    return f"Activations on {len(ranks)} ranks, {origin}: {who} holds those of up to {held}{other}."
