"""A chart drawn as SVG."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from course_lib.figures.chart import Bar, Chart, Curve, Label, Panel, Point, Rule
from course_lib.figures.frame import begin, draw_line, draw_numbers_beside, draw_symbol
from course_lib.figures.palette import PAPER
from course_lib.figures.svg import HALO, Sheet, text_width


def draw(chart: Chart) -> Sheet:
    sheet, top = begin(chart.width, chart.title, chart.origins, chart.legend)
    width = chart.width / len(chart.panels) if chart.is_row else chart.width
    for place, panel in enumerate(chart.panels):
        sheet.height = _draw_panel(sheet, panel, place * width if chart.is_row else 0.0, width, top)
        top = top if chart.is_row else sheet.height
    return sheet


class _Box(NamedTuple):
    """A panel's place on the sheet, in pixels."""

    panel: Panel
    left: float
    right: float
    top: float
    bottom: float

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * self.panel.x.share(value)

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * self.panel.y.share(value)

    def at(self, point: Point) -> tuple[float, float]:
        return self.x(point.x), self.y(point.y)


def _draw_panel(sheet: Sheet, panel: Panel, left: float, width: float, top: float) -> float:
    """Draw a panel from `left` on, `width` wide; return the y below it."""
    top += panel.head
    box = _Box(panel, left + panel.left, left + width - panel.right, top, top + panel.height)
    if panel.shaded:
        with sheet.group(fill="currentColor", fill_opacity=0.1):
            for low, high in panel.shaded:
                sheet.box(box.x(low), top, box.x(high) - box.x(low), panel.height)
    _draw_axes(sheet, box)
    for mark in panel.marks:
        DRAW[type(mark)](sheet, box, mark)
    return box.bottom + panel.foot


def _draw_axes(sheet: Sheet, box: _Box) -> None:
    x, y = box.panel.x, box.panel.y
    if x.has_grid or y.has_grid:
        with sheet.group(stroke="currentColor", stroke_opacity=0.2):
            for tick in y.ticks if y.has_grid else ():
                sheet.line(box.left, box.y(tick), box.right, box.y(tick))
            for tick in x.ticks if x.has_grid else ():
                sheet.line(box.x(tick), box.top, box.x(tick), box.bottom)
    for tick in y.ticks:
        sheet.text(box.left - 8, box.y(tick) + 4, y.write(tick), text_anchor="end")
    if x.has_grid:
        _draw_numbers_below(sheet, box)
    elif x.ticks:
        numbers = [(box.x(tick), x.write(tick)) for tick in x.ticks]
        draw_numbers_beside(sheet, x.title, numbers, box.left, box.bottom + 14)
    if y.title:
        sheet.text(box.left - 40, box.top - 10, y.title, font_size=11)
    if x.has_grid:
        sheet.text((box.left + box.right) / 2, box.bottom + 34, x.title, text_anchor="middle", font_size=11)


def _draw_numbers_below(sheet: Sheet, box: _Box) -> None:
    """Draw the numbers of the x axis, without those that would overlap."""
    free = box.left - 12
    for tick in box.panel.x.ticks:
        text = box.panel.x.write(tick)
        x, half = box.x(tick), text_width(text) / 2
        if x - half >= free:
            sheet.text(x, box.bottom + 16, text, text_anchor="middle")
            free = x + half + 4


def _write(sheet: Sheet, words: Label, x: float, y: float) -> None:
    look: dict[str, object] = {"text_anchor": words.anchor} if words.anchor else {}
    look |= {} if words.size == 12 else {"font_size": words.size}
    look |= {"font_weight": "bold"} if words.is_bold else {}
    sheet.text(x + words.right, y + words.down, words.text, **look, **HALO)


def _point(sheet: Sheet, box: _Box, point: Point) -> None:
    if point.words:
        _write(sheet, point.words, *box.at(point))


def _curve(sheet: Sheet, box: _Box, curve: Curve) -> None:
    if curve.is_filled and curve.look:
        outline = "".join("L{:.2f},{:.2f}".format(*box.at(point)) for point in curve.points)
        data = f"M{box.left:.2f},{box.bottom:.2f}{outline}V{box.bottom:.2f}z"
        sheet.path(data, fill=curve.look.color, fill_opacity=0.75)
        sheet.line(box.left, box.bottom, box.right, box.bottom, stroke="currentColor", stroke_opacity=0.4)
    else:
        draw_line(sheet, curve.look, map(box.at, curve.points))
    for point in curve.points:
        if point.tip:
            x, y = box.at(point)
            if curve.look:
                draw_symbol(sheet, curve.look, x, y)
            sheet.box(x - 8, y - 8, 16.0, 16.0, tip=point.tip, fill="none", pointer_events="all")
        _point(sheet, box, point)


def _bar(sheet: Sheet, box: _Box, bar: Bar) -> None:
    if bar.size <= 0:
        return
    along, beside = (bar.base, bar.base + bar.size), (bar.at - bar.thickness / 2, bar.at + bar.thickness / 2)
    (left, right), (top, bottom) = (along, beside) if bar.is_across else (beside, reversed(along))
    x, y = box.x(left), box.y(top)
    width, height = box.x(right) - x, box.y(bottom) - y
    fill = sheet.fill(bar.part, bar.style)
    sheet.box(x, y, width, height, tip=bar.tip, fill=fill, stroke="currentColor", stroke_width=0.5)
    if bar.text and width >= text_width(bar.text) + 8:
        # A halo in the color of the background keeps the number readable over the hatching of a wait.
        is_hatched = bar.style.fill == PAPER
        halo = HALO if is_hatched else {}
        ink = "currentColor" if is_hatched else bar.style.text
        sheet.text(x + width / 2, y + height / 2 + 4, bar.text, text_anchor="middle", fill=ink, **halo)


def _rule(sheet: Sheet, box: _Box, rule: Rule) -> None:
    words, x = rule.words, box.x(rule.at)
    sheet.line(x, box.top, x, box.bottom, stroke="currentColor", stroke_width=2, stroke_dasharray="6,3")
    if words.anchor != "end" and x + words.right + text_width(words.text) > box.right:
        words = words._replace(anchor="end", right=-words.right)
    _write(sheet, words, x, box.top)


DRAW: dict[type, Callable[..., None]] = {
    Point: _point,
    Curve: _curve,
    Bar: _bar,
    Rule: _rule,
}
