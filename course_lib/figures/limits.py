"""Two limits of one machine: models of rising size against its memory, and against our patience."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from course_lib.figures.axis import long_time, memory_size, number, powers
from course_lib.figures.frame import draw_origins, draw_title, new_sheet, on_card
from course_lib.figures.palette import INK, LINES
from course_lib.figures.picture import Picture
from course_lib.figures.plot import Axis, Plot, draw_axes, draw_line, draw_symbol, spread
from course_lib.figures.svg import Sheet

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from course_lib.planner import Estimate

LEFT, RIGHT, GAP, HEIGHT = 56.0, 20.0, 74.0, 240.0
DAY = 86_400.0
GiB = 2**30
TIMES = {"a day": DAY, "a month": 30 * DAY, "a year": 365.25 * DAY}


class _Panel(NamedTuple):
    """One of the two plots: a value for each model, and marks that mean something on its axis."""

    title: str
    values: Sequence[float]
    unit: float
    marks: Mapping[str, float]
    write: Callable[[float], str]


def limits(
    estimates: Mapping[str, Estimate],
    tokens: Mapping[str, float],
    width: int = 800,
    title: str | None = None,
    chosen: str | None = None,
) -> Picture:
    """Draw memory and training time of models over their number of parameters, on one device.

    tokens: what each model is trained on.  chosen: the model to point out.
    A time is what the device would need if the model did fit.

    Raises ValueError if there is nothing to draw.
    """
    if not estimates:
        raise ValueError('estimates is empty; give at least one, for instance {"1.3B": estimate(...)}')
    capacity = next(iter(estimates.values())).capacity
    seconds = {name: tokens[name] / one.tokens_per_second for name, one in estimates.items()}
    memory = _Panel(
        "memory (GiB)",
        [one.memory.total for one in estimates.values()],
        GiB,
        {f"a device has {memory_size(capacity)}": capacity},
        memory_size,
    )
    time = _Panel("training (days)", list(seconds.values()), DAY, TIMES, long_time)
    sheet = new_sheet(width)
    y = draw_title(sheet, title)
    y = draw_origins(sheet, {"modelled"}, y) + 18
    middle = (LEFT + width - RIGHT) / 2
    _draw(sheet, estimates, memory, (LEFT, middle - GAP / 2, y), chosen)
    sheet.height = _draw(sheet, estimates, time, (middle + GAP / 2, width - RIGHT, y), chosen)
    rows = [
        {
            "model": name,
            "parameters": f"{one.model.parameters / 1e9:.2f} billion",
            "memory": memory_size(one.memory.total),
            "fits": one.fits,
            "training": long_time(seconds[name]),
        }
        for name, one in estimates.items()
    ]
    return Picture(
        sheet, _summary(estimates, seconds, capacity), rows, lambda: _plotly(estimates, (memory, time), title)
    )


def _summary(estimates: Mapping[str, Estimate], seconds: Mapping[str, float], capacity: float) -> str:
    fitting = [name for name, one in estimates.items() if one.fits]
    quick = [name for name in estimates if seconds[name] <= TIMES["a month"]]
    fits = f"the largest model that fits into {memory_size(capacity)} is {fitting[-1]}" if fitting else "no model fits"
    trains = f"the largest trained within a month is {quick[-1]}" if quick else "none is trained within a month"
    last = list(estimates)[-1]
    needs = f"{last} needs {memory_size(estimates[last].memory.total)} and {long_time(seconds[last])}"
    return f"On one device {fits}, and {trains}; {needs}."


def _draw(
    sheet: Sheet, estimates: Mapping[str, Estimate], panel: _Panel, box: tuple[float, float, float], chosen: str | None
) -> float:
    left, right, top = box
    sizes = [one.model.parameters for one in estimates.values()]
    across, up = spread(sizes, 1.6), spread([*panel.values, *panel.marks.values()], 1.6)
    plot = Plot(left, right, top, top + HEIGHT, across, up)
    billions = [1e9 * mark for mark in powers(across.low / 1e9, across.high / 1e9)]
    marks = [panel.unit * mark for mark in powers(up.low / panel.unit, up.high / panel.unit)]
    end = draw_axes(
        sheet,
        plot,
        Axis("parameters (billions)", billions, lambda size: number(size / 1e9)),
        Axis(panel.title, marks, lambda value: number(value / panel.unit)),
    )
    for name, mark in panel.marks.items():
        _, y = plot.at(across.low, mark)
        sheet.line(left, y, right, y, stroke="currentColor", stroke_width=2, stroke_dasharray="6,3")
        sheet.text(left + 6, y - 6, name, font_weight="bold")
    points = [plot.at(*point) for point in zip(sizes, panel.values, strict=True)]
    draw_line(sheet, LINES[0], points)
    for name, point, value in zip(estimates, points, panel.values, strict=True):
        draw_symbol(sheet, LINES[1] if name == chosen else LINES[0], *point, tip=f"{name}: {panel.write(value)}")
        if name in (chosen, list(estimates)[-1]):
            sheet.text(point[0] - 8, point[1] - 8, name, text_anchor="end", font_weight="bold")
    return end


def _plotly(estimates: Mapping[str, Estimate], panels: Sequence[_Panel], title: str | None) -> go.Figure:
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=len(panels), horizontal_spacing=0.12)
    sizes = [one.model.parameters / 1e9 for one in estimates.values()]
    for column, panel in enumerate(panels, start=1):
        values = [value / panel.unit for value in panel.values]
        text = [f"{name}: {panel.write(value)}" for name, value in zip(estimates, panel.values, strict=True)]
        marker = {"color": LINES[0].color, "size": 9}
        figure.add_scatter(x=sizes, y=values, text=text, hoverinfo="text", marker=marker, row=1, col=column)
        for name, mark in panel.marks.items():
            line = {"color": INK, "dash": "dash"}
            figure.add_hline(y=mark / panel.unit, line=line, annotation_text=name, row=1, col=column)
        figure.update_xaxes(type="log", title_text="parameters (billions)", row=1, col=column)
        figure.update_yaxes(type="log", title_text=panel.title, row=1, col=column)
    figure.update_layout(showlegend=False)
    return on_card(figure, title, {"modelled"})
