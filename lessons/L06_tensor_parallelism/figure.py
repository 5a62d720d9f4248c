"""The picture of an MLP whose two matrices are cut: the share of each rank, and all communication.

    forward             nothing                              all-reduce
               x          (f)       A        u          B        (g)       y
            [whole]             [0 1 2 3] [0 1 2 3]   [0]              [whole]
                                                      [1]
                                                      [2]
                                                      [3]
    backward           all-reduce                             nothing

A rank's share has the rank's color and pattern; a tensor that all of them hold is blank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from course_lib.figures.axis import counted, data_size, listed
from course_lib.figures.frame import MARGIN, begin
from course_lib.figures.palette import PAPER, RANKS, STYLES
from course_lib.figures.picture import Picture, table
from course_lib.figures.svg import BACKGROUND, Sheet, text_width

if TYPE_CHECKING:
    from lessons.L06_tensor_parallelism.runs import CutRun, LayerOperation

GUTTER, GAP, STATION = 76.0, 12.0, 26.0  # pixels: left of the lanes, between things, of a communication
NARROW, WIDE, POSITIONS = 28.0, 112.0, 56.0  # pixels: the hidden size, four times that, a sequence
LANE, LINE = 42.0, 15.0
STACK = 10.0  # pixels: offset of partial sums behind each other
COLUMNS = (
    *("operation", "after it, ranks hold", "forward", "sent forward (bytes)", "backward", "sent backward (bytes)"),
)


class _Thing(NamedTuple):
    """A box in the picture: a matrix or an activation. cut: a value of `Operation.leaves`, or "rows"."""

    name: str
    width: float
    height: float
    cut: str
    is_matrix: bool = False


def who_holds_what(run: CutRun, width: int = 850, title: str | None = None) -> Picture:
    """Draw an MLP on its ranks. run: from `lessons.L06_tensor_parallelism.runs.run_cut`.

    Raises ValueError for more ranks than can be told apart.
    """
    ranks, origin = run.timeline.world_size, run.timeline.origin
    if ranks > len(RANKS):
        raise ValueError(f"ranks={ranks} cannot be drawn; the picture tells 1 to {len(RANKS)} ranks apart")
    sheet, y = begin(width, title, [origin], {f"rank{rank}": style for rank, style in enumerate(RANKS[:ranks])})
    _draw(sheet, _line_up(run), ranks, y)
    rows = (
        (one.name, one.leaves, one.forward or "nothing", forward, one.backward or "nothing", backward)
        for one, (forward, backward) in zip(run.operations, run.traffic, strict=True)
    )
    return Picture(sheet, _summary(run), table(COLUMNS, rows))


class _Station(NamedTuple):
    """A communication. sent: bytes that each rank sends, forward and backward."""

    operation: LayerOperation
    sent: tuple[int, int]
    width: float = STATION


def _line_up(run: CutRun) -> list[_Thing | _Station]:
    """The things and communications of the picture, from left to right."""
    name, cut = "x", "positions" if run.operations[0].forward else "whole"
    found: list[_Thing | _Station] = [_through(name, cut)]
    for operation, sent in zip(run.operations, run.traffic, strict=True):
        name = {"A": "u", "gelu": "gelu(u)", "B": "y"}.get(operation.name, name)
        if operation.work:
            found.append(_matrix(operation))
        elif operation.is_communication:
            found.append(_Station(operation, sent))
        elif isinstance(found[-1], _Thing):
            found.pop()  # a GELU's output takes the place of its input
        if operation.leaves != cut or not operation.is_communication:
            found.append(_through(name, operation.leaves))
        cut = operation.leaves
    return found


def _through(name: str, cut: str) -> _Thing:
    return _Thing(name, WIDE if "u" in name else NARROW, POSITIONS, cut)


def _matrix(operation: LayerOperation) -> _Thing:
    cut = "columns" if operation.leaves == "columns" else "rows"
    width, height = (WIDE, NARROW) if operation.name == "A" else (NARROW, WIDE)
    return _Thing(operation.name, width, height, cut, is_matrix=True)


def _draw(sheet: Sheet, line: Sequence[_Thing | _Station], ranks: int, top: float) -> None:
    room = sheet.width - GUTTER - 3 * MARGIN - GAP * (len(line) - 1)
    needed = sum(item.width for item in line)
    shrink = min(1.0, room / needed)
    x = GUTTER + MARGIN + (room - shrink * needed) / 2
    middle = top + LANE + LINE + WIDE / 2
    lanes = top, middle + WIDE / 2 + 2 * LINE + 10
    for text, y in zip(("forward →", "← backward"), lanes, strict=True):
        sheet.text(MARGIN, y + 14, text, font_weight="bold")
    for item in line:
        width = shrink * item.width
        if isinstance(item, _Thing):
            _draw_thing(sheet, item._replace(width=width), ranks, x, middle)
        else:
            _draw_station(sheet, item, x + width / 2, middle, lanes)
        x += width + GAP
    sheet.height = lanes[1] + LANE


def _draw_thing(sheet: Sheet, thing: _Thing, ranks: int, x: float, middle: float) -> None:
    y, center = middle - thing.height / 2, x + thing.width / 2
    cut = "whole" if ranks == 1 else thing.cut
    look = {"font_weight": "bold"} if thing.is_matrix else {"font_style": "italic"}
    sheet.text(center, y - 6, thing.name, text_anchor="middle", **look)
    if cut == "whole":
        tip, dash = f"{thing.name}: every rank holds all of it", "3,2"
        box = x, y, thing.width, thing.height
        sheet.box(*box, tip=tip, fill=BACKGROUND, stroke="currentColor", stroke_dasharray=dash)
    for rank in range(ranks) if cut != "whole" else ():
        box, fill = _box_of_share(thing, rank, ranks, x, y), sheet.fill(f"rank{rank}", RANKS[rank])
        what = {"partial sums": "a partial sum of all of it"}.get(cut, f"its {cut}")
        tip = f"{thing.name}: rank {rank} holds {what}"
        sheet.box(*box, tip=tip, fill=fill, stroke="currentColor", stroke_width=0.7)
    # Names of cuts are wider than the boxes, so those of matrices are on a line of their own.
    below = middle + WIDE / 2 + (2 * LINE if thing.is_matrix else LINE)
    sheet.text(center, below, cut, text_anchor="middle", font_size=11)


def _box_of_share(thing: _Thing, rank: int, ranks: int, x: float, y: float) -> tuple[float, float, float, float]:
    """Left, top, width and height of a rank's share."""
    if thing.cut == "columns":
        return x + thing.width * rank / ranks, y, thing.width / ranks, thing.height
    if thing.cut == "partial sums":  # full size, one behind the other
        step = STACK * rank / ranks
        return x + step, y + step, thing.width - STACK, thing.height - STACK
    return x, y + thing.height * rank / ranks, thing.width, thing.height / ranks


def _draw_station(sheet: Sheet, station: _Station, x: float, middle: float, lanes: tuple[float, float]) -> None:
    operation = station.operation
    sheet.line(x, lanes[0] + LANE - 4, x, lanes[1] - 4, stroke="currentColor", stroke_opacity=0.35)
    name = operation.name if operation.name in "fg" else ""
    if name:
        sheet.box(x - 10, middle - 10, 20.0, 20.0, rx=10, fill=BACKGROUND, stroke="currentColor")
        sheet.text(x, middle + 4, name, text_anchor="middle", font_style="italic", font_weight="bold")
    for what, sent, y in zip((operation.forward, operation.backward), station.sent, lanes, strict=True):
        if not what:
            sheet.text(x, y + 14, "nothing", text_anchor="middle", font_size=11, fill_opacity=0.75)
            continue
        width = text_width(what, 11) + 8
        tip = f"{operation.name}: {what}, each rank sends {sent:,} bytes"
        sheet.box(x - width / 2, y, width, 20.0, tip=tip, fill=STYLES["transfer"].fill, rx=3)
        sheet.text(x, y + 14, what, text_anchor="middle", font_size=11, fill=PAPER)
        sheet.text(x, y + 33, data_size(sent), text_anchor="middle", font_size=11)


def _summary(run: CutRun) -> str:
    ranks = run.timeline.world_size
    matrices = " and ".join(f"{one.name} by {_matrix(one).cut}" for one in run.operations if one.work)
    forward, backward = (count_operations(map(attrgetter(way), run.operations)) for way in ("forward", "backward"))
    who = "1 rank holds" if ranks == 1 else f"{ranks} ranks hold"
    travels = f"what travels ({run.timeline.origin}) is forward {forward}, backward {backward}"
    return f"{who} {matrices}; {travels}; each rank sends {data_size(run.sent)}."


def count_operations(names: Iterable[str]) -> str:
    """Count communications in words: "2 all-reduces and 1 all-gather"; empty names are not counted."""
    counts = Counter(filter(None, names))
    return listed([counted(count, name) for name, count in counts.items()]) if counts else "nothing"
