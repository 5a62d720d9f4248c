"""The picture of a timeline as a plotly figure, to zoom into."""

from __future__ import annotations

from collections import defaultdict
from html import escape
from typing import TYPE_CHECKING

from course_lib.figures.axis import time_unit
from course_lib.figures.frame import on_card
from course_lib.figures.palette import INK, STYLES
from course_lib.figures.words import began, span_in_words
from course_lib.timeline import COMPUTE_KINDS, Span, Timeline

if TYPE_CHECKING:
    import plotly.graph_objects as go

# The row of a span, when its timeline began, and the span.
Place = tuple[int, float, Span]


def to_plotly(timelines: list[Timeline], title: str | None) -> go.Figure:
    """A row for each rank and a trace for each kind, with the background apart; waits on top."""
    import plotly.graph_objects as go

    longest = max(t.makespan for t in timelines)
    size, unit = time_unit(longest)
    names = _row_names(timelines)
    places = _places(timelines)
    order = list(STYLES)
    ordered = sorted(places, key=lambda key: (order.index(key[0]), key[1]))
    figure = go.Figure([_bars(*key, places[key], size) for key in ordered])
    figure.update_layout(barmode="overlay", height=max(300, 160 + 26 * len(names)))
    figure.update_yaxes(tickvals=list(range(len(names))), ticktext=names, range=[len(names) - 0.4, -0.5])
    figure.update_xaxes(title_text=f"time ({unit})", range=[0, longest / size or 1])
    return on_card(figure, title, (t.origin for t in timelines))


def _places(timelines: list[Timeline]) -> dict[tuple[str, bool], list[Place]]:
    """What to draw, by kind and whether it ran in the background."""
    places: dict[tuple[str, bool], list[Place]] = defaultdict(list)
    row = 0
    for timeline in timelines:
        zero = began(timeline)
        for rank in range(timeline.world_size):
            for span in timeline.of(rank):
                places[span.kind, span.background].append((row, zero, span))
            row += 1
    return places


def _bars(kind: str, background: bool, places: list[Place], size: float) -> go.Bar:
    import plotly.graph_objects as go

    style = STYLES[kind]
    return go.Bar(
        name=style.label + (" in the background" if background else ""),
        orientation="h",
        y=[row + (0.45 if background else 0.0) for row, _, _ in places],
        base=[(span.start - zero) / size for _, zero, span in places],
        x=[span.duration / size for _, _, span in places],
        width=0.12 if background else 0.75,
        text=["" if span.micro_batch is None else str(span.micro_batch) for _, _, span in places],
        textposition="inside" if kind in COMPUTE_KINDS else "none",
        insidetextanchor="middle",
        insidetextfont={"color": style.text},
        hovertext=[escape(span_in_words(span, zero)) for _, zero, span in places],
        hoverinfo="text",
        marker={
            "color": style.fill,
            "line": {"color": INK, "width": 0.5},
            "pattern": {"shape": style.shape, "fgcolor": style.shade, "bgcolor": style.fill, "size": 6},
        },
    )


def _row_names(timelines: list[Timeline]) -> list[str]:
    """Each rank, with the origin of its timeline where there are two."""
    several = len(timelines) > 1
    return [f"rank {r}, {t.origin}" if several else f"rank {r}" for t in timelines for r in range(t.world_size)]
