"""A chart is data: panels with two axes and the marks in them.

    chart_svg.draw(chart)         what lessons store, and what explorers show
    chart_plotly.figure(chart)    the same to zoom into, to point at, and to switch parts of off

Places are numbers on the axes; only what is written beside a place is moved by pixels, to the right and down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from course_lib.figures.axis import Units, number, powers, ticks, unit_of
from course_lib.figures.palette import Line, Look, Style

Write = Callable[[float], str]


@dataclass(frozen=True)
class Axis:
    """An axis from low to high, linear or logarithmic.

    ticks: the round numbers on it, and write: how each is written.
    has_grid: whether lines go across the panel there; without them the title stands beside the numbers.
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
    def in_unit(cls, what: str, most: float, units: Units, count: int, room: float = 1.0) -> tuple[Axis, float]:
        """An axis from 0 to the most, in a unit that suits it, with about `count` ticks; and the unit's size."""
        size, name = unit_of(most, units)
        return cls(f"{what} ({name})", 0, room * most / size, ticks(most / size, count)), size

    def share(self, value: float) -> float:
        """How far along the axis a value is, 0 to 1."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


class Label(NamedTuple):
    """A label beside a place, and its distance from there in pixels.

    anchor: what of it is there, "middle" or "end"; by default its start.  has_halo: readable over lines and bars.
    """

    text: str
    right: float = 0.0
    down: float = 0.0
    anchor: str | None = None
    size: int = 12
    is_bold: bool = True
    has_halo: bool = False


class Point(NamedTuple):
    """A point of a curve, or the place of a label. tip: shown when the mouse rests on it; it has a symbol then."""

    x: float
    y: float
    tip: str = ""
    words: Label | None = None


class Curve(NamedTuple):
    """Points joined by a line; without a look, a thin one in the color of the text.

    is_filled: an area instead, down to the ground.
    """

    name: str
    points: Sequence[Point]
    look: Line | None
    is_filled: bool = False


class Cloud(NamedTuple):
    """Thousands of points as dots, the first the most important; pale where is_pale says so.

    A tip, shown by interactive figures only, says what a dot is, followed by its two coordinates in these units.
    """

    name: str
    points: Sequence[Point]
    look: Line
    is_pale: Sequence[bool]
    units: tuple[str, str]


class Bar(NamedTuple):
    """From base to base + size at a place on the other axis. part: what it is, whose name is in the style.

    is_across: it lies along the x axis.  thickness: on the axis of `at`.  text: written in it where there is room.
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
    """A dashed line through the whole panel, at a place on the x axis, its words at the top.

    is_across: at a place on the y axis, its words at the right end.
    """

    at: float
    words: Label
    width: int = 2
    is_across: bool = False
    is_over_bars: bool = False


class Range(NamedTuple):
    """From low to high at a place on the other axis: where 90% of runs lie. is_across: it lies along the x axis."""

    at: float
    low: float
    high: float
    tip: str
    is_across: bool = False

    @property
    def ends(self) -> list[tuple[float, float]]:
        places = [(self.at, self.low), (self.at, self.high)]
        return [(y, x) for x, y in places] if self.is_across else places


Mark = Point | Curve | Cloud | Bar | Rule | Range


@dataclass(frozen=True)
class Panel:
    """Two axes and the marks between them, in the order in which they are drawn.

    height, left, right, head, foot: pixels, of the panel and around it, where titles and numbers stand.
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
