"""What every rank did and when, as a picture: one row for each rank, time to the right.

    rank 0  |forward 0|forward 1|\\ wait \\|backward 1|backward 0|
    rank 1  |\\ wait \\|forward 0|forward 1|...
            0              10              20         time (ms)

Transfers that ran in the background lie in a thin lane under their rank's bars.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, NamedTuple

from course_lib.figures.axis import number, ticks, time_unit
from course_lib.figures.palette import INK, STYLES
from course_lib.figures.picture import Picture
from course_lib.figures.svg import Sheet, text_width
from course_lib.figures.words import heading, rank_rows, span_in_words, summary
from course_lib.timeline import COMPUTE_KINDS, Span, Timeline

if TYPE_CHECKING:
    import plotly.graph_objects as go

GUTTER, MARGIN = 70.0, 16.0
NARROWEST_WIDTH = 320
# Pixels. Narrower spans are not drawn one by one but together, column by column.
DUST = 0.5
# Narrower bars get no outline: it would cover them.
OUTLINED = 3.0


def gantt(
    timeline: Timeline, compare: Timeline | None = None, width: int = 800, title: str | None = None
) -> Picture:
    """Draw a timeline.

    compare: a second timeline, drawn below on the same axis; predicted under measured, for instance.
    width: in pixels. For each span as a row of a table: `pandas.DataFrame(timeline.spans)`.

    Raises ValueError for a width under 320.
    """
    if width < NARROWEST_WIDTH:
        raise ValueError(f"width={width} is too narrow for a timeline; give it at least {NARROWEST_WIDTH} pixels")
    timelines = [timeline] if compare is None else [timeline, compare]
    sheet = Sheet(width)
    scale = _Scale(GUTTER, width - MARGIN, max(t.makespan for t in timelines))
    y = _draw_title(sheet, title)
    y = _draw_legend(sheet, timelines, y)
    for one in timelines:
        y = _draw_panel(sheet, one, scale, y)
    sheet.height = _draw_axis(sheet, scale, y)
    return Picture(
        sheet,
        summary=summary(timeline, compare),
        rows=[row for one in timelines for row in rank_rows(one)],
        figure=lambda: _plotly(timelines, title),
    )


class _Scale(NamedTuple):
    left: float
    right: float
    seconds: float

    def pixels(self, seconds: float) -> float:
        return (self.right - self.left) * seconds / self.seconds if self.seconds else 0.0

    def ticks(self) -> list[float]:
        return ticks(self.seconds, round((self.right - self.left) / 90))


class _Lanes(NamedTuple):
    """Heights in pixels: of a rank's bars, of the lane for the background under them, and of both with the gap."""

    bar: float
    lane: float
    pitch: float


def _lanes(timeline: Timeline) -> _Lanes:
    bar, gap = (26.0, 5.0) if timeline.world_size <= 8 else (18.0, 4.0) if timeline.world_size <= 16 else (12.0, 3.0)
    lane = 6.0 if any(span.background for span in timeline.spans) else 0.0
    return _Lanes(bar, lane, bar + lane + gap)


def _draw_title(sheet: Sheet, title: str | None) -> float:
    if not title:
        return 8.0
    sheet.text(MARGIN, 22.0, title, font_size=14, font_weight="bold")
    return 30.0


def _draw_legend(sheet: Sheet, timelines: list[Timeline], y: float) -> float:
    """The kinds that occur, in lines as wide as the sheet; returns where the next thing goes."""
    present = {span.kind for timeline in timelines for span in timeline.spans}
    x = MARGIN
    for kind in STYLES:
        if kind not in present:
            continue
        style = STYLES[kind]
        needed = 22 + text_width(style.label) + 14
        if x + needed > sheet.width and x > MARGIN:
            x, y = MARGIN, y + 20
        sheet.box(x, y + 2, 16.0, 12.0, fill=sheet.fill(kind, style), stroke="currentColor", stroke_width=0.5)
        sheet.text(x + 22, y + 12, style.label)
        x += needed
    return y + 24 if present else y


def _draw_panel(sheet: Sheet, timeline: Timeline, scale: _Scale, y: float) -> float:
    """One timeline under its heading; returns where the next thing goes."""
    lanes = _lanes(timeline)
    sheet.text(MARGIN, y + 12, heading(timeline), font_weight="bold")
    top = y + 22
    bottom = top + timeline.world_size * lanes.pitch
    with sheet.group(stroke="currentColor", stroke_opacity=0.2):
        for tick in scale.ticks():
            x = scale.left + scale.pixels(tick)
            sheet.line(x, top, x, bottom)
    with sheet.group(text_anchor="end", font_size=min(12.0, lanes.bar - 1)):
        for rank in range(timeline.world_size):
            sheet.text(scale.left - 8, top + rank * lanes.pitch + lanes.bar / 2 + 4, f"rank {rank}")
    if timeline.spans:
        _draw_spans(sheet, timeline, scale, lanes, top)
    return bottom + 6


def _draw_axis(sheet: Sheet, scale: _Scale, y: float) -> float:
    size, unit = time_unit(scale.seconds)
    with sheet.group(text_anchor="middle", font_size=11):
        for tick in scale.ticks():
            sheet.text(scale.left + scale.pixels(tick), y + 8, number(tick / size))
    sheet.text(scale.left - 8, y + 8, f"time ({unit})", text_anchor="end", font_size=11)
    return y + 16


class _Bar(NamedTuple):
    """A span where it is drawn."""

    span: Span
    x: float
    y: float
    width: float
    height: float


def _draw_spans(sheet: Sheet, timeline: Timeline, scale: _Scale, lanes: _Lanes, top: float) -> None:
    bars = list(_bars(timeline, scale, lanes, top))
    wide = [bar for bar in bars if bar.width >= DUST]
    dust = list(_dust([bar for bar in bars if bar.width < DUST]))
    # Waits come last, so that nothing hides them.
    for last in (False, True):
        with sheet.group(stroke="currentColor", stroke_width=0.5):
            for bar in wide:
                if (bar.span.kind == "wait") is last:
                    _draw_bar(sheet, bar)
        _draw_dust(sheet, [bar for bar in dust if (bar.span.kind == "wait") is last])
    with sheet.group(fill=INK, text_anchor="middle", font_size=min(11.0, lanes.bar - 2)):
        for _, of_rank in groupby(wide, key=lambda bar: bar.span.rank):
            _draw_micro_batches(sheet, [bar for bar in of_rank if not bar.span.background])


def _bars(timeline: Timeline, scale: _Scale, lanes: _Lanes, top: float) -> Iterator[_Bar]:
    zero = min(span.start for span in timeline.spans)
    for rank in range(timeline.world_size):
        y = top + rank * lanes.pitch
        for span in timeline.of(rank):
            x, width = scale.left + scale.pixels(span.start - zero), scale.pixels(span.duration)
            if span.background:
                yield _Bar(span, x, y + lanes.bar + 1, width, lanes.lane - 1)
            else:
                yield _Bar(span, x, y, width, lanes.bar)


def _draw_bar(sheet: Sheet, bar: _Bar) -> None:
    outline = {} if bar.width >= OUTLINED else {"stroke": "none"}
    fill = sheet.fill(bar.span.kind, STYLES[bar.span.kind])
    sheet.box(bar.x, bar.y, bar.width, bar.height, tip=span_in_words(bar.span), fill=fill, **outline)


def _dust(bars: list[_Bar]) -> Iterator[_Bar]:
    """Bars too narrow to see, gathered by pixel column: each kind as wide as all it has there, waits first."""
    columns: dict[tuple[float, int], list[_Bar]] = defaultdict(list)
    for bar in bars:
        columns[bar.y, int(bar.x)].append(bar)
    for column in columns.values():
        x = min(bar.x for bar in column)
        for kind in reversed(STYLES):
            width = sum(bar.width for bar in column if bar.span.kind == kind)
            if width > 0:
                # The shortest wait still leaves a hair to see.
                width = max(width, DUST) if kind == "wait" else width
                yield column[0]._replace(span=column[0].span._replace(kind=kind), x=x, width=width)
                x += width


def _draw_dust(sheet: Sheet, bars: list[_Bar]) -> None:
    """One path for each kind: thousands of hairs cost little."""
    for kind, style in STYLES.items():
        hairs = [f"M{bar.x:.2f},{bar.y:g}h{bar.width:.2f}v{bar.height:g}h-{bar.width:.2f}z" for bar in bars
                 if bar.span.kind == kind]
        if hairs:
            sheet.path("".join(hairs), tip=f"{style.label}, in many pieces too short to tell apart",
                       fill=sheet.fill(kind, style))


def _draw_micro_batches(sheet: Sheet, bars: list[_Bar]) -> None:
    """Write its micro-batch on each bar of one rank that has room for it beside what is drawn over it."""
    for i, bar in enumerate(bars):
        if bar.span.micro_batch is None or bar.span.kind not in COMPUTE_KINDS:
            continue
        left, right = _free(bar, takewhile(lambda other, end=bar.x + bar.width: other.x < end, bars[i + 1 :]))
        if right - left >= text_width(str(bar.span.micro_batch), 11) + 2:
            sheet.text((left + right) / 2, bar.y + bar.height / 2 + 4, bar.span.micro_batch)


def _free(bar: _Bar, over: Iterable[_Bar]) -> tuple[float, float]:
    """The widest part of a bar that none of the bars drawn over it covers; those come in the order they begin."""
    best, left = (bar.x, bar.x), bar.x
    for other in over:
        best = max(best, (left, other.x), key=lambda part: part[1] - part[0])
        left = max(left, other.x + other.width)
    return max(best, (left, bar.x + bar.width), key=lambda part: part[1] - part[0])


def _plotly(timelines: list[Timeline], title: str | None) -> go.Figure:
    """The same rows with plotly: one trace for each kind, the background apart."""
    import plotly.graph_objects as go

    size, unit = time_unit(max(t.makespan for t in timelines))
    figure = go.Figure()
    positions, labels, traces = _plotly_rows(timelines)
    for (kind, background), places in traces.items():
        figure.add_trace(_plotly_bars(kind, background, places, size))
    figure.update_yaxes(tickvals=positions, ticktext=labels, autorange="reversed", showgrid=False)
    figure.update_xaxes(title_text=f"time ({unit})")
    on_card(figure, " over ".join(heading(t) for t in timelines) if title is None else title)
    return figure.update_layout(barmode="overlay", height=140 + 30 * len(positions))
