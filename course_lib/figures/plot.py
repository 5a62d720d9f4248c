"""A plane with two axes: where a point goes, the lines and marks in it, and a legend for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from course_lib.figures.frame import MARGIN
from course_lib.figures.palette import Line
from course_lib.figures.svg import Sheet, text_width

# How plotly's markers are drawn here, from their middle.
SYMBOLS = {
    "circle": "m-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "square": "m-4,-4h8v8h-8z",
    "diamond": "m0,-5l5,5l-5,5l-5,-5z",
    "triangle-up": "m0,-5l5,9h-10z",
}


class Scale(NamedTuple):
    """From low at one end of an axis to high at the other, evenly or by powers."""

    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        """How far along the axis a value is, 0 to 1."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


class Plot(NamedTuple):
    """A box in pixels and the scales of its two axes."""

    left: float
    right: float
    top: float
    bottom: float
    x: Scale
    y: Scale

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point goes, in pixels."""
        across = self.left + (self.right - self.left) * self.x.share(x)
        return across, self.bottom - (self.bottom - self.top) * self.y.share(y)


class Axis(NamedTuple):
    """What is written along an axis: its title, its round numbers, and how each is written."""

    title: str
    ticks: Sequence[float]
    write: Callable[[float], str]


def spread(values: Iterable[float], margin: float = 1.25) -> Scale:
    """A logarithmic scale on which all these values find a place."""
    known = list(values)
    return Scale(min(known) / margin, max(known) * margin, is_log=True)


def draw_axes(sheet: Sheet, plot: Plot, x: Axis, y: Axis) -> float:
    """The grid and its numbers, without those that would run into each other. Returns where the next thing goes."""
    with sheet.group(stroke="currentColor", stroke_opacity=0.2):
        for tick in y.ticks:
            _, height = plot.at(plot.x.low, tick)
            sheet.line(plot.left, height, plot.right, height)
        for tick in x.ticks:
            across, _ = plot.at(tick, plot.y.low)
            sheet.line(across, plot.top, across, plot.bottom)
    for tick in y.ticks:
        sheet.text(plot.left - 8, plot.at(plot.x.low, tick)[1] + 4, y.write(tick), text_anchor="end")
    free = plot.left - 12
    for tick in x.ticks:
        text = x.write(tick)
        across, half = plot.at(tick, plot.y.low)[0], text_width(text) / 2
        if across - half >= free:
            sheet.text(across, plot.bottom + 16, text, text_anchor="middle")
            free = across + half + 4
    sheet.text(plot.left - 40, plot.top - 10, y.title, font_size=11)
    sheet.text((plot.left + plot.right) / 2, plot.bottom + 34, x.title, text_anchor="middle", font_size=11)
    return plot.bottom + 44


def draw_line(sheet: Sheet, line: Line | None, points: Iterable[tuple[float, float]]) -> None:
    """A curve in its color and dash; without a `Line` a thin one in the color of the text."""
    look: dict[str, Any] = (
        {"stroke": line.color, "stroke_width": 2.5} if line else {"stroke": "currentColor", "stroke_width": 1}
    )
    if line and line.dash:
        look["stroke_dasharray"] = line.dash
    sheet.path("M" + "L".join(f"{x:.2f},{y:.2f}" for x, y in points), fill="none", **look)


def draw_symbol(sheet: Sheet, line: Line, x: float, y: float, tip: str = "") -> None:
    """The mark of a line at a point. tip: what to say when the mouse rests there."""
    sheet.path(f"M{x:.2f},{y:.2f}{SYMBOLS[line.symbol]}", fill=line.color)
    if tip:
        sheet.box(x - 8, y - 8, 16.0, 16.0, tip=tip, fill="none", pointer_events="all")


def draw_lines_legend(sheet: Sheet, lines: Mapping[str, Line | None], y: float) -> float:
    """A piece of each line with its symbol, and its name; None is the thin line."""
    x = MARGIN
    for name, line in lines.items():
        needed = 52 + text_width(name)
        if x + needed > sheet.width and x > MARGIN:
            x, y = MARGIN, y + 20
        draw_line(sheet, line, [(x, y + 8), (x + 30, y + 8)])
        if line:
            draw_symbol(sheet, line, x + 15, y + 8)
        sheet.text(x + 36, y + 12, name)
        x += needed
    return y + 46
