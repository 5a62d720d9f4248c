"""A chart is data: panels with two axes and the marks in them.

    chart_svg.draw(chart)         what lessons store, and what explorers show
    chart_plotly.figure(chart)    the same for curves and dots, to zoom into, point at and hide

Places are numbers on the axes; only labels are moved away from their place by pixels, to the right and down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from course_lib.figures.axis import Units, doubled, number, powers, ticks, unit_of
from course_lib.figures.palette import LIKELY, Line, Look, Style

Write = Callable[[float], str]


@dataclass(frozen=True)
class Axis:
    """An axis from low to high, linear or logarithmic.

    ticks: the round numbers on it.  write: writes each of them.
    has_grid: whether lines cross the panel at ticks; without them the title stands beside the numbers.
    """

    title: str
    low: float
    high: float
    ticks: Sequence[float] = ()
    write: Write = number
    is_log: bool = False
    has_grid: bool = True

    @classmethod
    def by_powers(cls, title: str, values: Iterable[float], margin: float = 1.25, write: Write = number) -> Axis:
        """A logarithmic axis with room for all these values."""
        known = list(values)
        low, high = min(known) / margin, max(known) * margin
        return cls(title, low, high, powers(low, high), write, is_log=True)

    @classmethod
    def in_unit(
        cls, what: str, most: float, units: Units, count: int, room: float = 1.0, usual: float = 0.0
    ) -> tuple[Axis, float]:
        """An axis from 0 to the most, in a unit that suits it, with about `count` ticks; and the unit's size.

        usual: the length that it usually has, see `doubled`.
        """
        most, longer = doubled(most, usual)
        size, name = unit_of(most, units)
        title = f"{what} ({name})" + f"; {longer}" * bool(longer)
        return cls(title, 0, room * most / size, ticks(most / size, count)), size

    @classmethod
    def around(cls, title: str, values: Sequence[float], count: int) -> Axis:
        """An axis of about `count` round steps from just below the lowest value to just above the highest."""
        step = ticks(max(max(values) - min(values), 0.1), count)[1]
        marks = [step * n for n in range(math.floor(min(values) / step), math.ceil(max(values) / step + 1e-9) + 1)]
        return cls(title, marks[0], marks[-1], marks)

    def share(self, value: float) -> float:
        """The place of a value along the axis, 0 to 1."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


class Label(NamedTuple):
    """A label beside a place, and its distance from there in pixels.

    anchor: the part at its place, "middle" or "end"; by default its start.
    """

    text: str
    right: float = 0.0
    down: float = 0.0
    anchor: str | None = None
    size: int = 12
    is_bold: bool = True


class Point(NamedTuple):
    """A point of a curve, or the place of a label. tip: shown under the mouse; a point with a tip has a symbol."""

    x: float
    y: float
    tip: str = ""
    words: Label | None = None


class Curve(NamedTuple):
    """Points joined by a line; without a look, a thin line in the color of the text.

    is_filled: whether it is an area, down to the x axis.
    """

    name: str
    points: Sequence[Point]
    look: Line | None
    is_filled: bool = False


class Bar(NamedTuple):
    """A bar from base to base + size, at a place on the other axis. part: its kind; the style has its name.

    is_across: it lies along the x axis.  thickness: on the axis of `at`.  text: written in it if there is room.
    """

    part: str
    style: Style
    at: float
    size: float
    base: float
    tip: str
    thickness: float = 1.0
    text: str = ""
    is_across: bool = False


class Rule(NamedTuple):
    """A dashed line through the whole panel, at a place on the x axis, its words at the top. Bars hide it."""

    at: float
    words: Label


Mark = Point | Curve | Bar | Rule


def interval(tip: str, *ends: tuple[float, float]) -> Curve:
    """The interval of 90% of runs, a thin line between two places."""
    return Curve(LIKELY, [Point(*end, tip) for end in ends], None)


@dataclass(frozen=True)
class Panel:
    """Two axes and the marks between them, in the order in which they are drawn.

    height, left, right, head, foot: pixels, of the panel and of the margins with titles and numbers.
    shaded: parts of the x axis, behind everything.
    """

    x: Axis
    y: Axis
    marks: Sequence[Mark]
    height: float
    left: float = 56.0
    right: float = 24.0
    head: float = 22.0
    foot: float = 44.0
    shaded: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Chart:
    """Panels below each other, or side by side with equal widths.

    legend: the look of each name, in order; None is the thin line.
    has_crosshair: whether the mouse shows the values of all curves at one x.
    """

    panels: Sequence[Panel]
    origins: Collection[str]
    title: str | None
    width: int
    legend: Mapping[str, Look] = field(default_factory=dict)
    is_row: bool = False
    has_crosshair: bool = False

    @property
    def is_zoomable(self) -> bool:
        """Whether all its marks are curves and dots; bars and areas tell nothing more from near."""
        marks = [mark for panel in self.panels for mark in panel.marks]
        return not any(isinstance(mark, Bar) or (isinstance(mark, Curve) and mark.is_filled) for mark in marks)
