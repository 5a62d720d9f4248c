"""The two limits of one machine, for models of growing size: its memory, and our patience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from course_lib.figures.axis import long_time, memory_size, number, thousands
from course_lib.figures.chart import Axis, Chart, Curve, Label, Mark, Panel, Point, interval
from course_lib.figures.palette import DOTS, LIKELY, LINES
from course_lib.figures.picture import Picture, table
from course_lib.planner import Estimate

DAY = 86_400.0
GiB = 2**30
PATIENCE = {"a day": 1.0, "a month": 30.0, "a year": 365.25}
COLUMNS = "model", "parameters", "memory", "fits", "training", "with 90%"
CHOSEN = LINES[1]._replace(dash=None)
BOUND = DOTS[3]._replace(dash="6,3")


def limits(
    estimates: Mapping[str, Estimate],
    tokens: Mapping[str, float],
    width: int = 800,
    title: str | None = None,
    chosen: str | None = None,
) -> Picture:
    """Draw memory and training time of models on one device, over their number of parameters.

    tokens: of the training of each model.  chosen: the model to highlight.
    Times are drawn as if the model fit, each with the interval of 90% of such runs.
    """
    capacity = next(iter(estimates.values())).capacity
    seconds = {name: tokens[name] / one.tokens_per_second for name, one in estimates.items()}
    memory, time, ranges, rows = {}, {}, [], []
    for name, one in estimates.items():
        size, (low, high) = one.model.parameters / 1e9, one.step_time.around(seconds[name])
        needs, takes, likely = memory_size(one.memory.total), long_time(seconds[name]), _likely(one, seconds[name])
        memory[name] = Point(size, one.memory.total / GiB, f"{name}: {needs}")
        time[name] = Point(size, seconds[name] / DAY, f"{name}: {takes}")
        ranges.append(interval(f"{name}, with 90%: {likely}", (size, low / DAY), (size, high / DAY)))
        rows.append((name, f"{size:.2f} billion", needs, one.fit, takes, likely))
    room = {f"a device has {memory_size(capacity)}": capacity / GiB}
    panels = [
        _panel("memory (GiB)", memory, room, 14, [], chosen),  # no points under the right end: they rise
        _panel("training (days)", time, PATIENCE, -6, ranges, chosen),
    ]
    chart = Chart(panels, {"modelled"}, title, width, {LIKELY: None}, is_row=True)
    return Picture.of(chart, _summary(estimates, seconds, capacity), table(COLUMNS, rows))


def _panel(
    title: str,
    points: Mapping[str, Point],
    bounds: Mapping[str, float],
    down: float,
    ranges: Sequence[Curve],
    chosen: str | None,
) -> Panel:
    """A panel of one limit. bounds: lines across, at values of y, by name.  down: offset of their names, in pixels."""
    sizes = [point.x for point in points.values()]
    across = Axis.by_powers("parameters (billions)", [min(sizes) / 1.6, *sizes], 2.8, number)  # names: left
    up = Axis.by_powers(title, [*(point.y for point in points.values()), *bounds.values()], 1.6, thousands)
    marks: list[Mark] = [
        Curve("", [Point(across.low, at), Point(across.high, at, words=Label(name, -6, down, "end", 11))], BOUND)
        for name, at in bounds.items()
    ]
    words = {name: Label(name, -7, -6, "end", 11, is_bold=name == chosen) for name in points}
    marks += [*ranges, Curve("", [point._replace(words=words[name]) for name, point in points.items()], LINES[0])]
    marks += [Curve("", [points[chosen]], CHOSEN)] if chosen else []
    return Panel(across, up, marks, 240.0, head=18.0)


def _likely(one: Estimate, seconds: float) -> str:
    return " to ".join(map(long_time, one.step_time.around(seconds)))


def _summary(estimates: Mapping[str, Estimate], seconds: Mapping[str, float], capacity: float) -> str:
    fitting = [name for name, one in estimates.items() if one.fits]
    quick = [name for name in estimates if seconds[name] <= DAY * PATIENCE["a month"]]
    fits = f"the largest model that fits into {memory_size(capacity)} is {fitting[-1]}" if fitting else "no model fits"
    trains = f"the largest trained within a month is {quick[-1]}" if quick else "none is trained within a month"
    name, last = list(estimates.items())[-1]
    needs = f"{name} needs {memory_size(last.memory.total)} and {long_time(seconds[name])}"
    likely = f"{_likely(last, seconds[name])} with 90%, by {last.cluster.spread_from}"
    return f"On one device {fits}, and {trains}; {needs} ({likely})."
