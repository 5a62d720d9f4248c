"""Horizontal bars, one below the other, each cut into the same parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from course_lib.figures.frame import MARGIN
from course_lib.figures.palette import INK, PAPER, Style
from course_lib.figures.svg import BACKGROUND, Sheet, text_width

if TYPE_CHECKING:
    import plotly.graph_objects as go

BAR, PITCH, RIGHT = 28.0, 38.0, 30.0
LIMIT = 22.0  # pixels above the bars for the name of the limit


class Bars(NamedTuple):
    """What to draw: for the name of each bar the sizes of its parts, and the axis that they lie on.

    styles: how each part looks, in the order in which they follow each other.
    end: the size at the right end of the axis.  mark: how a size is written there, and write: anywhere else.
    limit: a size that no bar should pass, and its name.
    """

    values: Mapping[str, Mapping[str, float]]
    styles: Mapping[str, Style]
    end: float
    ticks: Sequence[float]
    title: str
    mark: Callable[[float], str]
    write: Callable[[float], str]
    limit: tuple[float, str] | None = None


def draw_bars(sheet: Sheet, bars: Bars, top: float) -> float:
    """Returns where the next thing goes."""
    widest = 0.4 * sheet.width
    left = MARGIN + min(widest, max(map(text_width, bars.values))) + 8
    right = sheet.width - RIGHT
    top += LIMIT if bars.limit else 0
    bottom = top + PITCH * len(bars.values)
    places = [(tick, left + (right - left) * tick / bars.end) for tick in bars.ticks]
    with sheet.group(stroke="currentColor", stroke_opacity=0.2):
        for _, x in places:
            sheet.line(x, top, x, bottom)
    for i, (name, parts) in enumerate(bars.values.items()):
        y = top + i * PITCH + (PITCH - BAR) / 2
        sheet.text(left - 8, y + BAR / 2 + 4, _shortened(name, widest), text_anchor="end")
        _draw_parts(sheet, bars, name, parts, (left, right, y))
    if bars.limit:
        _draw_limit(sheet, bars.limit, (left, right, top, bottom), bars.end)
    for tick, x in places:
        sheet.text(x, bottom + 16, bars.mark(tick) if tick else "0", text_anchor="middle")
    sheet.text((left + right) / 2, bottom + 34, bars.title, text_anchor="middle", font_size=11)
    return bottom + 44


def _shortened(name: str, widest: float) -> str:
    room = int(widest / text_width("x"))
    return name if len(name) <= room else name[: room - 1] + "…"


def _draw_parts(
    sheet: Sheet, bars: Bars, name: str, parts: Mapping[str, float], place: tuple[float, float, float]
) -> None:
    x, right, y = place
    scale = (right - x) / bars.end
    for part, style in bars.styles.items():
        width = scale * parts[part]
        if width <= 0:
            continue
        tip, text = f"{name}: {style.label} {bars.write(parts[part])}", bars.write(parts[part])
        sheet.box(x, y, width, BAR, tip=tip, fill=sheet.fill(part, style), stroke="currentColor", stroke_width=0.5)
        if width >= text_width(text) + 8:
            # A halo in the color of the ground keeps the number readable over the hatching of a wait.
            is_hatched = style.fill == PAPER
            halo = {"stroke": BACKGROUND, "stroke_width": 4, "paint_order": "stroke"} if is_hatched else {}
            ink = "currentColor" if is_hatched else style.text
            sheet.text(x + width / 2, y + BAR / 2 + 4, text, text_anchor="middle", fill=ink, **halo)
        x += width


def _draw_limit(sheet: Sheet, limit: tuple[float, str], box: tuple[float, float, float, float], end: float) -> None:
    (size, name), (left, right, top, bottom) = limit, box
    x = left + (right - left) * size / end
    sheet.line(x, top - 4, x, bottom, stroke="currentColor", stroke_width=3, stroke_dasharray="6,3")
    is_far_right = x + text_width(name) > right
    sheet.text(x, top - 9, name, text_anchor="end" if is_far_right else "start", font_weight="bold")


def bars_in_plotly(bars: Bars, scale: float = 1.0) -> go.Figure:
    """The same bars to zoom into. scale: how large what the axis counts is."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for part, style in bars.styles.items():
        pattern = {"shape": style.shape, "fgcolor": style.shade, "bgcolor": style.fill, "size": 6}
        marker = {"color": style.fill, "line": {"color": INK, "width": 0.5}, "pattern": pattern}
        sizes = [parts[part] / scale for parts in bars.values.values()]
        figure.add_bar(y=list(bars.values), x=sizes, name=style.label, orientation="h", marker=marker)
    if bars.limit:
        figure.add_vline(x=bars.limit[0] / scale, line={"color": INK, "dash": "dash"}, annotation_text=bars.limit[1])
    figure.update_layout(barmode="stack", height=200 + 40 * len(bars.values))
    figure.update_xaxes(range=[0, bars.end / scale], title_text=bars.title)
    return figure.update_yaxes(autorange="reversed")
