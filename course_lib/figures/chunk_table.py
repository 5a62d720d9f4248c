"""The picture of a collective, chunk by chunk: the pieces of each rank, and those on their way.

               piece 0    1      2
    rank 0     | 0    | 0    | 0 2  |         a number is a rank that is in the sum, in a color of its own
    rank 1     | 01   | 1    | 1    |
    rank 2     | 2    | 12   | 2    |

A row is a rank, a column a piece of the tensor. All moments are drawn, each with its time: a player shows the moment at
its cursor; without a player the picture shows the middle one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from course_lib.figures.axis import counted, duration, listed
from course_lib.figures.frame import MARGIN, begin
from course_lib.figures.lanes import began
from course_lib.figures.palette import INK, RANKS
from course_lib.figures.picture import Picture, table
from course_lib.figures.svg import BACKGROUND, Sheet, moving
from course_lib.timeline import Timeline

GUTTER, GAP, HIGH, WIDEST = 62.0, 2.0, 14.0, 91.0  # pixels: beside the rows, between them; of a number, and of a piece
IN_A_LINE, HALF = 4, 0.5  # numbers; of the time
COLUMNS = "received (ms)", "from rank", "to rank", "piece", "ranks in the sum"
Cell = tuple[float, float, float, float]  # left, top, width and height
Members = tuple[int, ...]  # the ranks in a sum


class Sum(NamedTuple):
    """A sum that a rank had, or sent to another one, from start to end (seconds on the timeline)."""

    source: int
    target: int
    piece: int
    members: Members
    start: float
    end: float


def chunk_table(timeline: Timeline, sums: Sequence[Sum], width: int = 415, title: str | None = None) -> Picture:
    """Draw the content of every rank over time. sums: those of ranks, and those on their way."""
    sheet, top = begin(width, title, [timeline.origin])
    y, ranks, zero, whole = top + 10, timeline.world_size, began(timeline), timeline.makespan
    sheet.text(MARGIN, y, "A number is a rank that is in the sum.", font_size=11)
    with sheet.group(data_when="", text_anchor="end"):
        sheet.text(width - MARGIN, y, f"Half way, after {duration(HALF * whole)}:", font_size=11)
    wide, pitch = min(WIDEST, (width - GUTTER - MARGIN) / ranks), -(-ranks // IN_A_LINE) * HIGH + GAP
    cells = [
        [(GUTTER + n * wide, y + 24 + r * pitch, wide - GAP, pitch - GAP) for n in range(ranks)] for r in range(ranks)
    ]
    _draw_frame(sheet, cells)
    seen = defaultdict(list)
    for one in sums:
        seen[one[:4]].append(((one.start - zero) / whole, (one.end - zero) / whole))
    for (source, target, piece, members), periods in sorted(seen.items(), key=lambda one: one[0][0] != one[0][1]):
        stays = source == target
        flies = {} if stays else {"data_fly": (target - source) * pitch}
        with sheet.group(**moving(periods, HALF if stays else None), **flies, text_anchor="middle"):
            _draw_sum(sheet, cells[source][piece], members, not stays)
    sheet.height = y + 26 + ranks * pitch
    rows = (
        (1e3 * (one.end - zero), one.source, one.target, one.piece, listed([str(rank) for rank in one.members]))
        for one in sums
        if one.source != one.target
    )
    return Picture(sheet, _summary(timeline, sums), table(COLUMNS, rows))


def _draw_frame(sheet: Sheet, cells: Sequence[Sequence[Cell]]) -> None:
    with sheet.group(text_anchor="end", font_size=11):
        for rank, row in enumerate(cells):
            (x, y, width, height), (own, *_), (_, top, *_) = row[0], row[rank], cells[0][0]
            sheet.text(own + width / 2 + 4, top - 6, f"piece {rank}" if rank == 0 else rank)
            sheet.text(x - 8, y + height / 2 + 4, f"rank {rank}")
            for cell in row:
                sheet.box(*cell, fill="none", stroke="currentColor", stroke_opacity=0.4)


def _draw_sum(sheet: Sheet, cell: Cell, members: Sequence[int], is_flying: bool) -> None:
    x, y, width, _ = cell
    if is_flying:
        sheet.box(*cell, fill=BACKGROUND, stroke="currentColor", stroke_width=3)
    for one in members:
        left, top = x + width / IN_A_LINE * (one % IN_A_LINE), y + HIGH * (one // IN_A_LINE)
        sheet.box(left, top, width / IN_A_LINE, HIGH, fill=RANKS[one].fill)
        sheet.text(left + width / IN_A_LINE / 2, top + 11, one, font_size=11, fill=INK)


def _summary(timeline: Timeline, sums: Sequence[Sum]) -> str:
    most = max(len(one.members) for one in sums)
    complete = sum(one.end == math.inf and len(one.members) == most for one in sums) // timeline.world_size
    what = f"the sum over {most} ranks" if most > 1 else "from one rank each"
    who = f"{counted(timeline.world_size, 'rank')}, {timeline.origin}"
    return f"{who}: in the end each has {counted(complete, 'piece')} complete, {what}."
