"""Who holds what in a training step: every rank a device, with its parameters, gradients and optimizer state as blocks.

    rank 0                     rank 1                  a row is a kind, cut into the shards of all ranks;
    |computes layer 2 [0123]|  |computes ...    |      a block is there, or somebody else has it
    |parameters   [0][ ][ ]|   |[ ][1][ ]       |      a layer that is gathered comes, computes and goes
    |gradients    [0][ ][ ]|   |[ ][1][ ]       |
    |####---          812 kB|  |                |      memory, all devices on one scale
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from course_lib.figures.axis import data_size, listed
from course_lib.figures.costs import MEMORY_PARTS
from course_lib.figures.devices import draw_device
from course_lib.figures.frame import begin
from course_lib.figures.lanes import began
from course_lib.figures.palette import PAPER, STYLES
from course_lib.figures.picture import Clock, Picture, table
from course_lib.figures.svg import Sheet, moving
from course_lib.timeline import Timeline

if TYPE_CHECKING:
    from course_lib.instruments.ledger import Bytes

KINDS = {"parameters": 1, "gradients": 1, "optimizer": 2}  # bytes of each, in bytes of the parameters
PARTS = {**{kind: MEMORY_PARTS[kind] for kind in KINDS}, "gathered": STYLES["transfer"]._replace(label="gathered layer")}
PARTS |= {"activations": MEMORY_PARTS["activations"]}
LEFT, GAP, ROW, BLOCK, HIGH = 76.0, 10.0, 26.0, 18.0, 154.0  # pixels: of names; between; of a row and block; of a device
SHARED = 0.3  # a rank that holds less of a kind than this holds only its shard
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


class Shape(NamedTuple):
    """The places in the picture. whole: bytes of all parameters.  most: bytes of a full memory bar."""

    ranks: int
    width: float
    top: float
    whole: int
    most: int

    @property
    def column(self) -> float:
        return (self.width - LEFT - GAP * self.ranks) / self.ranks

    def left(self, rank: int) -> float:
        return LEFT + rank * (self.column + GAP)

    def block(self, rank: int, row: int, shard: int) -> tuple[float, float, float, float]:
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
    peak = max((one for own in moments for one in own), key=lambda one: one.total)
    used = {part: style for part, style in PARTS.items() if any(one.size(part) for own in moments for one in own)}
    sheet, top = begin(width, title, [timeline.origin], used)
    shape = Shape(len(moments), width, top + 20, whole, max(most, peak.total))
    zero, length = began(timeline), timeline.makespan
    still = (peak.when - zero) / length + 1e-6
    for row, name in enumerate(("at work", "parameters", "gradients", "optimizer", "memory")):
        sheet.text(LEFT - 6, shape.top + 20 + ROW * row, name, text_anchor="end", font_size=11)
    for rank, own in enumerate(moments):
        draw_device(sheet, shape.left(rank), shape.top, shape.column, HIGH, rank)
        times = [*((max(one.when, zero) - zero) / length for one in own), 2.0]
        _draw_rank(sheet, shape, rank, own, list(pairwise(times)), still)
    _draw_travel(sheet, shape, timeline)
    sheet.height = shape.top + HIGH + 10
    rows = ((1e3 * (m.when - zero), r, m.what, *map(m.size, PARTS)) for r, own in enumerate(moments) for m in own)
    says = [(m.when, f"rank 0 {m.what} and holds {data_size(m.total)}.") for m in moments[0]]
    return Picture(sheet, _summary(timeline, moments, whole), table(COLUMNS, rows), clock=Clock.of(timeline, says))


def _draw_rank(
    sheet: Sheet, shape: Shape, rank: int, own: Sequence[Moment], periods: Sequence[tuple[float, float]], still: float
) -> None:
    """Draw what changes on a rank: each look of a row with the periods in which it is seen."""

    def draw(look: Callable[[Moment], Hashable], draw_one: Callable[[Moment], object]) -> None:
        seen: dict[Hashable, list[int]] = defaultdict(list)
        for number, moment in enumerate(own):
            seen[look(moment)].append(number)
        for numbers in seen.values():
            with sheet.group(**moving([periods[n] for n in numbers], still)):
                draw_one(own[numbers[0]])

    end = own[-2].held  # as the update begins
    for row, (kind, size) in enumerate(KINDS.items(), 1):
        is_shared = getattr(end, kind) < SHARED * size * shape.whole
        share = lambda m, kind=kind, size=size: getattr(m.held, kind) / size / shape.whole  # noqa: E731
        _draw_blocks(sheet, shape, rank, row, "", dict.fromkeys(range(shape.ranks), 1.0))
        draw(share, lambda m, kind=kind, row=row, share=share, one=is_shared: _draw_blocks(
            sheet, shape, rank, row, kind, dict(_filled(share(m), rank if one else None, shape.ranks))))  # fmt: skip
    draw(lambda m: (m.what, m.gathered > 0), lambda m: _draw_work(sheet, shape, rank, m))
    draw(lambda m: tuple(map(m.size, PARTS)), lambda m: _draw_memory(sheet, shape, rank, m))


def _filled(share: float, rank: int | None, ranks: int) -> Iterator[tuple[int, float]]:
    """How full each shard's place is. rank: the one that alone is held here."""
    for shard in range(ranks) if rank is None else [rank]:
        full = min(1.0, share * ranks - (shard if rank is None else 0))
        if full > 0:
            yield shard, full


def _draw_blocks(sheet: Sheet, shape: Shape, rank: int, row: int, part: str, shards: dict[int, float]) -> None:
    """Draw shards of a part, or where they would be."""
    for shard, full in shards.items():
        x, y, width, height = shape.block(rank, row, shard)
        if part:
            ink = sheet.fill(part, PARTS[part])
            sheet.box(x, y, width * full, height, fill=ink, stroke="currentColor", stroke_width=0.7)
        else:
            sheet.box(x, y, width, height, fill="none", stroke="currentColor", stroke_opacity=0.4, stroke_dasharray="2,2")
            sheet.text(x + width / 2, y + 13, shard, font_size=11, text_anchor="middle", fill_opacity=0.6)


def _draw_work(sheet: Sheet, shape: Shape, rank: int, moment: Moment) -> None:
    if moment.gathered:
        _draw_blocks(sheet, shape, rank, 0, "gathered", dict.fromkeys(range(shape.ranks), 1.0))
    (x, y, *_), ink = shape.block(rank, 0, 0), {"fill": PAPER} if moment.gathered else {}
    sheet.text(x + 3, y + 13, moment.what, font_size=11, **ink)


def _draw_memory(sheet: Sheet, shape: Shape, rank: int, moment: Moment) -> None:
    (x, y, _, height), room = shape.block(rank, 4, 0), shape.column - 12
    for part, style in PARTS.items():
        width = room * moment.size(part) / shape.most
        if width:
            sheet.box(x, y, width, height, fill=sheet.fill(part, style), stroke="currentColor", stroke_width=0.5)
        x += width
    x, y, *_ = shape.block(rank, 4, 0)
    sheet.text(x + room, y + height + 14, data_size(moment.total), text_anchor="end", font_size=11)


def _draw_travel(sheet: Sheet, shape: Shape, timeline: Timeline) -> None:
    """Draw blocks on their way: gathered shards to where a layer is at work, gradients to whose shard they are."""
    found = defaultdict(list)
    for span in timeline.spans:
        if span.kind == "transfer" and span.bytes > shape.whole / 1000:
            start, end = ((when - began(timeline)) / timeline.makespan for when in (span.start, span.end))
            found[span.rank, span.name].append((start, end))
    for (target, name), periods in found.items():
        for source in range(shape.ranks):
            if source != target:
                _draw_flight(sheet, shape, name, source, target, periods)


def _draw_flight(
    sheet: Sheet, shape: Shape, name: str, source: int, target: int, periods: list[tuple[float, float]]
) -> None:
    if name == "all_reduce" and target != (source + 1) % shape.ranks:  # a ring
        return
    is_gather = name == "all_gather"
    shard, row, part = (source, 1, "gathered") if is_gather else (target, 2, "gradients")
    (x, y, width, height), (to_x, to_y, *_) = shape.block(source, row, shard), shape.block(target, row - is_gather, shard)
    flies = {"data_fly": f"{to_x - x:.1f} {to_y - y:.1f}"}
    with sheet.group(**moving(periods), **flies):
        sheet.box(x, y + 3, width, height - 6, fill=sheet.fill(part, PARTS[part]), stroke="currentColor")


def _summary(timeline: Timeline, moments: Sequence[Sequence[Moment]], whole: int) -> str:
    before, peak = moments[0][-2].held, max(one.total for one in moments[0])
    shared = [MEMORY_PARTS[kind].label for kind, size in KINDS.items() if getattr(before, kind) < SHARED * size * whole]
    what = f"only its shard of {listed(shared)}" if shared else "everything, like all others"
    who = f"{len(moments)} ranks, {timeline.origin}"
    return f"{who}: each holds {what}; {data_size(before.total)} before the update, and {data_size(peak)} at most."
