"""Two limits of one machine: models of rising size against its memory, and against our patience."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from course_lib.figures.axis import long_time, memory_size, number, thousands
from course_lib.figures.chart import Axis, Chart, Curve, Panel, Point, Range, Rule, Words
from course_lib.figures.palette import LIKELY, LINES
from course_lib.figures.picture import Picture, Row

if TYPE_CHECKING:
    from course_lib.planner import Estimate

DAY = 86_400.0
GiB = 2**30
TIMES = {"a day": DAY, "a month": 30 * DAY, "a year": 365.25 * DAY}


class _Measure(NamedTuple):
    """What is asked of each model, in its unit, and marks that mean something on its axis."""

    title: str
    values: Mapping[str, float]
    unit: float
    marks: Mapping[str, float]
    write: Callable[[float], str]
    ranges: Mapping[str, tuple[float, float]] = {}


def limits(
    estimates: Mapping[str, Estimate],
    tokens: Mapping[str, float],
    width: int = 800,
    title: str | None = None,
    chosen: str | None = None,
) -> Picture:
    """Draw memory and training time of models over their number of parameters, on one device.

    tokens: what each model is trained on.  chosen: the model to point out.
    A time is what the device would need if the model did fit, with 90% of such runs around it.
    """
    capacity = next(iter(estimates.values())).capacity
    seconds = {name: tokens[name] / one.tokens_per_second for name, one in estimates.items()}
    ranges = {name: one.step_time.around(seconds[name]) for name, one in estimates.items()}
    needed = {name: one.memory.total for name, one in estimates.items()}
    room = {f"a device has {memory_size(capacity)}": capacity}
    memory = _Measure("memory (GiB)", needed, GiB, room, memory_size)
    time = _Measure("training (days)", seconds, DAY, TIMES, long_time, ranges)
    panels = [_panel(estimates, measure, chosen) for measure in (memory, time)]
    chart = Chart(panels, {"modelled"}, title, width, {LIKELY: None}, is_row=True)
    return Picture.of(chart, _summary(estimates, seconds, capacity), _rows(estimates, seconds))


def _panel(estimates: Mapping[str, Estimate], measure: _Measure, chosen: str | None) -> Panel:
    sizes = {name: one.model.parameters / 1e9 for name, one in estimates.items()}
    values = {name: value / measure.unit for name, value in measure.values.items()}
    marks = {name: mark / measure.unit for name, mark in measure.marks.items()}
    rules = [Rule(mark, Words(name, -6, -6, "end", has_halo=True), is_across=True) for name, mark in marks.items()]
    points = []
    for name, size in sizes.items():
        words = Words(name, right=-7, down=-6, anchor="end", size=11, is_bold=name == chosen, has_halo=True)
        tip, look = f"{name}: {measure.write(measure.values[name])}", LINES[1] if name == chosen else None
        points.append(Point(size, values[name], tip, words, look))
    across = Axis.by_powers("parameters (billions)", sizes.values(), 1.6, number)
    up = Axis.by_powers(measure.title, [*values.values(), *marks.values()], 1.6, thousands)
    ranges = [
        Range(sizes[name], low / measure.unit, high / measure.unit, f"{name}, with 90%: {_likely(low, high)}")
        for name, (low, high) in measure.ranges.items()
    ]
    return Panel(across, up, [*rules, *ranges, Curve("", points, LINES[0])], 240.0, head=18.0)


def _likely(low: float, high: float) -> str:
    return f"{long_time(low)} to {long_time(high)}"


def _rows(estimates: Mapping[str, Estimate], seconds: Mapping[str, float]) -> list[Row]:
    return [
        {
            "model": name,
            "parameters": f"{one.model.parameters / 1e9:.2f} billion",
            "memory": memory_size(one.memory.total),
            "fits": one.fits,
            "training": long_time(seconds[name]),
            "with 90%": _likely(*one.step_time.around(seconds[name])),
        }
        for name, one in estimates.items()
    ]


def _summary(estimates: Mapping[str, Estimate], seconds: Mapping[str, float], capacity: float) -> str:
    fitting = [name for name, one in estimates.items() if one.fits]
    quick = [name for name in estimates if seconds[name] <= TIMES["a month"]]
    fits = f"the largest model that fits into {memory_size(capacity)} is {fitting[-1]}" if fitting else "no model fits"
    trains = f"the largest trained within a month is {quick[-1]}" if quick else "none is trained within a month"
    last = list(estimates)[-1]
    needs = f"{last} needs {memory_size(estimates[last].memory.total)} and {long_time(seconds[last])}"
    likely = _likely(*estimates[last].step_time.around(seconds[last]))
    origin = estimates[last].cluster.spread_from
    return f"On one device {fits}, and {trains}; {needs} ({likely} with 90%, by {origin})."
