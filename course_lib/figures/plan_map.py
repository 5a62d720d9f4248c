"""Every plan as a point: what it needs of a device's memory, and how long its step takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.figures.axis import duration, memory_size, number, powers
from course_lib.figures.frame import draw_origins, draw_title, new_sheet, on_card
from course_lib.figures.palette import INK, LINES
from course_lib.figures.picture import Picture
from course_lib.figures.plot import Axis, Plot, draw_axes, draw_line, draw_lines_legend, draw_symbol, spread
from course_lib.figures.svg import Sheet
from course_lib.figures.words import plan_in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from course_lib.planner import Estimate, Found

LEFT, RIGHT, HEIGHT = 60.0, 24.0, 320.0
FITS, FRONT = LINES[0], LINES[1]
CELL = 5.0  # pixels; of the plans that fall into one cell, the best is drawn
MOST_TIPS = 300
GiB = 2**30


def plan_map(found: Found, width: int = 800, title: str | None = None) -> Picture:
    """Draw every plan that a search found: memory across, time up, both by powers.

    The line joins the plans that no other beats in both; to the left of the dashed one they fit.
    """
    sheet = new_sheet(width)
    y = draw_title(sheet, title)
    y = draw_origins(sheet, {"modelled"}, y)
    y = draw_lines_legend(sheet, {"no other plan is both smaller and faster": FRONT}, y)
    sheet.height = _draw(sheet, found, y)
    return Picture(sheet, _summary(found), [_row(one) for one in found.pareto], lambda: _plotly(found, title))


def _draw(sheet: Sheet, found: Found, top: float) -> float:
    memory = spread(one.memory.total for one in found)
    time = spread((one.step_time.total for one in found), margin=1.6)
    plot = Plot(LEFT, sheet.width - RIGHT, top, top + HEIGHT, memory, time)
    across = [GiB * mark for mark in powers(memory.low / GiB, memory.high / GiB)]
    end = draw_axes(
        sheet,
        plot,
        Axis("each dot is a plan: memory of its fullest device (GiB)", across, lambda size: number(size / GiB)),
        Axis("time of one step (s)", powers(time.low, time.high), number),
    )
    capacity = found[0].capacity
    if memory.low < capacity < memory.high:
        x, _ = plot.at(capacity, time.high)
        sheet.line(x, plot.top, x, plot.bottom, stroke="currentColor", stroke_width=3, stroke_dasharray="6,3")
        sheet.text(x + 6, plot.top + 14, f"a device has {memory_size(capacity)}", font_weight="bold")
    _draw_plans(sheet, plot, found)
    points = [(one, plot.at(one.memory.total, one.step_time.total)) for one in found.pareto]
    draw_line(sheet, FRONT, [point for _, point in points])
    for one, point in points:
        draw_symbol(sheet, FRONT, *point, tip=_in_words(one))
        if one is found.estimates[0] and one.fits:
            sheet.text(point[0] - 4, point[1] + 22, "fastest that fits", text_anchor="end", font_weight="bold")
    return end


def _draw_plans(sheet: Sheet, plot: Plot, found: Found) -> None:
    """All plans as two shapes, pale where they do not fit; those that come first in the search have tooltips."""
    cells: dict[tuple[int, int], tuple[Estimate, float, float]] = {}
    for one in found:
        x, y = plot.at(one.memory.total, one.step_time.total)
        cells.setdefault((int(x / CELL), int(y / CELL)), (one, x, y))
    for fits, opacity in ((True, 0.9), (False, 0.35)):
        dots = "".join(f"M{x - 1.5:.1f},{y - 1.5:.1f}h3v3h-3z" for one, x, y in cells.values() if one.fits == fits)
        sheet.path(dots, fill=FITS.color, fill_opacity=opacity)
    for one, x, y in list(cells.values())[:MOST_TIPS]:
        sheet.box(x - 3, y - 3, 6.0, 6.0, tip=_in_words(one), fill="none", pointer_events="all")


def _in_words(one: Estimate) -> str:
    fits = "" if one.fits else ", does not fit"
    return f"{plan_in_words(one.plan)}: {duration(one.step_time.total)}, {memory_size(one.memory.total)}{fits}"


def _summary(found: Found) -> str:
    fitting = sum(one.fits for one in found)
    text = f"{fitting:,} of {len(found):,} plans fit into {memory_size(found[0].capacity)}"
    smallest = found.pareto[-1]
    if not fitting:
        return f"{text}; the smallest is {_in_words(smallest)}."
    return f"{text}; the fastest of them is {_in_words(found.best)}; the smallest of all is {_in_words(smallest)}."


def _row(one: Estimate) -> dict[str, object]:
    return {
        "plan": plan_in_words(one.plan),
        "step (s)": one.step_time.total,
        "memory (GiB)": one.memory.total / GiB,
        "fits": one.fits,
    }


def _plotly(found: Found, title: str | None) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    for name, some, line, mode in (
        ("a plan", found.estimates, FITS, "markers"),
        ("no other is both smaller and faster", found.pareto, FRONT, "lines+markers"),
    ):
        figure.add_scatter(
            x=[one.memory.total / GiB for one in some],
            y=[one.step_time.total for one in some],
            text=[_in_words(one) for one in some],
            name=name,
            mode=mode,
            hoverinfo="text",
            line={"color": line.color},
            marker={"color": line.color, "symbol": line.symbol, "size": 4 if mode == "markers" else 9},
        )
    capacity = found[0].capacity / GiB
    figure.add_vline(x=capacity, line={"color": INK, "dash": "dash"}, annotation_text="what a device has")
    figure.update_xaxes(type="log", title_text="memory of the fullest device (GiB)")
    figure.update_yaxes(type="log", title_text="time of one step (s)")
    return on_card(figure, title, {"modelled"})
