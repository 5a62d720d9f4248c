"""Scaling: the speed-up of a step with more ranks, against the ideal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import starmap
from statistics import median

from course_lib.figures.axis import counted, number, percent, ticks
from course_lib.figures.chart import Axis, Chart, Curve, Panel, Point
from course_lib.figures.palette import Line, lines_of
from course_lib.figures.picture import Picture, table
from course_lib.planner import Estimate
from course_lib.timeline import Timeline


@dataclass(frozen=True)
class Timing:
    """The time of a step on some number of ranks.

    seconds: for `work` units of whatever is counted (samples, tokens); leave out `work` if the step is the same for
        any number of ranks.
    label: tells the lines of one chart apart ("overlap", "no overlap").
    """

    ranks: int
    seconds: float
    origin: str = "measured"
    work: float = 1.0
    label: str = ""

    @property
    def line(self) -> str:
        """The name of its line."""
        return f"{self.label} ({self.origin})" if self.label else self.origin

    @classmethod
    def of(cls, timeline: Timeline, work: float = 1.0, label: str = "") -> Timing:
        """The timing of one whole timeline."""
        return cls(timeline.world_size, timeline.makespan, timeline.origin, work, label)

    @classmethod
    def planned(cls, estimate: Estimate, label: str = "") -> Timing:
        """The timing of a planned step; its work is counted in samples."""
        seconds = estimate.step_time.total
        return cls(estimate.cluster.devices, seconds, "modelled", estimate.global_batch, label)


def speed_up(
    timings: Iterable[Timing], width: int = 560, title: str | None = None, most: int = 0, chosen: int = 0
) -> Picture:
    """Draw the speed-up over the number of ranks, one line for each label and origin, against the ideal.

    Speed is work divided by seconds, the median if a number of ranks was timed more than once. A line is relative to
    its own smallest number of ranks, which counts as ideal.

    most: ranks that the axes have room for, at least.  chosen: a number of ranks to mark.

    Raises ValueError if there are no timings or more lines than can be told apart.
    """
    known = list(timings)
    if not known:
        raise ValueError("timings is empty; give at least one Timing, for instance Timing.of(run.timeline)")
    curves = _curves(known)
    looks = lines_of(curves)
    counts = sorted({timing.ranks for timing in known})
    most = max(most, counts[-1])
    highest = max(most, *(speed for speeds in curves.values() for speed in speeds.values()))
    ideal = Curve("ideal", [Point(0, 0), Point(most, most)], look=None)
    lines = [ideal, *(_line(name, speeds, looks[name]) for name, speeds in curves.items())]
    across, up = Axis("ranks", 0, most, counts, str), Axis("speed-up", 0, highest, ticks(highest, 6))
    shaded = [(chosen - 0.25, chosen + 0.25)] if chosen else []
    panel = Panel(across, up, lines, height=0.3 * width + 50, shaded=shaded)
    summary = "Speed-up over the number of ranks: " + "; ".join(starmap(_in_words, curves.items())) + "."
    rows = [(name, n, speed, percent(speed / n)) for name, own in curves.items() for n, speed in own.items()]
    origins = {timing.origin for timing in known}
    chart = Chart([panel], origins, title, width, {**looks, "ideal": None})
    return Picture.of(chart, summary, table(("line", "ranks", "speed-up", "of the ideal"), rows))


def _curves(timings: Iterable[Timing]) -> dict[str, dict[int, float]]:
    """The speed-up by number of ranks, by the names of the lines."""
    rates: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for timing in timings:
        rates[timing.line][timing.ranks].append(timing.work / timing.seconds)
    return {name: _relative({ranks: median(rate) for ranks, rate in own.items()}) for name, own in rates.items()}


def _relative(rates: dict[int, float]) -> dict[int, float]:
    fewest = min(rates)
    return {ranks: fewest * rate / rates[fewest] for ranks, rate in sorted(rates.items())}


def _in_words(name: str, speeds: dict[int, float]) -> str:
    fewest, most = min(speeds), max(speeds)
    times, share = number(speeds[most] / fewest), percent(speeds[most] / most)
    return f"{name}, {most} ranks are {times} times as fast as {fewest}, {share} of the ideal"


def _line(name: str, speeds: dict[int, float], look: Line) -> Curve:
    tip = "{}: {}, speed-up {}, {} of the ideal".format
    points = [
        Point(n, speed, tip(name, counted(n, "rank"), number(speed), percent(speed / n))) for n, speed in speeds.items()
    ]
    return Curve(name, points, look)
