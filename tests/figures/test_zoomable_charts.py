"""The charts as plotly figures: places of marks, their texts, and that color is never the only sign."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable
from functools import cache

import numpy
import plotly.graph_objects as go
import pytest

from course_lib.figures import chart_plotly, loss_curves
from course_lib.figures.axis import duration, long_time
from course_lib.figures.bars import BAR, PITCH
from course_lib.figures.chart import Curve
from course_lib.figures.palette import LIKELY
from course_lib.figures.plan_map import BEST
from course_lib.figures.words import plan_in_words
from tests.figures.charts import CHARTS, FOUND, PLANS, ZOOMABLE
from tests.figures.drawn import texts, zoomable

every_chart = pytest.mark.parametrize("name", ZOOMABLE)


@cache
def figure_of(name: str) -> go.Figure:
    return zoomable(CHARTS[name])


def axes(figure: go.Figure) -> dict[str, tuple[float, float]]:
    """The range of each axis, lower end first, by the name that marks call it."""
    named = {key.replace("axis", ""): value for key, value in figure.layout.to_plotly_json().items() if "axis" in key}
    return {name: (min(axis["range"]), max(axis["range"])) for name, axis in named.items()}


def is_log(figure: go.Figure, axis: str) -> bool:
    return figure.layout[f"{axis[0]}axis{axis[1:]}"].type == "log"


@every_chart
def test_every_mark_lies_on_its_axes(name: str) -> None:
    figure = figure_of(name)
    ranges = axes(figure)
    for trace in figure.data:
        for axis, values in ((trace.xaxis or "x", trace.x), (trace.yaxis or "y", trace.y)):
            low, high = ranges[axis]
            places = [math.log10(value) if is_log(figure, axis) else value for value in values]
            assert all(low - 1e-6 <= place <= high + 1e-6 for place in places), trace.name
    for note in figure.layout.annotations:
        for axis, place in ((note.xref, note.x), (note.yref, note.y)):
            low, high = ranges[axis]
            assert low - 1e-6 <= place <= high + 1e-6, note.text


@every_chart
def test_every_curve_of_the_picture_is_in_the_figure(name: str) -> None:
    points = [(point.x, point.y) for curve in curves_of(name) for point in curve.points]
    shown = [place for trace in figure_of(name).data for place in zip(trace.x, trace.y, strict=True)]
    assert points
    assert rounded(points) <= rounded(shown)


def curves_of(name: str) -> list[Curve]:
    chart = CHARTS[name].chart
    assert chart is not None
    return [mark for panel in chart.panels for mark in panel.marks if isinstance(mark, Curve)]


def rounded(places: Iterable[tuple[float, float]]) -> set[tuple[str, str]]:
    return {(f"{x:.6g}", f"{y:.6g}") for x, y in places}


@every_chart
def test_what_is_written_in_the_picture_is_written_in_the_figure(name: str) -> None:
    figure = figure_of(name)
    notes = {note.text.removeprefix("<b>").removesuffix("</b>") for note in figure.layout.annotations}
    assert notes <= set(texts(CHARTS[name].svg))
    titles = [value["title"]["text"] for key, value in figure.layout.to_plotly_json().items() if "axis" in key]
    assert set(filter(None, titles)) <= set(texts(CHARTS[name].svg))


@every_chart
def test_nothing_is_told_by_color_alone(name: str) -> None:
    curves = [trace for trace in figure_of(name).data if trace.line.dash]
    assert len({curve.line.dash for curve in curves if curve.name}) == len([curve for curve in curves if curve.name])


@every_chart
def test_each_name_stands_once_in_the_legend(name: str) -> None:
    shown = [trace for trace in figure_of(name).data if trace.showlegend]
    looks = [str((trace.line.to_plotly_json(), trace.marker)) for trace in shown]
    assert len(shown) == len({trace.name for trace in shown}) == len(set(looks))
    assert all(trace.legendgroup == trace.name for trace in figure_of(name).data)


def test_every_kind_of_plan_has_a_dot_that_says_what_it_is_and_needs() -> None:
    traces = {trace.name: trace for trace in figure_of("plan_map").data}
    found: dict[tuple[object, ...], float] = {}
    for one in FOUND:
        plan, step = one.plan, one.step_time.total
        kind = plan.tp, plan.pp, plan.cp, plan.zero, plan.recompute
        found[kind] = min(step, found.get(kind, step))
    clouds = [trace for name, trace in traces.items() if name.startswith("tensor")]
    dots = [dot for trace in clouds for dot in zip(trace.y, trace.hovertext, strict=True)]
    assert sorted(y for y, _ in dots) == pytest.approx(sorted(found.values()))
    best = FOUND.best
    said = f"{plan_in_words(best.plan)}: {duration(best.step_time.total)}"
    assert any(tip.replace("<br>", " ").startswith(said) for _, tip in dots)
    assert len(traces[BEST].x) == len(FOUND.pareto)
    assert traces[BEST].line.color not in {trace.marker.color for trace in clouds}


def test_long_rows_are_stored_packed_and_are_the_same() -> None:
    chart = loss_curves({"float32": [3.0 - 0.02 * step for step in range(101)]}).chart
    assert chart is not None
    (whole,), (packed,) = chart_plotly.figure(chart)["data"], chart_plotly.stored(chart)["data"]
    for name in ("x", "y"):
        numbers = numpy.frombuffer(base64.b64decode(packed[name]["bdata"]), packed[name]["dtype"])
        assert numpy.allclose(numbers, whole[name], rtol=1e-6)


def whiskers(name: str) -> list[tuple[tuple[float, ...], tuple[float, ...], str]]:
    curves = [curve.points for curve in curves_of(name) if curve.name == LIKELY]
    return [(tuple(one.x for one in points), tuple(one.y for one in points), points[0].tip) for points in curves]


def test_steps_and_times_and_speeds_have_their_interval() -> None:
    for (x, y, _), row, one in zip(whiskers("time"), (0, 1), PLANS.values(), strict=True):
        assert (1e-3 * x[0], 1e-3 * x[1]) == pytest.approx((one.step_time.low, one.step_time.high))
        assert y[0] == y[1]
        assert (
            BAR / 2 < PITCH * (y[0] - row - 0.5) < PITCH / 2
        )  # pixels: below this bar, and nearer to it than to the next
    for (x, y, tip), one in zip(whiskers("plan_map"), (FOUND.pareto[0], FOUND.pareto[-1]), strict=True):
        assert [2**30 * place for place in x] == pytest.approx([one.memory.total] * 2)
        assert y == pytest.approx((one.step_time.low, one.step_time.high))
        assert tip == one.interval
    for (x, y, tip), one in zip(whiskers("limits"), PLANS.values(), strict=True):
        assert x == pytest.approx([one.model.parameters / 1e9] * 2)
        low, high = (2e10 / speed for speed in reversed(one.step_time.around(one.tokens_per_second)))
        assert y == pytest.approx([low / 86_400, high / 86_400])
        assert f"{long_time(low)} to {long_time(high)}" in tip
    ranges = [one.step_time.around(one.mfu) for one in PLANS.values()]
    speeds = [speed for mfu in ranges for speed in [[312 * share for share in mfu]] * 2]
    assert [list(y) for _, y, _ in whiskers("roofline")] == [pytest.approx(pair) for pair in speeds]


def test_names_with_angle_brackets_are_no_markup() -> None:
    curve = figure_of("speed_up").data[0]
    assert curve.name == "a &lt; b (measured)"
    assert curve.hovertext[0].startswith("a &lt; b (measured): 1 rank,")
