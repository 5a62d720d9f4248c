"""How much faster more ranks are: the speed-up over the number of ranks, against the ideal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from course_lib.figures.axis import number, percent, ticks
from course_lib.figures.frame import MARGIN, draw_origins, draw_title, new_sheet, on_card
from course_lib.figures.palette import INK, LINES, Line
from course_lib.figures.picture import Picture
from course_lib.figures.svg import Sheet, text_width
from course_lib.timeline import ORIGINS, Timeline

if TYPE_CHECKING:
    import plotly.graph_objects as go

LEFT, RIGHT, HEIGHT = 56.0, 24.0, 300.0
# How plotly's markers are drawn here, from their middle.
SYMBOLS = {
    "circle": "m-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "square": "m-4,-4h8v8h-8z",
    "diamond": "m0,-5l5,5l-5,5l-5,-5z",
    "triangle-up": "m0,-5l5,9h-10z",
}


@dataclass(frozen=True)
class Timing:
    """How long a step took on some number of ranks.

    seconds: for `work` units of whatever is counted (samples, tokens); leave `work` alone where the step
        is the same for any number of ranks.
    label: tells the lines of one chart apart ("overlap", "no overlap").
    """

    ranks: int
    seconds: float
    origin: str = "measured"
    work: float = 1.0
    label: str = ""

    def __post_init__(self) -> None:
        for name in ("ranks", "seconds", "work"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} of a Timing must be more than 0")
        if self.origin not in ORIGINS:
            raise ValueError(f"origin={self.origin!r} is unknown; choose one of {', '.join(ORIGINS)}")

    @classmethod
    def of(cls, timeline: Timeline, work: float = 1.0, label: str = "") -> Timing:
        """The timing of one whole timeline."""
        return cls(timeline.world_size, timeline.makespan, timeline.origin, work, label)


def speed_up(timings: Iterable[Timing], width: int = 560, title: str | None = None) -> Picture:
    """Draw the speed-up over the number of ranks, one line for each label and origin, against the ideal.

    Speed is work by seconds, the median where a number of ranks was timed more than once. A line is relative to
    its own smallest number of ranks, which counts as ideal.

    Raises ValueError if there are no timings or more lines than can be told apart.
    """
    curves = _curves(timings)
    sheet = new_sheet(width)
    y = draw_title(sheet, title)
    y = draw_origins(sheet, {curve.origin for curve in curves}, y)
    y = _draw_legend(sheet, curves, y)
    sheet.height = _draw_plot(sheet, curves, y)
    return Picture(
        sheet,
        summary="Speed-up over the number of ranks: " + "; ".join(map(_in_words, curves)) + ".",
        rows=[
            {"line": curve.name, "ranks": ranks, "speed-up": speed, "of the ideal": percent(speed / ranks)}
            for curve in curves
            for ranks, speed in curve.points
        ],
        figure=lambda: _plotly(curves, title),
    )


class _Curve(NamedTuple):
    label: str
    origin: str
    points: list[tuple[int, float]]

    @property
    def name(self) -> str:
        return f"{self.label} ({self.origin})" if self.label else self.origin


def _curves(timings: Iterable[Timing]) -> list[_Curve]:
    speeds: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for timing in timings:
        speeds[timing.label, timing.origin][timing.ranks].append(timing.work / timing.seconds)
    if not speeds:
        raise ValueError("timings is empty; give at least one Timing, for instance Timing.of(run.timeline)")
    if len(speeds) > len(LINES):
        raise ValueError(f"timings has {len(speeds)} labels and origins; draw at most {len(LINES)} lines in one chart")
    return [_Curve(*key, _relative({ranks: median(s) for ranks, s in one.items()})) for key, one in speeds.items()]


def _relative(speeds: dict[int, float]) -> list[tuple[int, float]]:
    fewest = min(speeds)
    return [(ranks, fewest * speed / speeds[fewest]) for ranks, speed in sorted(speeds.items())]


def _in_words(curve: _Curve) -> str:
    (fewest, _), (most, speed) = curve.points[0], curve.points[-1]
    if fewest == most:
        return f"{curve.name}, only {fewest} timed"
    times = number(speed / fewest)
    return f"{curve.name}, {most} ranks are {times} times as fast as {fewest}, {percent(speed / most)} of the ideal"


def _draw_legend(sheet: Sheet, curves: list[_Curve], y: float) -> float:
    x = MARGIN
    for name, line in [*((curve.name, line) for curve, line in zip(curves, LINES, strict=False)), ("ideal", None)]:
        needed = 52 + text_width(name)
        if x + needed > sheet.width and x > MARGIN:
            x, y = MARGIN, y + 20
        _draw_line(sheet, line, [(x, y + 8), (x + 30, y + 8)])
        if line:
            _draw_symbol(sheet, line, x + 15, y + 8)
        sheet.text(x + 36, y + 12, name)
        x += needed
    return y + 46


class _Plot(NamedTuple):
    """Where the lines go: a box in pixels, and the numbers at its top right corner."""

    left: float
    right: float
    top: float
    bottom: float
    ranks: float
    speed: float

    def at(self, ranks: float, speed: float) -> tuple[float, float]:
        x = self.left + (self.right - self.left) * ranks / self.ranks
        return x, self.bottom - (self.bottom - self.top) * speed / self.speed


def _draw_plot(sheet: Sheet, curves: list[_Curve], top: float) -> float:
    points = [point for curve in curves for point in curve.points]
    most = max(ranks for ranks, _ in points)
    plot = _Plot(LEFT, sheet.width - RIGHT, top, top + HEIGHT, most, max(most, *(speed for _, speed in points)))
    _draw_axes(sheet, plot, sorted({ranks for ranks, _ in points}))
    _draw_line(sheet, None, [plot.at(0, 0), plot.at(most, most)])
    for curve, line in zip(curves, LINES, strict=False):
        _draw_line(sheet, line, [plot.at(*point) for point in curve.points])
        for ranks, speed in curve.points:
            x, y = plot.at(ranks, speed)
            _draw_symbol(sheet, line, x, y)
            tip = f"{curve.name}: {ranks} ranks, speed-up {number(speed)}, {percent(speed / ranks)} of the ideal"
            sheet.box(x - 8, y - 8, 16.0, 16.0, tip=tip, fill="none", pointer_events="all")
    return plot.bottom + 44


def _draw_axes(sheet: Sheet, plot: _Plot, ranks: list[int]) -> None:
    with sheet.group(stroke="currentColor", stroke_opacity=0.2):
        for tick in ticks(plot.speed, 6):
            _, y = plot.at(0, tick)
            sheet.line(plot.left, y, plot.right, y)
        for count in ranks:
            x, _ = plot.at(count, 0)
            sheet.line(x, plot.top, x, plot.bottom)
    for tick in ticks(plot.speed, 6):
        sheet.text(plot.left - 8, plot.at(0, tick)[1] + 4, number(tick), text_anchor="end")
    free = plot.left
    for count in ranks:
        x, half = plot.at(count, 0)[0], text_width(str(count)) / 2
        if x - half >= free:
            sheet.text(x, plot.bottom + 16, count, text_anchor="middle")
            free = x + half + 4
    sheet.text(MARGIN, plot.top - 10, "speed-up", font_size=11)
    sheet.text((plot.left + plot.right) / 2, plot.bottom + 34, "ranks", text_anchor="middle", font_size=11)


def _draw_line(sheet: Sheet, line: Line | None, points: list[tuple[float, float]]) -> None:
    """A curve in its color and dash, or, without a `Line`, the ideal as a thin one in the color of the text."""
    look: dict[str, Any] = (
        {"stroke": line.color, "stroke_width": 2.5} if line else {"stroke": "currentColor", "stroke_width": 1}
    )
    if line and line.dash:
        look["stroke_dasharray"] = line.dash
    sheet.path("M" + "L".join(f"{x:.2f},{y:.2f}" for x, y in points), fill="none", **look)


def _draw_symbol(sheet: Sheet, line: Line, x: float, y: float) -> None:
    sheet.path(f"M{x:.2f},{y:.2f}{SYMBOLS[line.symbol]}", fill=line.color)


def _plotly(curves: list[_Curve], title: str | None) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    for curve, line in zip(curves, LINES, strict=False):
        ranks, speeds = zip(*curve.points, strict=True)
        dash = {"color": line.color, "dash": line.dash.replace(",", "px,") + "px" if line.dash else "solid"}
        marker = {"symbol": line.symbol, "size": 10}
        figure.add_scatter(x=ranks, y=speeds, name=curve.name, mode="lines+markers", line=dash, marker=marker)
    most = max(ranks for curve in curves for ranks, _ in curve.points)
    figure.add_scatter(x=[0, most], y=[0, most], name="ideal", mode="lines", line={"color": INK, "width": 1})
    figure.update_xaxes(title_text="ranks", tickvals=sorted({ranks for curve in curves for ranks, _ in curve.points}))
    figure.update_yaxes(title_text="speed-up")
    return on_card(figure, title, (curve.origin for curve in curves))
