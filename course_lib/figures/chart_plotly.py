"""Makes a plotly figure of a chart. It loads nothing from outside in JupyterLab."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType
from plotly.subplots import make_subplots

from course_lib.figures.axis import number, percent, thousands, with_prefix
from course_lib.figures.chart import Area, Axis, Band, Bar, Chart, Cloud, Curve, Label, Panel, Point, Rule, Words
from course_lib.figures.palette import INK, ORIGINS, PAPER

# Numbers that plotly can write, so that new ones come while one zooms; what it cannot stays where the chart has it.
FORMATS = {number: "", percent: ".0%", thousands: ",", with_prefix: "~s"}
LINES_OF_AXES = {"gridcolor": "#d5d5d5", "zeroline": False, "automargin": True}


def figure(chart: Chart) -> go.Figure:
    """Dark on white whatever the theme of the page, as the stored pictures are."""
    down, across = (1, len(chart.panels)) if chart.is_row else (len(chart.panels), 1)
    made = make_subplots(rows=down, cols=across, shared_xaxes=not chart.is_row, horizontal_spacing=0.12)
    for place, panel in enumerate(chart.panels):
        where = {"row": 1, "col": place + 1} if chart.is_row else {"row": place + 1, "col": 1}
        _add_panel(made, chart, panel, where)
    named = set()
    for trace in made.data:
        trace.update(legendgroup=trace.name, showlegend=bool(trace.name) and trace.name not in named)
        named.add(trace.name)
    title = [f"<b>{escape(chart.title)}</b>"] if chart.title else []
    lines = title + [ORIGINS[origin] for origin in ORIGINS if origin in chart.origins]
    return made.update_layout(
        template="none",
        title={"text": "<br>".join(lines), "font": {"size": 14}, "x": 0.02, "y": 1, "yanchor": "top", "pad": {"t": 14}},
        font={"color": INK},
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        margin={"t": 44 + 20 * len(lines), "r": 20, "b": 50},
        height=max(300, 180 + 20 * len(lines) + down * (20 + chart.panels[0].height)),
        barmode="stack",
        uniformtext={"minsize": 9, "mode": "hide"},
        legend={"traceorder": "normal"},
        hovermode="x unified" if chart.has_crosshair else "closest",
    )


def _add_panel(made: go.Figure, chart: Chart, panel: Panel, where: dict[str, int]) -> None:
    order = {name: place for place, name in enumerate(chart.legend)}
    # What the legend does not name lies below what it names, in the order of the legend.
    for _, trace in sorted(_traces(panel), key=lambda named: order.get(named[0], -1)):
        made.add_trace(trace, **where)
    for mark in panel.marks:
        if isinstance(mark, Label):
            _write(made, panel, mark.words, where, mark.x, mark.y)
        elif isinstance(mark, Curve):
            for point in mark.points:
                if point.words:
                    _write(made, panel, point.words, where, point.x, point.y)
        elif isinstance(mark, Band):
            made.add_vrect(mark.low, mark.high, fillcolor=INK, opacity=0.1, line_width=0, layer="below", **where)
        elif isinstance(mark, Rule):
            _add_rule(made, panel, mark, where)
    made.update_xaxes(_axis(panel.x), **where, **LINES_OF_AXES)
    made.update_yaxes(_axis(panel.y), **where, **LINES_OF_AXES)


def _axis(axis: Axis) -> dict[str, object]:
    names = {"tickvals": list(axis.ticks), "ticktext": [escape(axis.write(tick)) for tick in axis.ticks]}
    return {
        "type": "log" if axis.is_log else "linear",
        "range": [_on_axis(axis, axis.low), _on_axis(axis, axis.high)],
        "title_text": axis.title,
        "showticklabels": bool(axis.ticks),
        "showgrid": axis.has_grid,
        **({"tickformat": FORMATS[axis.write]} if axis.write in FORMATS else names),
    }


def _on_axis(axis: Axis, value: float) -> float:
    """Where plotly has a range's end and an annotation: on a logarithmic axis it wants the logarithm."""
    return math.log10(value) if axis.is_log else value


def _write(made: go.Figure, panel: Panel, words: Words, where: dict[str, int], x: float, y: float) -> None:
    made.add_annotation(
        x=_on_axis(panel.x, x),
        y=_on_axis(panel.y, y),
        text=f"<b>{escape(words.text)}</b>" if words.is_bold else escape(words.text),
        font={"size": words.size},
        xshift=words.right,
        yshift=-words.down,
        xanchor={"middle": "center", "end": "right"}.get(words.anchor or "", "left"),
        yanchor="bottom",
        showarrow=False,
        **where,
    )


def _add_rule(made: go.Figure, panel: Panel, rule: Rule, where: dict[str, int]) -> None:
    add = made.add_hline if rule.is_across else made.add_vline
    add(rule.at, line={"color": INK, "dash": "dash", "width": rule.width}, **where)
    x, y = (panel.x.high, rule.at) if rule.is_across else (rule.at, panel.y.high)
    _write(made, panel, rule.words, where, x, y)


def _traces(panel: Panel) -> Iterator[tuple[str, BaseTraceType]]:
    """A trace for each curve, and one for all bars of a part, each with its name in the legend of the chart."""
    for mark in panel.marks:
        if isinstance(mark, Curve):
            yield mark.name, _scatter(panel, mark.name, mark.points, **_curve(mark))
        elif isinstance(mark, Cloud):
            opacity = [0.35 if is_pale else 0.9 for is_pale in mark.is_pale]
            dots = {"color": mark.look.color, "symbol": "square", "size": 4, "opacity": opacity}
            yield mark.name, _scatter(panel, mark.name, mark.points, mode="markers", marker=dots)
        elif isinstance(mark, Area):
            stairs = {"shape": "hv", "color": mark.look.color}
            points = [Point(*step) for step in mark.steps]
            yield mark.name, _scatter(panel, mark.name, points, mode="lines", line=stairs, fill="tozeroy")
    bars = [mark for mark in panel.marks if isinstance(mark, Bar)]
    for part in dict.fromkeys(bar.part for bar in bars):
        yield part, _bars([bar for bar in bars if bar.part == part])


def _scatter(panel: Panel, name: str, points: Sequence[Point], **look: object) -> go.Scatter:
    def words(x: float, y: float) -> str:
        return f"{name}: {panel.x.title} {panel.x.write(x)}, {panel.y.title} {panel.y.write(y)}"

    return go.Scatter(
        x=[point.x for point in points],
        y=[point.y for point in points],
        name=escape(name),
        hovertext=[escape(point.tip or words(point.x, point.y)) for point in points],
        cliponaxis=False,
        **{"hoverinfo": "text", **look},
    )


def _curve(curve: Curve) -> dict[str, object]:
    """How a curve looks: its points have symbols where they have tips."""
    look = curve.look
    if look is None:
        return {"mode": "lines", "line": {"color": INK, "width": 1}, "hoverinfo": "skip"}
    looks = [point.look or look for point in curve.points]
    marker = {
        "color": [one.color for one in looks],
        "symbol": [one.symbol for one in looks],
        "size": [9 if point.tip else 0 for point in curve.points],
        "opacity": 1,
    }
    if look.dash is None:
        return {"mode": "markers", "marker": marker}
    dash = look.dash.replace(",", "px,") + "px" if look.dash else "solid"
    mode = "lines+markers" if any(point.tip for point in curve.points) else "lines"
    return {"mode": mode, "line": {"color": look.color, "dash": dash, "width": 2.5}, "marker": marker}


def _bars(bars: list[Bar]) -> go.Bar:
    style, is_across = bars[0].style, bars[0].is_across
    places, sizes = [bar.at for bar in bars], [bar.size for bar in bars]
    return go.Bar(
        name=style.label,
        orientation="h" if is_across else "v",
        x=sizes if is_across else places,
        y=places if is_across else sizes,
        width=bars[0].thickness,
        text=[bar.text for bar in bars],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"color": style.text},
        hovertext=[escape(bar.tip) for bar in bars],
        hoverinfo="text",
        marker={
            "color": style.fill,
            "line": {"color": INK, "width": 0.5},
            "pattern": {"shape": style.shape, "fgcolor": style.shade, "bgcolor": style.fill, "size": 6},
        },
    )
