"""The frame that pictures share: title, legend, the origin of their numbers, lines and their symbols."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from textwrap import wrap

from course_lib.figures.palette import ORIGINS, Line, Look, Style
from course_lib.figures.svg import Sheet, text_width

MARGIN = 16.0
# Plotly's markers as paths from their middle.
SYMBOLS = {
    "circle": "m-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "square": "m-4,-4h8v8h-8z",
    "diamond": "m0,-5l5,5l-5,5l-5,-5z",
    "triangle-up": "m0,-5l5,9h-10z",
    "triangle-down": "m0,5l5,-9h-10z",
    "cross": "m-2,-5h4v3h3v4h-3v3h-4v-3h-3v-4h3z",
}


def begin(
    width: int, title: str | None, origins: Collection[str] = (), looks: Mapping[str, Look] = {}
) -> tuple[Sheet, float]:
    """A sheet with a title, a line for each origin in the picture (every picture has one), and a legend.

    Returns the y below them, too.
    """
    sheet, y = Sheet(width), 8.0
    for line in wrap(title or "", int((width - 2 * MARGIN) / text_width("x", 14))):
        sheet.text(MARGIN, y + 14, line, font_size=14, font_weight="bold")
        y += 20
    for origin in (origin for origin in ORIGINS if origin in origins):
        sheet.text(MARGIN, y + 12, ORIGINS[origin], font_weight="bold")
        y += 18
    return sheet, draw_legend(sheet, looks, y + 4 if origins else y)


def draw_legend(sheet: Sheet, looks: Mapping[str, Look], y: float) -> float:
    """Draw the legend: a patch for each style, a stroke with its symbol for each line, in as many rows as needed.

    Keys are the names of lines, and of the patterns of styles, which have names of their own. Returns the y below.
    """
    x = MARGIN
    for key, look in looks.items():
        name, left, room = (look.label, 22, 36) if isinstance(look, Style) else (key, 36, 52)
        if x + room + text_width(name) > sheet.width and x > MARGIN:
            x, y = MARGIN, y + 20
        if isinstance(look, Style):
            sheet.box(x, y + 2, 16.0, 12.0, fill=sheet.fill(key, look), stroke="currentColor", stroke_width=0.5)
        else:
            draw_line(sheet, look, [(x, y + 8), (x + 30, y + 8)])
            if look:
                draw_symbol(sheet, look, x + 15, y + 8)
        sheet.text(x + left, y + 12, name)
        x += room + text_width(name)
    return y + 24 if looks else y


def draw_numbers_beside(sheet: Sheet, title: str, numbers: Iterable[tuple[float, str]], left: float, y: float) -> None:
    """Draw the numbers of an axis, each at its x, with the title in front of them."""
    with sheet.group(text_anchor="middle", font_size=11):
        for x, text in numbers:
            sheet.text(x, y, text)
    sheet.text(left - 8, y, title, text_anchor="end", font_size=11)


def draw_line(sheet: Sheet, look: Line | None, points: Iterable[tuple[float, float]]) -> None:
    """Draw a curve in its color and dash; without a look, a thin one in the color of the text."""
    if look and look.dash is None:
        return
    color, width = (look.color, 2.5) if look else ("currentColor", 1.5)
    dash = {"stroke_dasharray": look.dash} if look and look.dash else {}
    path = "M" + "L".join(f"{x:.2f},{y:.2f}" for x, y in points)
    sheet.path(path, fill="none", stroke=color, stroke_width=width, **dash)


def draw_symbol(sheet: Sheet, look: Line, x: float, y: float) -> None:
    sheet.path(f"M{x:.2f},{y:.2f}{SYMBOLS[look.symbol]}", fill=look.color)
