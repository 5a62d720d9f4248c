r"""The picture of a mesh and its traffic: the ranks as a grid, with lines as wide as the bytes between them.

             1 ====== 5               tensor ranks side by side, stages below each other, replicas behind each other
           .'|      .'|
         0 ====== 4'  |               axis           sent in a step    predicted
         |   3 ===|== 7               == tensor      1.05 MB           the same
         | .'     | .'                -- pipeline    33 kB             the same
         2 ====== 6'                  .. data        427 kB            the same

A collective is drawn as its ring: each rank sends to the next, and the last to the first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from course_lib.figures.axis import data_size
from course_lib.figures.frame import MARGIN, begin, draw_legend
from course_lib.figures.lanes import began
from course_lib.figures.palette import LINES, PAPER, Style
from course_lib.figures.picture import Picture, table
from course_lib.figures.svg import HALO, Sheet, moving

if TYPE_CHECKING:
    from lessons.L08_combining_mechanisms.runs import MeshStep

Sizes = tuple[int, int, int]
BytesByAxis = Mapping[str, Mapping[tuple[int, int], int]]

AXES = ("dp", "pp", "tp")
NAMES = {"tp": "tensor (tp)", "pp": "pipeline (pp)", "dp": "data (dp)", "all": "all ranks"}
LOOKS = dict(zip(("tp", "pp", "dp"), LINES, strict=False))
STRIDES = {"dp": (0.62, -0.46), "pp": (0.0, 0.8), "tp": (1.15, 0.0)}  # to the next rank on an axis, right and down
BULGE, HIGHEST = 0.3, 70.0  # of a line that closes a ring: share of its length, at most in pixels
RADIUS, PITCH, EDGE = 11.0, 100.0, 58.0  # pixels: of a rank, of a step at most, around the grid
THIN, WIDE = 1.5, 12.0  # pixels: of the lines for the fewest and for the most bytes
PULSE = {"class": "course-pulse", "stroke_width": 4.0, "stroke_dasharray": "0,8", "stroke_linecap": "round"}  # dots
GLIMPSE = 0.02  # share of the step: a line is seen at least this long
ROW, INDENT, RIGHT = 17.0, 40.0, (0.75, 0.97)
COLUMNS = "axis", "from rank", "to rank", "sent (bytes)"
MACHINES = Style("machine 0", PAPER, PAPER), Style("machine 1", "#c4c4c4", "#c4c4c4")


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
    per_machine: the number of ranks on each of two machines; None for one machine.
    """
    sent, origin = step.sent, step.timeline.origin
    sheet, y = begin(width, title, [origin])
    layout = _MeshLayout.fit(mesh, width, y)
    _draw_lines(sheet, layout, sent)
    _draw_pulses(sheet, layout, step)
    for rank in range(mesh[0] * mesh[1] * mesh[2]):
        _draw_rank(sheet, rank, layout.place(rank), MACHINES[rank // per_machine % 2 if per_machine else 0])
    sheet.height = _draw_table(sheet, sent, predicted, layout.bottom, MACHINES if per_machine else ())
    return Picture(sheet, _summary(mesh, sent, predicted, origin), table(COLUMNS, _rows(sent)))


class _MeshLayout(NamedTuple):
    """The places of ranks. left, top: the center of rank 0.  pitch: pixels for a step of 1."""

    mesh: Sizes
    left: float
    top: float
    pitch: float

    @classmethod
    def fit(cls, mesh: Sizes, width: float, y: float) -> _MeshLayout:
        reach = [sum((n - 1) * abs(STRIDES[axis][i]) for axis, n in zip(AXES, mesh, strict=True)) for i in (0, 1)]
        pitch = min(PITCH, (width - 2 * EDGE) / max(reach[0], 1e-9), 1.15 * PITCH / max(reach[1], 1e-9))
        pitch = max(pitch, 2.1 * RADIUS / STRIDES["dp"][0])  # so ranks do not touch
        up = (mesh[0] - 1) * -STRIDES["dp"][1] * pitch
        bulge = min(BULGE * (mesh[2] - 1) * STRIDES["tp"][0] * pitch, HIGHEST) / 2 if mesh[2] > 2 else 0.0
        return cls(mesh, (width - reach[0] * pitch) / 2, y + up + bulge + 2 * RADIUS, pitch)

    def place(self, rank: int) -> tuple[float, float]:
        _, pp, tp = self.mesh
        where = {"dp": rank // (pp * tp), "pp": rank // tp % pp, "tp": rank % tp}
        right, down = (sum(where[axis] * STRIDES[axis][i] for axis in AXES) for i in (0, 1))
        return self.left + right * self.pitch, self.top + down * self.pitch

    @property
    def bottom(self) -> float:
        return self.top + (self.mesh[1] - 1) * STRIDES["pp"][1] * self.pitch + 2 * RADIUS + 14

    def neighbors(self, axis: str, one: int, other: int) -> bool:
        """Whether two ranks lie side by side on an axis."""
        stride = {"dp": self.mesh[1] * self.mesh[2], "pp": self.mesh[2], "tp": 1}[axis]
        return abs(one - other) == stride


def between(sent: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    """Bytes between two ranks, both ways, the lower rank first."""
    both = Counter[tuple[int, int]]()
    for (source, target), count in sent.items():
        both[min(source, target), max(source, target)] += count
    return {pair: count for pair, count in sorted(both.items()) if count}


def _draw_lines(sheet: Sheet, layout: _MeshLayout, sent: BytesByAxis) -> None:
    lines = {axis: between(sent.get(axis, {})) for axis in LOOKS}
    most = max((count for of_axis in lines.values() for count in of_axis.values()), default=1)
    for axis, of_axis in lines.items():
        for (one, other), count in of_axis.items():
            tip = f"{NAMES[axis]}: {count:,} bytes between rank {one} and rank {other}, both ways"
            width = THIN + (WIDE - THIN) * count / most
            sheet.path(_line(layout, axis, one, other), tip, stroke_width=width, fill="none", **_look(axis))
    for axis, of_axis in lines.items():
        if of_axis:
            _label(sheet, layout, axis, of_axis)


def _draw_pulses(sheet: Sheet, layout: _MeshLayout, step: MeshStep) -> None:
    """Draw dots over each line while a message is on its way, long enough to be seen."""
    zero, whole = began(step.timeline), step.timeline.makespan
    for axis in LOOKS:
        for pair, spans in step.transfers.get(axis, {}).items():
            starts = [(span, (span.start - zero) / whole) for span in spans]
            times = moving((start, start + max(GLIMPSE, span.duration / whole)) for span, start in starts)
            with sheet.group(**times, fill="none", stroke="currentColor", **PULSE):
                sheet.path(_line(layout, axis, min(pair), max(pair)))


def _look(axis: str) -> dict[str, object]:
    return {"stroke": LOOKS[axis].color, "stroke_dasharray": LOOKS[axis].dash or "none"}


def _line(layout: _MeshLayout, axis: str, one: int, other: int) -> str:
    (x1, y1), (x2, y2) = layout.place(one), layout.place(other)
    if layout.neighbors(axis, one, other):
        return f"M{x1:.1f},{y1:.1f}L{x2:.1f},{y2:.1f}"
    # The line bends outwards: above tensor ranks, on other axes where the grid ends.
    right, down = (y1 - y2, x2 - x1) if axis != "tp" else (0.0, x1 - x2)
    bulge = min(BULGE, HIGHEST / math.hypot(right, down))
    right, down = (x1 + x2) / 2 + bulge * right, (y1 + y2) / 2 + bulge * down
    return f"M{x1:.1f},{y1:.1f}Q{right:.1f},{down:.1f} {x2:.1f},{y2:.1f}"


def _label(sheet: Sheet, layout: _MeshLayout, axis: str, lines: Mapping[tuple[int, int], int]) -> None:
    """Write the bytes of one line of an axis where nothing else is drawn: below, left of or right of the grid."""
    _, pp, tp = layout.mesh
    first = {"dp": pp * tp - 1, "pp": 0, "tp": (pp - 1) * tp}[axis]
    pair = next(pair for pair in lines if pair[0] == first and layout.neighbors(axis, *pair))
    (x1, y1), (x2, y2) = map(layout.place, pair)
    right, down, anchor = {"dp": (14, 16, "start"), "pp": (-12, 4, "end"), "tp": (0, 22, "middle")}[axis]
    x, y = (x1 + x2) / 2 + right, (y1 + y2) / 2 + down
    if axis == "dp" and layout.mesh[0] > 2:  # a curve is there
        x, y = x1 + right, y1 + RADIUS + 12
    sheet.text(x, y, data_size(lines[pair]), text_anchor=anchor, font_size=11, **HALO)


def _draw_rank(sheet: Sheet, rank: int, place: tuple[float, float], machine: Style) -> None:
    x, y = place
    size = 2 * RADIUS
    tip = f"rank {rank}, {machine.label}"
    sheet.box(x - RADIUS, y - RADIUS, size, size, tip=tip, rx=RADIUS, fill=machine.fill, stroke="currentColor")
    sheet.text(x, y + 4.5, rank, text_anchor="middle", font_weight="bold", fill=machine.text)


def _draw_table(
    sheet: Sheet, sent: BytesByAxis, predicted: Mapping[str, int] | None, y: float, machines: Sequence[Style]
) -> float:
    """Draw the bytes sent on each axis, all ranks together, beside the predicted ones. Returns y below them."""
    room = sheet.width - 2 * MARGIN
    columns = [MARGIN + share * room for share in RIGHT]
    draw_legend(sheet, {f"machine{number}": style for number, style in enumerate(machines)}, y - 2)
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
