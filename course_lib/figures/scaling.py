"""How much faster more ranks are: the speed-up over the number of ranks, against the ideal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from course_lib.figures.axis import number, percent, ticks
from course_lib.figures.chart import Axis, Chart, Curve, Panel, Point
from course_lib.figures.palette import Line, lines_of
from course_lib.figures.picture import Picture, Row
from course_lib.planner import Estimate
from course_lib.timeline import Timeline


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
    counts = sorted({ranks for curve in curves for ranks, _ in curve.points})
    most = counts[-1]
    highest = max(most, *(speed for curve in curves for _, speed in curve.points))
    looks = lines_of(curve.name for curve in curves)
    ideal = Curve("ideal", [Point(0, 0), Point(most, most)], look=None)
    lines = [ideal, *(_line(curve, looks[curve.name]) for curve in curves)]
    across, up = Axis("ranks", 0, most, counts, str), Axis("speed-up", 0, highest, ticks(highest, 6))
    panel = Panel(across, up, lines, height=0.3 * width + 50)
    origins = {curve.origin for curve in curves}
    summary = "Speed-up over the number of ranks: " + "; ".join(map(_in_words, curves)) + "."
    rows: list[Row] = [
        {"line": curve.name, "ranks": ranks, "speed-up": speed, "of the ideal": percent(speed / ranks)}
        for curve in curves
        for ranks, speed in curve.points
    ]
    return Picture.of(Chart([panel], origins, title, width, {**looks, "ideal": None}), summary, rows)


class _Series(NamedTuple):
    label: str
    origin: str
    points: list[tuple[int, float]]

    @property
    def name(self) -> str:
        return f"{self.label} ({self.origin})" if self.label else self.origin


def _curves(timings: Iterable[Timing]) -> list[_Series]:
    speeds: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for timing in timings:
        speeds[timing.label, timing.origin][timing.ranks].append(timing.work / timing.seconds)
    if not speeds:
        raise ValueError("timings is empty; give at least one Timing, for instance Timing.of(run.timeline)")
    return [_Series(*key, _relative({ranks: median(s) for ranks, s in one.items()})) for key, one in speeds.items()]


def _relative(speeds: dict[int, float]) -> list[tuple[int, float]]:
    fewest = min(speeds)
    return [(ranks, fewest * speed / speeds[fewest]) for ranks, speed in sorted(speeds.items())]


def _in_words(curve: _Series) -> str:
    (fewest, _), (most, speed) = curve.points[0], curve.points[-1]
    if fewest == most:
        return f"{curve.name}, only {fewest} timed"
    times = number(speed / fewest)
    return f"{curve.name}, {most} ranks are {times} times as fast as {fewest}, {percent(speed / most)} of the ideal"


def _line(curve: _Series, look: Line) -> Curve:
    def tip(ranks: int, speed: float) -> str:
        return f"{curve.name}: {ranks} ranks, speed-up {number(speed)}, {percent(speed / ranks)} of the ideal"

    return Curve(curve.name, [Point(*point, tip(*point)) for point in curve.points], look)
