"""A map of plans: points, by memory on a device and step time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle

from course_lib.figures.axis import duration, memory_size
from course_lib.figures.chart import Axis, Chart, Curve, Label, Mark, Panel, Point, Rule, interval
from course_lib.figures.palette import DOTS, LIKELY, LINES, Line, Look
from course_lib.figures.picture import Picture, table
from course_lib.figures.words import plan_in_words
from course_lib.planner import Estimate, Found
from course_lib.planner.alternatives import by_shape, shape

FRONT, MARKED = LINES[1], Line("#cc3311", None, "triangle-down")
BEST = "no other plan is both smaller and faster"
GiB = 2**30
COLUMNS = "plan", "step (s)", "with 90% (s)", "memory (GiB)", "fits"


def plan_map(
    found: Found,
    title: str | None = None,
    marked: Mapping[str, Estimate] | None = None,
) -> Picture:
    """Draw the plans that a search found: memory across, time up, both by powers.

    marked: plans to label, by their labels.

    A dot is the fastest of all plans with the same ranks, ZeRO stage and recomputation. The line is the Pareto front,
    the plans that no other plan beats in both. Its two ends have intervals: an error in the machine's figures makes all
    plans slower or faster together.
    """
    plans = by_shape(found, lambda plan: (shape(plan), plan.zero, plan.recompute))
    dots = list(_dots(plans))
    legend: dict[str, Look] = {one.name: one.look for one in dots}
    legend |= {BEST: FRONT, **dict.fromkeys(marked or {}, MARKED), LIKELY: None}
    chart = Chart([_panel(found, plans, dots, marked or {})], {"modelled"}, title, 800, legend)
    rows = (
        (plan_in_words(one.plan), step.total, f"{step.low:.4g} to {step.high:.4g}", one.memory.total / GiB, one.fit)
        for one in found.pareto
        for step in [one.step_time]
    )
    return Picture.of(chart, _summary(found), table(COLUMNS, rows))


def _panel(found: Found, plans: list[Estimate], dots: list[Curve], marked: Mapping[str, Estimate]) -> Panel:
    drawn = *plans, *found.pareto, *marked.values()
    needed = [one.memory.total / GiB for one in drawn]
    memory = Axis.by_powers("memory of the fullest device (GiB)", needed)
    ends = [end for one in drawn for end in (one.step_time.low, one.step_time.high)]
    time = Axis.by_powers("time of one step (s)", ends)
    capacity = found[0].capacity
    fastest = Label("fastest that fits", right=-4, down=22, anchor="end")
    front = [_point(one, _in_words(one), fastest if one.fits and one is found[0] else None) for one in found.pareto]
    limit = Rule(capacity / GiB, Label(f"a device has {memory_size(capacity)}", right=6, down=14))
    marks: list[Mark] = [*dots, *map(_interval, (found.pareto[0], found.pareto[-1])), Curve(BEST, front, FRONT)]
    for name, one in marked.items():
        words = Label(name, right=9, down=-9)
        marks.append(Curve(name, [_point(one, f"{name}: {_in_words(one)}", words)], MARKED))
    if memory.low < capacity / GiB < memory.high:
        marks.insert(0, limit)
    return Panel(memory, time, marks, 320.0, left=60.0)


def _dots(plans: Sequence[Estimate]) -> Iterator[Curve]:
    """The dots for each number of tensor ranks."""
    for tp, look in zip(sorted({one.plan.tp for one in plans}), cycle(DOTS)):
        dots = [_point(one, _in_words(one)) for one in plans if one.plan.tp == tp]
        yield Curve(f"tensor ranks: {tp}", dots, look._replace(dash=None))


def _point(one: Estimate, tip: str, words: Label | None = None) -> Point:
    return Point(one.memory.total / GiB, one.step_time.total, tip, words)


def _interval(one: Estimate) -> Curve:
    return interval(
        one.interval, *((one.memory.total / GiB, seconds) for seconds in (one.step_time.low, one.step_time.high))
    )


def _in_words(one: Estimate) -> str:
    fit = "" if one.fits else f", {one.fit}"
    return f"{plan_in_words(one.plan)}{fit}: {duration(one.step_time.total)}, {memory_size(one.memory.total)}"


def _summary(found: Found) -> str:
    fitting, may = (sum(one.fit == fit for one in found) for fit in ("fits", "may fit"))
    text = f"{fitting:,} of {len(found):,} plans fit into {memory_size(found[0].capacity)}, and {may:,} more may"
    smallest = found.pareto[-1]
    if not fitting + may:
        return f"{text}; the smallest is {_in_words(smallest)}."
    text = f"{text}; the fastest of them is {_in_words(found.best)}; the smallest of all is {_in_words(smallest)}."
    return f"{text} {found.best.interval}"
