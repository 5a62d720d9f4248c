"""Where the time goes: one bar for each run, cut into computing and the causes of loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from course_lib.figures.axis import percent
from course_lib.figures.frame import MARGIN, draw_legend, draw_origins, draw_title, new_sheet, on_card
from course_lib.figures.palette import INK, STYLES
from course_lib.figures.picture import Picture
from course_lib.figures.shares import CAUSES, Shares
from course_lib.figures.svg import BACKGROUND, Sheet, text_width

if TYPE_CHECKING:
    import plotly.graph_objects as go

BAR, PITCH, RIGHT = 28.0, 38.0, 30.0
# Each cause looks like a kind of span: a wait looks like a wait in every picture.
CAUSE_STYLES = {
    cause: STYLES[kind]._replace(label=CAUSES[cause])
    for cause, kind in (("compute", "forward"), ("wait", "wait"), ("transfer", "transfer"), ("rest", "other"))
}


def lost_time(shares: Mapping[str, Shares], width: int = 800, title: str | None = None) -> Picture:
    """Draw where the ranks' time went: a bar for each name, from `attribute(timeline)`.

    Raises ValueError if there is nothing to draw.
    """
    if not shares:
        raise ValueError('shares is empty; give at least one bar, for instance {"4 ranks": attribute(run.timeline)}')
    bars = _with_origins(shares)
    sheet = new_sheet(width)
    y = draw_title(sheet, title)
    y = draw_origins(sheet, {one.origin for one in bars.values()}, y)
    y = draw_legend(sheet, CAUSE_STYLES, y)
    sheet.height = _draw_bars(sheet, bars, y)
    return Picture(
        sheet,
        summary=_summary(shares),
        rows=[{"run": name, **{CAUSES[c]: percent(getattr(one, c)) for c in CAUSES}} for name, one in bars.items()],
        figure=lambda: _plotly(bars, title),
    )


def _with_origins(shares: Mapping[str, Shares]) -> dict[str, Shares]:
    """The names of the bars, with their origins where those differ."""
    mixed = len({one.origin for one in shares.values()}) > 1
    return {f"{name} ({one.origin})" if mixed else name: one for name, one in shares.items()}


def _summary(shares: Mapping[str, Shares]) -> str:
    name, worst = min(shares.items(), key=lambda item: item[1].compute)
    cause = max(("wait", "transfer", "rest"), key=lambda cause: getattr(worst, cause))
    most = "Most time is lost with " if len(shares) > 1 else ""
    return (
        f"{most}{name} ({worst.origin}): {percent(1 - worst.compute)} of the time is not spent computing, "
        f"and the largest part of that is {CAUSES[cause]}, {percent(getattr(worst, cause))}."
    )


def _draw_bars(sheet: Sheet, bars: Mapping[str, Shares], top: float) -> float:
    widest = 0.4 * sheet.width
    left = MARGIN + min(widest, max(map(text_width, bars))) + 8
    right = sheet.width - RIGHT
    bottom = top + PITCH * len(bars)
    with sheet.group(stroke="currentColor", stroke_opacity=0.2):
        for tenth in range(0, 11, 2):
            x = left + (right - left) * tenth / 10
            sheet.line(x, top, x, bottom)
    for i, (name, one) in enumerate(bars.items()):
        y = top + i * PITCH + (PITCH - BAR) / 2
        sheet.text(left - 8, y + BAR / 2 + 4, _shortened(name, widest), text_anchor="end")
        _draw_parts(sheet, name, one, left, right, y)
    for tenth in range(0, 11, 2):
        sheet.text(
            left + (right - left) * tenth / 10, bottom + 16, f"{tenth}0%" if tenth else "0", text_anchor="middle"
        )
    sheet.text((left + right) / 2, bottom + 34, "share of the ranks' time", text_anchor="middle", font_size=11)
    return bottom + 44


def _shortened(name: str, widest: float) -> str:
    room = int(widest / text_width("x"))
    return name if len(name) <= room else name[: room - 1] + "…"


def _draw_parts(sheet: Sheet, name: str, shares: Shares, left: float, right: float, y: float) -> None:
    x = left
    for cause, style in CAUSE_STYLES.items():
        share = getattr(shares, cause)
        width = (right - left) * share
        if width <= 0:
            continue
        tip, text = f"{name}: {style.label} {percent(share)}", percent(share)
        sheet.box(x, y, width, BAR, tip=tip, fill=sheet.fill(cause, style), stroke="currentColor", stroke_width=0.5)
        if width >= text_width(text) + 8:
            # A halo in the color of the ground keeps the number readable over the hatching of a wait.
            halo = {"stroke": BACKGROUND, "stroke_width": 4, "paint_order": "stroke"} if cause == "wait" else {}
            ink = "currentColor" if cause == "wait" else style.text
            sheet.text(x + width / 2, y + BAR / 2 + 4, text, text_anchor="middle", fill=ink, **halo)
        x += width


def _plotly(bars: Mapping[str, Shares], title: str | None) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    for cause, style in CAUSE_STYLES.items():
        pattern = {"shape": style.shape, "fgcolor": style.shade, "bgcolor": style.fill, "size": 6}
        marker = {"color": style.fill, "line": {"color": INK, "width": 0.5}, "pattern": pattern}
        values = [getattr(one, cause) for one in bars.values()]
        figure.add_bar(y=list(bars), x=values, name=style.label, orientation="h", marker=marker)
    figure.update_layout(barmode="stack", height=200 + 40 * len(bars))
    figure.update_xaxes(tickformat=".0%", range=[0, 1], title_text="share of the ranks' time")
    figure.update_yaxes(autorange="reversed")
    return on_card(figure, title, (one.origin for one in bars.values()))
