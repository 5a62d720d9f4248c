"""A chart of curves and dots as a plotly figure, as plain data; JupyterLab draws it without the network."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from html import escape
from textwrap import wrap
from typing import Any

import numpy as np

from course_lib.figures import chart as charts
from course_lib.figures.axis import number, percent, thousands
from course_lib.figures.palette import INK, ORIGINS, PAPER

# Numbers that plotly can write are renewed on zooming; others stay where the chart has them.
FORMATS = {number: "", percent: ".0%", thousands: ","}
LEGEND = 50  # pixels
TOP_LEFT = {"x": 0.02, "y": 1, "yanchor": "top", "pad": {"t": 14}}
BOTTOM = {"yref": "container", "yanchor": "bottom", "y": 0}
# Dark on white, where no style sheet of the course gives it the colors of the page.
CARD = {"font": {"color": INK}, "paper_bgcolor": PAPER, "plot_bgcolor": PAPER}
LONG = 20  # rows of at least this many numbers are packed
DIGITS = 9  # of a number in a figure

Data = dict[str, Any]


def figure(chart: charts.Chart) -> Data:
    """The "data" and "layout" of a figure."""
    layout: Data = {"annotations": [], "shapes": [], **CARD}
    data: list[Data] = []
    for place, panel in enumerate(chart.panels):
        data += _draw_panel(layout, chart, panel, place)
    unnamed = set(map(escape, chart.legend))
    for trace in data:
        trace.update(legendgroup=trace["name"], showlegend=trace["name"] in unnamed)
        unnamed.discard(trace["name"])
    title = [f"<b>{escape(chart.title)}</b>"] if chart.title else []
    lines = title + [ORIGINS[origin] for origin in ORIGINS if origin in chart.origins]
    head, foot = 32 + 20 * len(lines), 56
    rows, columns = (1, len(chart.panels)) if chart.is_row else (len(chart.panels), 1)
    height = max(200, rows * (20 + chart.panels[0].height))
    layout |= {
        "title": {"text": "<br>".join(lines), "font": {"size": 14}, **TOP_LEFT},
        "margin": {"t": head, "r": 20, "b": foot},
        "height": head + height + foot + LEGEND,
        "grid": {"rows": rows, "columns": columns, "pattern": "independent", "ygap": 0.3},
        # At the bottom of the figure; plotly makes room for as many rows as it takes.
        "legend": {"traceorder": "normal", "orientation": "h", "itemsizing": "constant", **BOTTOM},
        "hovermode": "x unified" if chart.has_crosshair else "closest",
    }
    return json.loads(json.dumps({"data": data, "layout": layout}), parse_float=_rounded)


def _rounded(text: str) -> float:
    """A number without its last digits: from Python 3.12 on, sum() of floats rounds differently.

    A whole number is written as a browser writes it, so that saving an opened notebook leaves its file as it was.
    """
    short = float(f"{float(text):.{DIGITS}g}")
    return int(short) if short.is_integer() else short


def stored(chart: charts.Chart) -> Data:
    """The figure as a notebook stores it: long rows of numbers as plotly's packed arrays, not line by line."""
    made = figure(chart)
    for trace in made["data"]:
        for name in ("x", "y"):
            if len(trace[name]) > LONG:
                trace[name] = _packed(trace[name])
    # Not "responsive": JupyterLab follows the width by itself; with it, a change of theme leaves no height.
    return {**made, "config": {"displaylogo": False, "modeBarButtonsToRemove": ["sendChartToCloud"]}}


def _packed(row: Sequence[float]) -> Data:
    numbers = np.array(row)
    dtype = "i2" if (numbers % 1 == 0).all() and np.abs(numbers).max() < 2**15 else "f4"
    data = base64.b64encode(numbers.astype(f"<{dtype}").tobytes()).decode()
    return {"dtype": dtype, "bdata": data}


def _draw_panel(layout: Data, chart: charts.Chart, panel: charts.Panel, place: int) -> list[Data]:
    """Add a panel's axes, words and lines to the layout; return its traces."""
    suffix = str(place + 1) if place else ""
    where = {"xref": f"x{suffix}", "yref": f"y{suffix}"}
    layout |= {f"xaxis{suffix}": _axis(panel.x), f"yaxis{suffix}": _axis(panel.y)}
    if not chart.is_row and place + 1 < len(chart.panels):
        layout[f"xaxis{suffix}"] |= {"matches": f"x{len(chart.panels)}", "showticklabels": False}
    layout["annotations"] += [note | where for mark in panel.marks for note in _notes(panel, mark)]
    layout["shapes"] += [_band(*ends, where) for ends in panel.shaded]
    layout["shapes"] += [_line(mark, where) for mark in panel.marks if isinstance(mark, charts.Rule)]
    # Curves without a name in the legend lie below those with one, which have the order of the legend.
    order = {name: place for place, name in enumerate(chart.legend)}
    curves = [mark for mark in panel.marks if isinstance(mark, charts.Curve)]
    axes = {"xaxis": where["xref"], "yaxis": where["yref"]} if place else {}
    return [_scatter(panel, curve) | axes for curve in sorted(curves, key=lambda one: order.get(one.name, -1))]


def _axis(axis: charts.Axis) -> Data:
    names = {"tickvals": list(axis.ticks), "ticktext": [escape(axis.write(tick)) for tick in axis.ticks]}
    return {
        "type": "log" if axis.is_log else "linear",
        "range": [_on_axis(axis, axis.low), _on_axis(axis, axis.high)],
        "title": {"text": axis.title, "standoff": 8},  # above the legend
        "showticklabels": bool(axis.ticks),
        "showgrid": axis.has_grid,
        "gridcolor": "#d5d5d5",
        "zeroline": False,
        "automargin": True,
        "ticklabelstandoff": 4,  # the numbers of two axes would touch where they meet
        **({"tickformat": FORMATS[axis.write]} if axis.write in FORMATS and not axis.is_log else names),
    }


def _on_axis(axis: charts.Axis, value: float) -> float:
    """A value for plotly's ranges and annotations: its logarithm on a logarithmic axis."""
    return math.log10(value) if axis.is_log else value


def _notes(panel: charts.Panel, mark: charts.Mark) -> list[Data]:
    """The words of a mark, each at its place."""
    if isinstance(mark, charts.Rule):
        return [_written(panel, mark.words, mark.at, panel.y.high)]
    points = mark.points if isinstance(mark, charts.Curve) else [mark] if isinstance(mark, charts.Point) else []
    return [_written(panel, point.words, point.x, point.y) for point in points if point.words]


def _written(panel: charts.Panel, words: charts.Label, x: float, y: float) -> Data:
    return {
        "x": _on_axis(panel.x, x),
        "y": _on_axis(panel.y, y),
        "text": f"<b>{escape(words.text)}</b>" if words.is_bold else escape(words.text),
        "font": {"size": words.size},
        "bgcolor": "rgba(255,255,255,0.8)",
        "xshift": words.right,
        "yshift": -words.down,
        "xanchor": {"middle": "center", "end": "right"}.get(words.anchor or "", "left"),
        "yanchor": "bottom",
        "showarrow": False,
    }


def _band(low: float, high: float, where: Data) -> Data:
    across = {"xref": where["xref"], "x0": low, "x1": high}
    up = {"yref": f"{where['yref']} domain", "y0": 0, "y1": 1}
    return {"type": "rect", **across, **up, "fillcolor": INK, "opacity": 0.1, "line": {"width": 0}, "layer": "below"}


def _line(rule: charts.Rule, where: Data) -> Data:
    """A rule as a plotly shape; unlike an annotation, a shape takes the value itself on a logarithmic axis."""
    up = {"yref": f"{where['yref']} domain", "y0": 0, "y1": 1}
    place = {"xref": where["xref"], "x0": rule.at, "x1": rule.at, **up}
    return {"type": "line", **place, "line": {"color": INK, "dash": "dash", "width": 2}}


def _scatter(panel: charts.Panel, curve: charts.Curve) -> Data:
    def words(x: float, y: float) -> str:
        return f"{curve.name}: {panel.x.title} {panel.x.write(x)}, {panel.y.title} {panel.y.write(y)}"

    return {
        "type": "scatter",
        "x": [point.x for point in curve.points],
        "y": [point.y for point in curve.points],
        "name": escape(curve.name),
        "hovertext": [_lines(escape(point.tip or words(point.x, point.y))) for point in curve.points],
        "cliponaxis": False,
        "hoverinfo": "text",
        **_look(curve),
    }


def _lines(text: str) -> str:
    """A text broken into lines: plotly breaks none, and cuts off text outside of the figure."""
    return "<br>".join(wrap(text, 80, break_long_words=False, break_on_hyphens=False))


def _look(curve: charts.Curve) -> Data:
    """The look of a curve; points with tips have symbols."""
    look = curve.look
    if look is None:
        hover = "text" if curve.points[0].tip else "skip"
        return {"mode": "lines", "line": {"color": INK, "width": 1.5}, "hoverinfo": hover}
    sizes = [9 if point.tip else 0 for point in curve.points]
    marker = {"color": look.color, "symbol": look.symbol, "size": sizes, "opacity": 1}
    if look.dash is None:
        return {"mode": "markers", "marker": marker}
    dash = look.dash.replace(",", "px,") + "px" if look.dash else "solid"
    mode = "lines+markers" if any(point.tip for point in curve.points) else "lines"
    return {"mode": mode, "line": {"color": look.color, "dash": dash, "width": 2.5}, "marker": marker}
