"""Who has what before a collective, and after it.

    rank 0  | a |   |   |      all-gather      | a | b | c |
    rank 1  |   | b |   |    ------------->    | a | b | c |
    rank 2  |   |   | c |                      | a | b | c |

A row is a rank, a column a piece of the tensor. A piece has the colors of the ranks whose numbers are in it: one color
for what came from one rank, a stripe of each for a sum. To find that out in a real run, let rank r fill its pieces with
2 ** r, and leave 0 where it has nothing: every sum then says what it was made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from course_lib.figures.axis import counted, listed
from course_lib.figures.frame import MARGIN, draw_legend, draw_origins, draw_title, new_sheet
from course_lib.figures.palette import RANKS
from course_lib.figures.picture import Picture, Row
from course_lib.figures.svg import Sheet

CELL, ARROW, GUTTER, GAP, LINE = 24.0, 106.0, 52.0, 40.0, 24.0  # pixels
Table = Sequence[Sequence[int]]  # of each rank, its pieces
Strip = Sequence[Any]  # tables, and between two of them the name of what made the one of the other


def before_and_after(strips: Sequence[Strip], width: int = 850, title: str | None = None) -> Picture:
    """Draw collectives, as many beside each other as there is room for.

    strips: for instance [[before, "all-gather", after], ...], with numbers as described above.

    Raises ValueError for more ranks than can be told apart.
    """
    ranks = len(strips[0][0])
    if ranks > len(RANKS):
        raise ValueError(f"{ranks} ranks cannot be drawn; the picture tells {len(RANKS)} ranks apart")
    sheet = new_sheet(width)
    y = draw_title(sheet, title)
    y = draw_legend(sheet, {f"rank{rank}": style for rank, style in enumerate(RANKS[:ranks])}, y)
    y = draw_origins(sheet, ["measured"], y)
    x = MARGIN
    for strip in strips:
        room = GUTTER + sum(_width(part) for part in strip)
        if x > MARGIN and x + room > width:
            x, y = MARGIN, y + ranks * CELL + LINE
        _draw_strip(sheet, strip, x, y)
        x += room + GAP
    sheet.height = y + ranks * CELL + LINE
    sentences = [sentence for strip in strips for sentence in _in_words(strip)]
    return Picture(sheet, f"{'; '.join(sentences)}.", [row for strip in strips for row in _rows(strip)])


def _width(part: Table | str) -> float:
    return ARROW if isinstance(part, str) else CELL * len(part[0])


def _draw_strip(sheet: Sheet, strip: Strip, x: float, y: float) -> None:
    for rank in range(len(strip[0])):
        sheet.text(x + GUTTER - 6, y + CELL * (rank + 0.7), f"rank {rank}", text_anchor="end", font_size=11)
    x += GUTTER
    middle = y + CELL * len(strip[0]) / 2
    for part in strip:
        if isinstance(part, str):
            sheet.text(x + ARROW / 2, middle - 6, part, text_anchor="middle", font_size=11, font_weight="bold")
            sheet.line(x + 8, middle, x + ARROW - 14, middle, stroke="currentColor", stroke_width=1.5)
            sheet.path(f"M{x + ARROW - 8:.1f},{middle:.1f}l-8,-4.5v9z", fill="currentColor")
        else:
            _draw_table(sheet, part, x, y)
        x += _width(part)


def _draw_table(sheet: Sheet, table: Table, x: float, y: float) -> None:
    for rank, pieces in enumerate(table):
        for piece, value in enumerate(pieces):
            left, top, stripes = x + piece * CELL, y + rank * CELL, _ranks_in(value)
            for place, source in enumerate(stripes):  # below each other, as the ranks are
                stripe, fill = CELL / len(stripes), sheet.fill(f"rank{source}", RANKS[source])
                sheet.box(left, top + place * stripe, CELL, stripe, fill=fill)
            tip = f"rank {rank}, piece {piece}: {_from(value)}"
            sheet.box(left, top, CELL, CELL, tip=tip, fill="none", stroke="currentColor", pointer_events="all")


def _ranks_in(value: int) -> list[int]:
    """The ranks whose numbers are in a sum of powers of two."""
    return [rank for rank in range(value.bit_length()) if value >> rank & 1]


def _from(value: int) -> str:
    sources = [str(rank) for rank in _ranks_in(value)]
    return f"of rank{'s' if len(sources) > 1 else ''} {listed(sources)}" if sources else "nothing"


def _in_words(strip: Strip) -> Iterator[str]:
    """What each of a strip's collectives leaves on a rank."""
    for name, table in zip(strip[1::2], strip[2::2], strict=True):
        filled = [[value for value in pieces if value] for pieces in table]
        each = counted(max(map(len, filled)), "piece")
        sources = max(len(_ranks_in(value)) for pieces in filled for value in pieces)
        made = f"a sum over {sources} ranks" if sources > 1 else "from one rank"
        yield f"after the {name} each rank has {each}, {made}"


def _rows(strip: Strip) -> Iterator[Row]:
    for name, table in zip(("before", *strip[1::2]), strip[::2], strict=True):
        for rank, pieces in enumerate(table):
            yield {"": name, "rank": rank, **{f"piece {n}": _from(value) for n, value in enumerate(pieces)}}
