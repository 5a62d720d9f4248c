"""The picture of a mesh and its traffic: machines with ranks in them, and lines as wide as the bytes between them.

    .- machine 0 -----.   .- machine 1 -----.      two stages lie below each other, or else two tensor ranks,
    | [ 0 ]=====[ 1 ] |   | [ 4 ]=====[ 5 ] |      or two replicas; all others side by side
    |   |         |   |   |   |         |   |
    | [ 2 ]=====[ 3 ] |   | [ 6 ]=====[ 7 ] |      axis           sent in a step    predicted
    '-----------------'   '-----------------'      == tensor      1.05 MB           the same

A collective is drawn as its ring: each rank sends to the next, and the last to the first. In a player, a click on a
rank lights up all that it sends and receives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from course_lib.figures.axis import data_size, listed
from course_lib.figures.frame import MARGIN, begin
from course_lib.figures.lanes import share_of
from course_lib.figures.palette import LINES
from course_lib.figures.picture import Clock, Picture, table
from course_lib.figures.svg import HALO, Sheet, moving
from course_lib.figures.vocabulary import draw_device, draw_machine

if TYPE_CHECKING:
    from lessons.L08_combining_mechanisms.runs import MeshStep

Sizes = tuple[int, int, int]
Pair = tuple[int, int]
BytesByAxis = Mapping[str, Mapping[Pair, int]]

AXES = ("dp", "pp", "tp")
NAMES = {"tp": "tensor (tp)", "pp": "pipeline (pp)", "dp": "data (dp)", "all": "all ranks"}
TALK = {"tp": "tensor ranks", "pp": "stages", "dp": "replicas"}
LOOKS = dict(zip(("tp", "pp", "dp"), LINES, strict=False))
PITCH, HIGH, SIZE = 96.0, 66.0, 24.0  # pixels: between ranks at most, between stages; of a rank
BULGE = {"tp": -34.0, "pp": -34.0, "dp": 34.0}  # of a line past other ranks, at its middle; some bend upwards
SHARED = 0.7  # of the pitch: between replicas
THIN, WIDE = 1.5, 12.0  # pixels: of the lines for the fewest and for the most bytes
PULSE = {"class": "course-pulse", "stroke_width": 4.0, "stroke_dasharray": "0,8", "stroke_linecap": "round"}  # dots
GLIMPSE = 0.02  # share of the step: a line is seen at least this long
ROW, INDENT, RIGHT = 17.0, 40.0, (0.75, 0.97)
COLUMNS = "axis", "from rank", "to rank", "sent (bytes)"


def mesh_map(
    mesh: Sizes,
    step: MeshStep,
    predicted: Mapping[str, int] | None = None,
    per_machine: int | None = None,
    width: int = 420,
    title: str | None = None,
) -> Picture:
    """Draw a mesh and the bytes that its ranks send each other in a step.

    mesh: sizes of dp, pp and tp; rank = (d x pp + p) x tp + t.
    step: with its transfers; a player shows lines while they are in use.
    predicted: bytes of all ranks together, by axis: "dp", "pp", "tp", and "all" for messages among all ranks.
    per_machine: the number of ranks on each machine; None for one machine.
    """
    sent, origin = step.sent, step.timeline.origin
    ranks = mesh[0] * mesh[1] * mesh[2]
    sheet, y = begin(width, title, [origin])
    layout = _MeshLayout(mesh, width, y + 46)
    _draw_traffic(sheet, layout, sent, ranks)
    _draw_machines(sheet, layout, per_machine or ranks)
    _draw_pulses(sheet, layout, step)
    for rank in range(ranks):
        with sheet.group(data_name=f"rank {rank}", cursor="pointer"):
            x, y = layout.place(rank)
            draw_device(sheet, x - SIZE / 2, y - SIZE / 2, SIZE, SIZE, rank, is_small=True)
    sheet.height = _draw_table(sheet, sent, predicted, layout.bottom)
    clock = Clock.of(step.timeline, _says(step)) if step.transfers else None
    lights, rows = [f"rank {rank}" for rank in range(ranks)], table(COLUMNS, _rows(sent))
    return Picture(sheet, _summary(mesh, sent, predicted, origin), rows, clock=clock, lights=lights)


class _MeshLayout(NamedTuple):
    """The places of ranks. top: of the first row."""

    mesh: Sizes
    width: float
    top: float

    @property
    def down(self) -> int:
        """The axis whose two ranks lie below each other; -1 if no axis has two."""
        return next((axis for axis in (1, 2, 0) if self.mesh[axis] == 2), -1)

    def column(self, at: Sequence[int]) -> float:
        """The place of a rank in its row. at: its place on each axis."""
        column = 0.0
        for axis, size in enumerate(self.mesh):
            if axis != self.down and size > 1:
                column = column * (size + SHARED) + at[axis]
        return column

    @property
    def gaps(self) -> float:
        return self.column([size - 1 for size in self.mesh])

    @property
    def pitch(self) -> float:
        return min(PITCH, (self.width - 76) / (self.gaps or 1))

    def place(self, rank: int) -> tuple[float, float]:
        _, pp, tp = self.mesh
        at = rank // (pp * tp), rank // tp % pp, rank % tp
        left = (self.width - self.pitch * self.gaps) / 2
        return left + self.pitch * self.column(at), self.top + HIGH * at[self.down] * (self.down >= 0)

    @property
    def bottom(self) -> float:
        return self.top + HIGH * (self.down >= 0) + 62

    def curve(self, axis: str, one: int, other: int) -> tuple[str, float, float]:
        """The path between two ranks, straight where they are neighbors, and its middle."""
        (x1, y1), (x2, y2) = self.place(one), self.place(other)
        x, y = (x1 + x2) / 2, (y1 + y2) / 2
        bulge = BULGE[axis] if abs(x1 - x2) > 1.01 * self.pitch else 0.0
        return f"M{x1:.1f},{y1:.1f}Q{x:.1f},{y + 2 * bulge:.1f} {x2:.1f},{y2:.1f}", x, y + bulge


def between(sent: Mapping[Pair, int]) -> dict[Pair, int]:
    """Bytes between two ranks, both ways, the lower rank first."""
    both = Counter[Pair]()
    for (source, target), count in sent.items():
        both[min(source, target), max(source, target)] += count
    return {pair: count for pair, count in sorted(both.items()) if count}


def _draw_machines(sheet: Sheet, layout: _MeshLayout, per_machine: int) -> None:
    ranks = layout.mesh[0] * layout.mesh[1] * layout.mesh[2]
    for number, first in enumerate(range(0, ranks, per_machine)):
        (left, top), (right, bottom) = layout.place(first), layout.place(first + per_machine - 1)
        edge = min(36.0, 0.5 * layout.pitch - 2)
        draw_machine(sheet, left - edge, top - 32, right - left + 2 * edge, bottom - top + 60, f"machine {number}")


def _draw_traffic(sheet: Sheet, layout: _MeshLayout, sent: BytesByAxis, ranks: int) -> None:
    """Draw all lines, and over them those of each rank, with their bytes, for when it is lit up."""
    lines = [(axis, *one) for axis in LOOKS for one in between(sent.get(axis, {})).items()]
    most = max((count for *_, count in lines), default=1)
    with sheet.group(**{"class": "course-fades"}):
        for line in lines:
            _draw_line(sheet, layout, most, *line)
    for rank in range(ranks):
        with sheet.group(data_light=f"rank {rank}", visibility="hidden"):
            for axis, pair, count in lines:
                if rank in pair:
                    _draw_line(sheet, layout, most, axis, pair, count)
                    _draw_bytes(sheet, layout, axis, pair, rank, count)


def _draw_line(sheet: Sheet, layout: _MeshLayout, most: int, axis: str, pair: Pair, count: int) -> None:
    tip = f"{NAMES[axis]}: {count:,} bytes between rank {pair[0]} and rank {pair[1]}, both ways"
    look = {"stroke": LOOKS[axis].color, "stroke_dasharray": LOOKS[axis].dash or "none"}
    width = THIN + (WIDE - THIN) * count / most
    sheet.path(layout.curve(axis, *pair)[0], tip, stroke_width=width, fill="none", **look)


def _draw_bytes(sheet: Sheet, layout: _MeshLayout, axis: str, pair: Pair, rank: int, count: int) -> None:
    """Write the bytes of a line nearer to the other rank."""
    _, x, y = layout.curve(axis, *pair)
    other, _ = layout.place(pair[0] if rank == pair[1] else pair[1])
    sheet.text(x + 0.1 * (other - x), y + 4, data_size(count), text_anchor="middle", font_size=11, **HALO)


def _draw_pulses(sheet: Sheet, layout: _MeshLayout, step: MeshStep) -> None:
    """Draw dots over each line while a message is on its way, long enough to be seen."""
    for axis in LOOKS:
        for pair, spans in step.transfers.get(axis, {}).items():
            shares = [share_of(step.timeline, span.start, span.end) for span in spans]
            times = moving((start, max(end, start + GLIMPSE)) for start, end in shares)
            with sheet.group(**times, fill="none", stroke="currentColor", **PULSE):
                sheet.path(layout.curve(axis, min(pair), max(pair))[0])


def _says(step: MeshStep) -> Iterator[tuple[float, str]]:
    """Who talks, whenever that changes."""
    spans = [(axis, span) for axis in LOOKS for spans in step.transfers.get(axis, {}).values() for span in spans]
    said = ""
    for when in sorted({time for _, span in spans for time in (span.start, span.end)}):
        axes = {axis for axis, span in spans if span.start <= when < span.end}
        text = f"{listed([TALK[axis] for axis in LOOKS if axis in axes] or ['nobody'])} on the line."
        if text != said:
            yield when, text
        said = text


def _draw_table(sheet: Sheet, sent: BytesByAxis, predicted: Mapping[str, int] | None, y: float) -> float:
    """Draw the bytes sent on each axis, all ranks together, beside the predicted ones. Returns y below them."""
    room = sheet.width - 2 * MARGIN
    columns = [MARGIN + share * room for share in RIGHT]
    for x, text in zip(columns, ("sent in a step", "predicted") if predicted else ("sent in a step",), strict=False):
        sheet.text(x, y + 12, text, text_anchor="end", font_size=11)
    for axis in (axis for axis in NAMES if axis in sent):
        y += ROW
        if axis in LOOKS:
            color, dash, _ = LOOKS[axis]
            sheet.line(MARGIN, y + 8, MARGIN + 30, y + 8, stroke=color, stroke_width=5, stroke_dasharray=dash or "none")
        sheet.text(MARGIN + INDENT, y + 12, NAMES[axis])
        count = total(sent, axis)
        sheet.text(columns[0], y + 12, data_size(count), text_anchor="end")
        if predicted is not None:
            text = "the same" if predicted[axis] == count else data_size(predicted[axis])
            sheet.text(columns[1], y + 12, text, text_anchor="end")
    return y + ROW + 4


def total(sent: BytesByAxis, axis: str) -> int:
    """Bytes that all ranks together send on an axis."""
    return sum(sent.get(axis, {}).values())


def _summary(mesh: Sizes, sent: BytesByAxis, predicted: Mapping[str, int] | None, origin: str) -> str:
    sizes = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, mesh, strict=True))
    counts = ", ".join(f"{NAMES[axis]} {data_size(total(sent, axis))}" for axis in LOOKS if axis in sent)
    text = f"{mesh[0] * mesh[1] * mesh[2]} ranks as a grid of {sizes}; sent in a step ({origin}): {counts}"
    if predicted is None:
        return f"{text}."
    same = all(total(sent, axis) == predicted[axis] for axis in sent)
    return f"{text}; {'to the byte what' if same else 'not what'} was predicted."


def _rows(sent: BytesByAxis) -> Iterator[tuple[object, ...]]:
    for axis in (axis for axis in NAMES if axis in sent):
        for (source, target), count in sorted(sent[axis].items()):
            yield NAMES[axis], source, target, count
