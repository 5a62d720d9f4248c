"""How much faster more ranks are: the speed-up over the number of ranks, against the ideal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from course_lib.figures.axis import number, percent, ticks
from course_lib.figures.frame import draw_origins, draw_title, new_sheet, on_card
from course_lib.figures.palette import INK, LINES
from course_lib.figures.picture import Picture
from course_lib.figures.plot import Axis, Plot, Scale, draw_axes, draw_line, draw_lines_legend, draw_symbol
from course_lib.figures.svg import Sheet
from course_lib.timeline import ORIGINS, Timeline

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from course_lib.planner import Estimate

LEFT, RIGHT, HEIGHT = 56.0, 24.0, 300.0


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

    @classmethod
    def planned(cls, estimate: Estimate, label: str = "") -> Timing:
        """The timing of a step that was planned, not run; its work is counted in samples."""
        seconds = estimate.step_time.total
        return cls(estimate.cluster.devices, seconds, "modelled", estimate.global_batch, label)


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
    named = zip((curve.name for curve in curves), LINES, strict=False)
    y = draw_lines_legend(sheet, {**dict(named), "ideal": None}, y)
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


def _draw_plot(sheet: Sheet, curves: list[_Curve], top: float) -> float:
    points = [point for curve in curves for point in curve.points]
    most = max(ranks for ranks, _ in points)
    highest = max(most, *(speed for _, speed in points))
    plot = Plot(LEFT, sheet.width - RIGHT, top, top + HEIGHT, Scale(0, most), Scale(0, highest))
    counts = Axis("ranks", sorted({ranks for ranks, _ in points}), str)
    end = draw_axes(sheet, plot, counts, Axis("speed-up", ticks(highest, 6), number))
    draw_line(sheet, None, [plot.at(0, 0), plot.at(most, most)])
    for curve, line in zip(curves, LINES, strict=False):
        draw_line(sheet, line, [plot.at(*point) for point in curve.points])
        for ranks, speed in curve.points:
            tip = f"{curve.name}: {ranks} ranks, speed-up {number(speed)}, {percent(speed / ranks)} of the ideal"
            draw_symbol(sheet, line, *plot.at(ranks, speed), tip)
    return end


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
