r"""What a pipeline holds: the micro-batches whose activations are on each rank, over time.

    rank 0      _/~~~\_/~\___     up when a forward begins, down when its backward has ended
    at most 3
    rank 1      __/~\_/~\____
    at most 1
                0   time

The axis is that of `gantt` with the same width, so the two can stand below each other.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from course_lib.figures.axis import duration, number, ticks, time_unit
from course_lib.figures.frame import MARGIN, draw_origins, draw_title, new_sheet, on_card
from course_lib.figures.gantt_chart import GUTTER
from course_lib.figures.palette import LINES
from course_lib.figures.picture import Picture
from course_lib.figures.svg import Sheet
from course_lib.figures.words import began
from course_lib.timeline import Span, Timeline

if TYPE_CHECKING:
    import plotly.graph_objects as go

ROW, GAP = 30.0, 8.0


class Held(NamedTuple):
    """What one rank holds. steps: when it changes (seconds), and to how many micro-batches."""

    rank: int
    steps: list[tuple[float, float]]

    @property
    def most(self) -> float:
        return max((count for _, count in self.steps), default=0.0)


def held(timeline: Timeline) -> list[Held]:
    """How many micro-batches' activations each rank holds, and when, as its computations were recorded.

    A micro-batch is held from the start of its forward to the end of its backward, or of its weight gradient where
    the backward was split. On a rank with several stages it counts for each with that stage's share of them.
    """
    return [Held(rank, _steps(timeline.of(rank), began(timeline))) for rank in range(timeline.world_size)]


def _steps(spans: list[Span], zero: float) -> list[tuple[float, float]]:
    lives: dict[tuple[int | None, int | None], list[float]] = defaultdict(list)
    for span in spans:
        if span.micro_batch is not None:
            lives[span.stage, span.micro_batch] += [span.start, span.end]
    weight = 1 / max(1, len({stage for stage, _ in lives}))
    changes = [(min(times), weight) for times in lives.values()] + [(max(times), -weight) for times in lives.values()]
    steps, count = [(0.0, 0.0)], 0.0
    for when, change in sorted(changes):  # of two at once the one that frees comes first
        count += change
        steps.append((when - zero, round(count, 6)))
    return steps


def in_flight(timeline: Timeline, width: int = 800, title: str | None = None) -> Picture:
    """Draw what each rank holds over time.

    Raises ValueError for a width too narrow to read.
    """
    ranks = held(timeline)
    sheet = new_sheet(width)
    y = draw_title(sheet, title)
    y = draw_origins(sheet, [timeline.origin], y)
    sheet.height = _draw(sheet, ranks, timeline.makespan, y)
    return Picture(
        sheet,
        summary=_summary(ranks, timeline.origin),
        rows=[{"rank": one.rank, "held at most (micro-batches)": one.most} for one in ranks],
        figure=lambda: _plotly(ranks, title, timeline.origin),
    )


def _summary(ranks: list[Held], origin: str) -> str:
    most, least = (choose(ranks, key=lambda one: one.most) for choose in (max, min))
    sentence = f"Activations on {len(ranks)} ranks, {origin}: "
    if most.most == least.most:
        return f"{sentence}each holds those of up to {_count(most.most)}."
    sentence += f"rank {most.rank} holds those of up to {_count(most.most)}"
    return f"{sentence}, rank {least.rank} of up to {number(least.most)}."


def _count(micro_batches: float) -> str:
    return "1 micro-batch" if micro_batches == 1 else f"{number(micro_batches)} micro-batches"


def _draw(sheet: Sheet, ranks: list[Held], seconds: float, top: float) -> float:
    right = sheet.width - MARGIN
    scale = (right - GUTTER) / seconds if seconds else 0.0
    most = max([1.0, *(one.most for one in ranks)])
    for one in ranks:
        bottom = top + ROW
        sheet.text(GUTTER - 8, bottom - 16, f"rank {one.rank}", text_anchor="end")
        sheet.text(GUTTER - 8, bottom - 3, f"at most {number(one.most)}", text_anchor="end", font_size=10)
        sheet.path(_outline(one, scale, bottom, ROW / most), fill=LINES[0].color, fill_opacity=0.75)
        sheet.line(GUTTER, bottom, right, bottom, stroke="currentColor", stroke_opacity=0.4)
        tip = f"rank {one.rank}: up to {_count(one.most)} in flight"
        sheet.box(GUTTER, top, right - GUTTER, ROW, tip=tip, fill="none", pointer_events="all")
        top = bottom + GAP
    size, unit = time_unit(seconds)
    with sheet.group(text_anchor="middle", font_size=11):
        for tick in ticks(seconds, round((right - GUTTER) / 60)):
            sheet.text(GUTTER + scale * tick, top + 6, number(tick / size))
    sheet.text(GUTTER - 8, top + 6, f"time ({unit})", text_anchor="end", font_size=11)
    return top + MARGIN


def _outline(one: Held, scale: float, bottom: float, height: float) -> str:
    """A staircase with its ground line."""
    path = f"M{GUTTER:.2f},{bottom:.2f}"
    for when, count in one.steps:
        path += f"H{GUTTER + scale * when:.2f}V{bottom - height * count:.2f}"
    return f"{path}V{bottom:.2f}z"


def _plotly(ranks: list[Held], title: str | None, origin: str) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    for one in ranks:
        when, count = zip(*one.steps, strict=True)
        texts = [duration(seconds) for seconds in when]
        figure.add_scatter(x=when, y=count, name=f"rank {one.rank}", line={"shape": "hv"}, text=texts)
    figure.update_xaxes(title_text="time (s)")
    figure.update_yaxes(title_text="micro-batches held")
    return on_card(figure, title, [origin])
