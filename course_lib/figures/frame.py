"""What every picture has around it: a title, a legend, and for plotly figures a card to lie on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING

from course_lib.figures.palette import INK, ORIGINS, PAPER, Style
from course_lib.figures.svg import Sheet, text_width

if TYPE_CHECKING:
    import plotly.graph_objects as go

MARGIN = 16.0
NARROWEST = 400


def new_sheet(width: int) -> Sheet:
    """An empty sheet. Raises ValueError if it is too narrow for a picture with text."""
    if width < NARROWEST:
        raise ValueError(f"width={width} is too narrow for a picture; give it at least {NARROWEST} pixels")
    return Sheet(width)


def draw_title(sheet: Sheet, title: str | None) -> float:
    """Returns where the next thing goes, as the other functions here do."""
    y = 8.0
    for line in wrap(title or "", int((sheet.width - 2 * MARGIN) / text_width("x", 14))):
        sheet.text(MARGIN, y + 14, line, font_size=14, font_weight="bold")
        y += 20
    return y


def draw_legend(sheet: Sheet, styles: Mapping[str, Style], y: float) -> float:
    """A patch and a name for each style, in as many lines as the sheet needs. Keys name the patterns."""
    x = MARGIN
    for name, style in styles.items():
        needed = 36 + text_width(style.label)
        if x + needed > sheet.width and x > MARGIN:
            x, y = MARGIN, y + 20
        sheet.box(x, y + 2, 16.0, 12.0, fill=sheet.fill(name, style), stroke="currentColor", stroke_width=0.5)
        sheet.text(x + 22, y + 12, style.label)
        x += needed
    return y + 24 if styles else y


def draw_origins(sheet: Sheet, origins: Iterable[str], y: float) -> float:
    """One line for each origin in the picture: nothing is shown without it."""
    for origin in ORIGINS:
        if origin in origins:
            sheet.text(MARGIN, y + 12, ORIGINS[origin], font_weight="bold")
            y += 18
    return y + 4


def on_card(figure: go.Figure, title: str | None, origins: Iterable[str]) -> go.Figure:
    """Title and origins on top, dark on white whatever the theme of the page, as the stored pictures are."""
    present = set(origins)
    lines = [f"<b>{escape(title)}</b>"] if title else []
    lines += [ORIGINS[origin] for origin in ORIGINS if origin in present]
    figure.update_layout(
        template="none",
        title={"text": "<br>".join(lines), "font": {"size": 14}, "x": 0.02, "y": 1, "yanchor": "top", "pad": {"t": 14}},
        font={"color": INK},
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        margin={"t": 34 + 20 * len(lines), "r": 20, "b": 50},
        legend={"traceorder": "normal"},
    )
    figure.update_xaxes(gridcolor="#d5d5d5", zeroline=False, automargin=True)
    return figure.update_yaxes(gridcolor="#d5d5d5", zeroline=False, automargin=True)
