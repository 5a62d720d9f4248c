"""A Gantt chart of the activities of every rank: one row for each rank, time to the right.

    rank 0  |forward 0|forward 1|\\ wait \\|backward 1|backward 0|
    rank 1  |\\ wait \\|forward 0|forward 1|...
            0              10              20         time (ms)

Transfers that ran in the background lie in a thin lane under their rank's bars.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby

from course_lib.figures.axis import TIMES, doubled, duration, number, percent, unit_of
from course_lib.figures.breakdown import with_final_waits
from course_lib.figures.frame import MARGIN, begin, draw_numbers_beside
from course_lib.figures.lanes import GHOST, PlacedSpan, Scale, TimelinePanel, lanes_of
from course_lib.figures.palette import INK, ORIGINS, STYLES
from course_lib.figures.picture import Picture
from course_lib.figures.svg import Sheet, text_width
from course_lib.figures.words import heading, rank_rows, span_in_words, summary
from course_lib.timeline import COMPUTE_KINDS, Timeline

GUTTER = 78.0
# Pixels. Spans narrower than the first have no outline, which would cover them; spans narrower than the second
# are gathered by pixel column.
NARROW, DUST = 3.0, 0.5


def gantt(
    timeline: Timeline,
    compare: Timeline | None = None,
    width: int = 800,
    title: str | None = None,
    names: Sequence[str] = ("", ""),
    ghost: Timeline | None = None,
    ghost_name: str = "before",
    usual: float = 0.0,
) -> Picture:
    """Draw a timeline.

    compare: a second timeline, drawn below on the same axis; predicted under measured, for instance.
    names: of the two.
    ghost: another timeline, in thin bars under those of the same ranks.
    usual: seconds on the axis of time; a longer run doubles it, and the picture says so.
    """
    if not isinstance(timeline, Timeline):
        raise TypeError(f"gantt draws a timeline, not a {type(timeline).__name__}: gantt(run.timeline)")
    shown = [with_final_waits(one) for one in (timeline, compare) if one is not None]
    drawn = [*shown, ghost] if ghost else shown
    kinds = {span.kind for one in drawn for span in one.spans if span.duration}  # otherwise invisible
    sheet, y = begin(width, title, looks={kind: style for kind, style in STYLES.items() if kind in kinds})
    length, longer = doubled(max(one.makespan for one in drawn), usual)
    scale = Scale(GUTTER, width - MARGIN, length)
    panels = []
    for one, name in zip(shown, names, strict=False):
        panels.append(TimelinePanel(one, scale, lanes_of(one, ghost is not None, bool(usual)), y + 22))
        before = f"{ghost_name} (thin bars): {duration(ghost.makespan)}" if ghost else ""
        _draw_panel(sheet, panels[-1], name, before)
        y = panels[-1].bottom + 6
    if ghost:
        _draw_ghost(sheet, panels[0], ghost)
    if longer:
        sheet.text(scale.right, 22, longer, text_anchor="end", font_size=11, font_weight="bold")
    sheet.height = _draw_axis(sheet, scale, y)
    rows = [row for one in shown for row in rank_rows(one)]
    again = partial(gantt, timeline, compare, width, title, names, usual=usual)
    return Picture(sheet, summary(*shown), rows, timelines=panels, over=again)


def _draw_ghost(sheet: Sheet, panel: TimelinePanel, ghost: Timeline) -> None:
    """Draw another run in thin bars under the same ranks, and where it ends."""
    ranks = min(ghost.world_size, panel.timeline.world_size)
    thin = TimelinePanel(ghost, panel.scale, panel.lanes, panel.top + panel.lanes.bar + panel.lanes.lane + 1)
    bars = [bar._replace(height=GHOST - 1) for bar in thin.bars() if bar.span.rank < ranks and not bar.span.background]
    _draw_together(sheet, bars)
    end = panel.scale.left + panel.scale.pixels(ghost.makespan)
    sheet.line(end, panel.top - 4, end, panel.bottom, stroke="currentColor", stroke_width=1.5, stroke_dasharray="4,3")


def _draw_panel(sheet: Sheet, panel: TimelinePanel, name: str, before: str) -> None:
    """Draw one timeline under its heading. before: words about another one in it."""
    timeline, scale, lanes, top = panel
    text = heading(timeline, name)
    if len({span.stage for span in timeline.spans if span.micro_batch is not None}) > 1:
        text += f", bubble {percent(timeline.idle_fraction())}"
    if text_width(text) + text_width(before, 11) > sheet.width:  # its first word is the same
        text = text.replace(ORIGINS[timeline.origin], timeline.origin)
    sheet.text(MARGIN, top - 10, text, font_weight="bold")
    if before:
        sheet.text(scale.right, top - 10, before, text_anchor="end", font_size=11)
    with sheet.group(stroke="currentColor", stroke_opacity=0.2):
        for tick in scale.ticks():
            x = scale.left + scale.pixels(tick)
            sheet.line(x, top, x, panel.bottom)
    with sheet.group(text_anchor="end", font_size=11):
        for rank in range(timeline.world_size):
            sheet.text(scale.left - 8, panel.row(rank) + lanes.bar / 2 + 4, f"rank {rank}")
    if timeline.spans:
        _draw_spans(sheet, panel)


def _draw_axis(sheet: Sheet, scale: Scale, y: float) -> float:
    size, unit = unit_of(scale.seconds, TIMES)
    numbers = [(scale.left + scale.pixels(tick), number(tick / size)) for tick in scale.ticks()]
    draw_numbers_beside(sheet, f"time ({unit})", numbers, scale.left, y + 8)
    return y + 16


def _draw_spans(sheet: Sheet, panel: TimelinePanel) -> None:
    zero = panel.timeline.began
    bars = list(panel.bars())
    dust = list(_gather([bar for bar in bars if 0 < bar.width < DUST]))
    bars = [bar for bar in bars if bar.width >= DUST]
    # Waits come last, so that nothing hides them.
    for last in (False, True):
        layer = [bar for bar in bars + dust if (bar.span.kind == "wait") is last]
        with sheet.group(stroke="currentColor", stroke_width=0.5):
            for bar in layer:
                if bar.width >= NARROW:
                    fill = sheet.fill(bar.span.kind, STYLES[bar.span.kind])
                    sheet.box(bar.x, bar.y, bar.width, bar.height, tip=span_in_words(bar.span, zero), fill=fill)
        _draw_together(sheet, [bar for bar in layer if bar.width < NARROW])
    with sheet.group(fill=INK, text_anchor="middle", font_size=11):
        for _, of_rank in groupby(bars, key=lambda bar: bar.span.rank):
            _draw_micro_batches(sheet, [bar for bar in of_rank if not bar.span.background])


def _gather(dust: list[PlacedSpan]) -> Iterator[PlacedSpan]:
    """Gather bars that are too narrow to see, by pixel column: each kind with its total width, waits first."""
    columns: dict[tuple[float, int], list[PlacedSpan]] = defaultdict(list)
    for bar in dust:
        columns[bar.y, int(bar.x)].append(bar)
    for column in columns.values():
        widths: dict[str, float] = defaultdict(float)
        for bar in column:
            widths[bar.span.kind] += bar.width
        x = column[0].x
        for kind in sorted(widths, key=lambda kind: kind != "wait"):
            yield column[0]._replace(span=column[0].span._replace(kind=kind), x=x, width=widths[kind])
            x += widths[kind]


def _draw_together(sheet: Sheet, bars: list[PlacedSpan]) -> None:
    """Draw bars as one shape for each kind."""
    for kind, style in STYLES.items():
        own = (bar for bar in bars if bar.span.kind == kind)
        data = "".join(f"M{bar.x:.2f},{bar.y:g}h{bar.width:.2f}v{bar.height:g}h-{bar.width:.2f}z" for bar in own)
        if data:
            sheet.path(data, tip=f"{style.label}, many short pieces", fill=sheet.fill(kind, style))


def _draw_micro_batches(sheet: Sheet, bars: list[PlacedSpan]) -> None:
    """Write the micro-batch on each bar of one rank, where nothing drawn over the bar covers it."""
    for i, bar in enumerate(bars):
        if bar.span.micro_batch is None or bar.span.kind not in COMPUTE_KINDS:
            continue
        left, right = _free(bar, bars[i + 1 :])
        if right - left >= text_width(str(bar.span.micro_batch), 11) + 2:
            sheet.text((left + right) / 2, bar.y + bar.height / 2 + 4, bar.span.micro_batch)


def _free(bar: PlacedSpan, later: Iterable[PlacedSpan]) -> tuple[float, float]:
    """The left and right end of the widest part of a bar that no later bar covers. later: sorted by their left ends."""
    end = bar.x + bar.width
    parts, left = [], bar.x
    for other in later:
        if other.x >= end:
            break
        parts.append((left, other.x))
        left = max(left, other.x + other.width)
    return max([*parts, (left, end)], key=lambda part: part[1] - part[0])
