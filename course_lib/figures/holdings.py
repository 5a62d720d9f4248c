"""Who holds what in a training step: every rank a device, with its parameters, gradients and optimizer state as blocks.

rank 0                     rank 1                  a row is a kind, cut into the shards of all ranks;
|computes layer 2 [0123]|  |computes ...    |      a block is there, or somebody else has it
|parameters   [0][ ][ ]|   |[ ][1][ ]       |      a layer that is gathered comes, computes and goes
|gradients    [0][ ][ ]|   |[ ][1][ ]       |
|####---          812 kB|  |                |      memory, all devices on one scale
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from course_lib.figures.axis import listed, memory_size
from course_lib.figures.costs import MEMORY_PARTS
from course_lib.figures.frame import begin
from course_lib.figures.lanes import share_of
from course_lib.figures.palette import PAPER, STYLES
from course_lib.figures.picture import Clock, Picture, table
from course_lib.figures.svg import Sheet, moving
from course_lib.figures.vocabulary import draw_device
from course_lib.timeline import Timeline

if TYPE_CHECKING:
    from course_lib.instruments.ledger import Bytes

KINDS = {"parameters": 1, "gradients": 1, "optimizer": 2}  # bytes of each, in bytes of the parameters
PARTS = {kind: MEMORY_PARTS[kind] for kind in (*KINDS, "activations")}
PARTS["gathered"] = STYLES["transfer"]._replace(label="gathered layer")
ROWS = "at work", *KINDS, "memory"
LEFT, GAP, ROW, BLOCK, HIGH = 76.0, 10.0, 26.0, 18.0, 154.0  # pixels: names; between; row, block and device
SHARED = 0.7  # a rank that holds less of a kind than this holds only its shard
COLUMNS = "time (ms)", "rank", "does", *(f"{style.label} (bytes)" for style in PARTS.values())


class Moment(NamedTuple):
    """A rank at a moment. what: its activity from then on.  gathered: bytes of layers that are whole only now."""

    when: float
    what: str
    held: Bytes
    gathered: int

    def size(self, part: str) -> int:
        return self.gathered if part == "gathered" else getattr(self.held, part)

    @property
    def total(self) -> int:
        return self.held.total + self.gathered

    def look(self, row: int) -> Hashable:
        """All that the look of a row depends on."""
        if ROWS[row] in KINDS:
            return self.size(ROWS[row])
        return tuple(map(self.size, PARTS)) if row else (self.what, self.gathered)


class _Places(NamedTuple):
    """The places in the picture. whole: bytes of all parameters.  most: bytes of a full memory bar."""

    ranks: int
    column: float  # its width
    top: float
    whole: int
    most: int

    def left(self, rank: int) -> float:
        return LEFT + rank * (self.column + GAP)

    def block(self, rank: int, row: int, shard: int = 0) -> tuple[float, float, float, float]:
        """Left, top, width and height of a shard's place on a rank; row 0 is the layer that computes."""
        room = (self.column - 12) / self.ranks
        return self.left(rank) + 6 + room * shard, self.top + 7 + ROW * row, room, BLOCK


def holdings(
    timeline: Timeline,
    moments: Sequence[Sequence[Moment]],
    whole: int,
    most: int = 0,
    width: int = 840,
    title: str | None = None,
) -> Picture:
    """Draw a step. moments: by rank.  whole: bytes of the model's parameters.

    most: bytes at the end of the memory bars; by default the most that a rank holds.
    """
    everything = [one for own in moments for one in own]
    peak = max(everything, key=lambda one: one.total)
    used = {part: style for part, style in PARTS.items() if any(one.size(part) for one in everything)}
    sheet, top = begin(width, title, [timeline.origin], used)
    ranks, zero, length = len(moments), timeline.began, timeline.makespan
    places = _Places(ranks, (width - LEFT) / ranks - GAP, top + 20, whole, max(most, peak.total))
    for row, name in enumerate(ROWS):
        sheet.text(LEFT - 6, places.top + 20 + ROW * row, name, text_anchor="end", font_size=11)
    for rank, own in enumerate(moments):
        draw_device(sheet, places.left(rank), places.top, places.column, HIGH, rank)
        times = [*((max(one.when, zero) - zero) / length for one in own), 2.0]
        _draw_rank(sheet, places, rank, own, list(pairwise(times)), (peak.when - zero) / length + 1e-6)
    _draw_travel(sheet, places, timeline)
    sheet.height = places.top + HIGH + 10
    rows = ((1e3 * (m.when - zero), r, m.what, *map(m.size, PARTS)) for r, own in enumerate(moments) for m in own)
    says = [(m.when, f"rank 0 {m.what} and holds {memory_size(m.total)}.") for m in moments[0]]
    return Picture(sheet, _summary(timeline, moments, whole), table(COLUMNS, rows), clock=Clock.of(timeline, says))


def _draw_rank(
    sheet: Sheet,
    places: _Places,
    rank: int,
    own: Sequence[Moment],
    periods: Sequence[tuple[float, float]],
    still: float,
) -> None:
    """Draw each look of each row with the periods in which a rank has it."""
    shared = _shared(own[-2], places.whole)
    for row in range(len(ROWS)):
        seen: dict[Hashable, list[int]] = defaultdict(list)
        for number, moment in enumerate(own):
            seen[moment.look(row)].append(number)
        if ROWS[row] in KINDS:
            _draw_blocks(sheet, places, rank, row, "", dict.fromkeys(range(places.ranks), 1.0))
        for numbers in seen.values():
            with sheet.group(**moving([periods[n] for n in numbers], still)):
                _draw_row(sheet, places, rank, row, own[numbers[0]], shared)


def _draw_row(sheet: Sheet, places: _Places, rank: int, row: int, moment: Moment, shared: Sequence[str]) -> None:
    kind = ROWS[row]
    if kind in KINDS:
        share = places.ranks * moment.size(kind) / KINDS[kind] / places.whole  # in shards
        full = {rank: share} if kind in shared else {n: share - n for n in range(places.ranks)}
        _draw_blocks(sheet, places, rank, row, kind, {n: min(1.0, one) for n, one in full.items() if one > 0})
    elif row == 0:
        is_whole = dict.fromkeys(range(places.ranks), 1.0) if moment.gathered else {}
        _draw_blocks(sheet, places, rank, row, "gathered", is_whole)
        x, y, *_ = places.block(rank, row)
        sheet.text(x + 3, y + 13, moment.what, font_size=11, fill=PAPER if is_whole else "currentColor")
    else:
        _draw_memory(sheet, places, rank, moment)


def _draw_blocks(sheet: Sheet, places: _Places, rank: int, row: int, part: str, shards: Mapping[int, float]) -> None:
    """Draw shards of a part, each as full as it is; without a part, where they would be."""
    for shard, full in shards.items():
        x, y, width, height = places.block(rank, row, shard)
        look: Any = {} if part else {"stroke_opacity": 0.4, "stroke_dasharray": "2,2"}
        ink = sheet.fill(part, PARTS[part]) if part else "none"
        sheet.box(x, y, width * full, height, fill=ink, stroke="currentColor", stroke_width=0.7, **look)
        if not part:
            sheet.text(x + width / 2, y + 13, shard, font_size=11, text_anchor="middle", fill_opacity=0.6)


def _draw_memory(sheet: Sheet, places: _Places, rank: int, moment: Moment) -> None:
    (left, y, _, height), room = places.block(rank, len(ROWS) - 1), places.column - 12
    x = left
    for part, style in PARTS.items():
        width = room * moment.size(part) / places.most
        sheet.box(x, y, width, height, fill=sheet.fill(part, style), stroke="currentColor", stroke_width=0.5)
        x += width
    sheet.text(left + room, y + height + 14, memory_size(moment.total), text_anchor="end", font_size=11)


def _draw_travel(sheet: Sheet, places: _Places, timeline: Timeline) -> None:
    """Draw blocks on their way: gathered shards to where a layer is at work, gradients to whose shard they are."""
    found = defaultdict(list)
    for span in timeline.spans:
        if span.kind == "transfer" and span.bytes > places.whole / 1000:
            found[span.rank, span.name].append(share_of(timeline, span.start, span.end))
    for (target, name), periods in found.items():
        neighbor = (target - 1) % places.ranks
        for source in [neighbor] if name == "all_reduce" else {*range(places.ranks)} - {target}:
            is_gather = name == "all_gather"
            shard, row, part = (source, 1, "gathered") if is_gather else (target, 2, "gradients")
            (x, y, width, height), end = places.block(source, row, shard), places.block(target, row - is_gather, shard)
            with sheet.group(**moving(periods), data_fly=f"{end[0] - x:.1f} {end[1] - y:.1f}"):
                sheet.box(x, y + 3, width, height - 6, fill=sheet.fill(part, PARTS[part]), stroke="currentColor")


def _shared(before: Moment, whole: int) -> list[str]:
    """The kinds of which a rank holds only its shard. before: its update."""
    return [kind for kind, size in KINDS.items() if before.size(kind) < size * whole * SHARED]


def _summary(timeline: Timeline, moments: Sequence[Sequence[Moment]], whole: int) -> str:
    before, peak = moments[0][-2], max(one.total for one in moments[0])
    shared = [MEMORY_PARTS[kind].label for kind in _shared(before, whole)]
    what = f"only its shard of {listed(shared)}" if shared else "everything, like all others"
    who = f"{len(moments)} ranks, {timeline.origin}"
    return f"{who}: each holds {what}; {memory_size(before.total)} before the update, and {memory_size(peak)} at most."
