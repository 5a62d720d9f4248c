"""How long a step takes with micro-batches of different sizes: a curve with a minimum, and what it is made of.

time |  #                        +  idle: the pipeline fills and drains     grows with the size
     |  #              +         #  overhead of every micro-batch           shrinks with the size
     |  #  #        +  +         =  computing                               always the same
     |  =  =  =  =  =  =
        1  2  4  8  16 32        size of a micro-batch; below it, what has to be held
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from course_lib.figures.axis import duration, number, percent, ticks, time_unit
from course_lib.figures.frame import MARGIN, draw_legend, draw_origins, draw_title, new_sheet, on_card
from course_lib.figures.palette import LINES, STYLES, Line, Style
from course_lib.figures.picture import Picture
from course_lib.figures.plot import SYMBOLS
from course_lib.figures.svg import BACKGROUND, Sheet

if TYPE_CHECKING:
    import plotly.graph_objects as go

LEFT, RIGHT, HEIGHT = 64.0, 16.0, 210.0
PARTS: dict[str, Style] = {
    "computing": STYLES["forward"]._replace(label="computing"),
    "overhead": STYLES["optimizer"]._replace(label="overhead of every micro-batch"),
    "idle": STYLES["wait"]._replace(label="idle: filling and draining"),
}
MEASURED: Line = LINES[1]


@dataclass(frozen=True)
class SizedStep:
    """A step with micro-batches of `size` samples: what it should cost, and what it did.

    computing, overhead, idle: seconds of the fullest rank, as modelled; together they are the step.
    held: samples whose activations are there at once, on the rank that holds most.  fits: whether it has room for them.
    measured: seconds that the step took when it was run; None before it was.  origin: of that run.
    """

    size: int
    computing: float
    overhead: float
    idle: float
    held: int
    fits: bool = True
    measured: float | None = None
    origin: str = "emulated"

    @property
    def modelled(self) -> float:
        return self.computing + self.overhead + self.idle


def best(steps: Sequence[SizedStep]) -> SizedStep | None:
    """The shortest step, as modelled, of those that fit; None if none does."""
    return min((step for step in steps if step.fits), key=lambda step: step.modelled, default=None)


def micro_batch_sizes(
    steps: Sequence[SizedStep], chosen: int | None = None, width: int = 560, title: str | None = None
) -> Picture:
    """Draw the time of a step over the size of its micro-batches.

    chosen: a size to be marked.

    Raises ValueError if there is nothing to draw.
    """
    if not steps:
        raise ValueError("steps is empty; give at least one SizedStep")
    sheet = new_sheet(width)
    y = draw_title(sheet, title)
    y = draw_origins(sheet, {"modelled", *(step.origin for step in steps if step.measured)}, y)
    y = draw_legend(sheet, PARTS, y)
    y = _draw_marker_legend(sheet, steps, y)
    sheet.height = _draw_columns(sheet, steps, chosen, y + 16)
    return Picture(sheet, _summary(steps), [_row(step) for step in steps], lambda: _plotly(steps, title))


def _summary(steps: Sequence[SizedStep]) -> str:
    shortest, fastest = min(steps, key=lambda step: step.modelled), best(steps)
    ends = "; ".join(
        f"with {_samples(step.size)} {percent(step.overhead / step.modelled)} of it is overhead and "
        f"{percent(step.idle / step.modelled)} idle"
        for step in (steps[0], steps[-1])
    )
    sentence = (
        f"The shortest step has micro-batches of {_samples(shortest.size)}, {duration(shortest.modelled)}; {ends}"
    )
    if fastest is None:
        return f"{sentence}. None of them fits into memory."
    if fastest is not shortest:
        return f"{sentence}. The shortest that fits into memory has {_samples(fastest.size)}."
    return f"{sentence}."


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"


def _row(step: SizedStep) -> dict[str, object]:
    return {
        "size (samples)": step.size,
        "computing (ms)": 1e3 * step.computing,
        "overhead (ms)": 1e3 * step.overhead,
        "idle (ms)": 1e3 * step.idle,
        "modelled (ms)": 1e3 * step.modelled,
        "run (ms)": "not yet" if step.measured is None else 1e3 * step.measured,
        "held (samples)": step.held,
        "fits": "yes" if step.fits else "no",
    }


def _draw_marker_legend(sheet: Sheet, steps: Sequence[SizedStep], y: float) -> float:
    origins = sorted({step.origin for step in steps if step.measured})
    if not origins:
        return y
    sheet.path(f"M{MARGIN + 8:.2f},{y + 6:.2f}{SYMBOLS[MEASURED.symbol]}", fill=MEASURED.color)
    sheet.text(MARGIN + 22, y + 10, f"all of it, {' and '.join(origins)}")
    return y + 20


def _draw_columns(sheet: Sheet, steps: Sequence[SizedStep], chosen: int | None, top: float) -> float:
    longest = max(max(step.modelled, step.measured or 0) for step in steps)
    bottom, pitch = top + HEIGHT, (sheet.width - LEFT - RIGHT) / len(steps)
    scale = HEIGHT / longest
    _draw_time_axis(sheet, longest, scale, bottom)
    for index, step in enumerate(steps):
        x = LEFT + index * pitch
        if step.size == chosen:
            sheet.box(x + 2, top - 4, pitch - 4, HEIGHT + 44, fill="currentColor", fill_opacity=0.1, rx=4)
        _draw_column(sheet, step, x + pitch / 6, pitch * 2 / 3, scale, bottom)
        with sheet.group(text_anchor="middle", font_weight="bold" if step.size == chosen else "normal"):
            sheet.text(x + pitch / 2, bottom + 16, step.size)
            sheet.text(x + pitch / 2, bottom + 33, str(step.held) if step.fits else f"{step.held} ✗")
    with sheet.group(text_anchor="end", font_size=11):
        sheet.text(LEFT - 8, bottom + 16, "samples")
        sheet.text(LEFT - 8, bottom + 33, "held")
    notes = ["samples in a micro-batch; held: those whose activations are there at once"]
    notes += [] if all(step.fits for step in steps) else ["✗ there is no room for them"]
    for line, note in enumerate(notes):
        sheet.text(MARGIN, bottom + 52 + 15 * line, note, font_size=10)
    return bottom + 46 + 15 * len(notes)


def _draw_time_axis(sheet: Sheet, longest: float, scale: float, bottom: float) -> None:
    size, unit = time_unit(longest)
    with sheet.group(stroke="currentColor", stroke_opacity=0.2):
        for tick in ticks(longest, 5):
            sheet.line(LEFT, bottom - scale * tick, sheet.width - RIGHT, bottom - scale * tick)
    for tick in ticks(longest, 5):
        sheet.text(LEFT - 8, bottom - scale * tick + 4, number(tick / size), text_anchor="end")
    sheet.text(MARGIN, bottom - HEIGHT - 10, f"time of a step ({unit})", font_size=11)


def _draw_column(sheet: Sheet, step: SizedStep, x: float, width: float, scale: float, bottom: float) -> None:
    y = bottom
    for name, style in PARTS.items():
        seconds = getattr(step, name)
        y -= scale * seconds
        tip = f"{_samples(step.size)}: {style.label} {duration(seconds)}"
        fill = sheet.fill(name, style)
        sheet.box(x, y, width, scale * seconds, tip=tip, fill=fill, stroke="currentColor", stroke_width=0.5)
    if step.measured is not None:
        at = f"M{x + width / 2:.2f},{bottom - scale * step.measured:.2f}{SYMBOLS[MEASURED.symbol]}"
        tip = f"{_samples(step.size)}: {duration(step.measured)}, {step.origin}"
        sheet.path(at, tip=tip, fill=MEASURED.color, stroke=BACKGROUND, stroke_width=1)


def _plotly(steps: Sequence[SizedStep], title: str | None) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    sizes = [str(step.size) for step in steps]
    for name, style in PARTS.items():
        pattern = {"shape": style.shape, "fgcolor": style.shade, "bgcolor": style.fill, "size": 6}
        marker = {"color": style.fill, "pattern": pattern}
        figure.add_bar(x=sizes, y=[getattr(step, name) for step in steps], name=style.label, marker=marker)
    run = [step for step in steps if step.measured is not None]
    square: dict[str, object] = {"symbol": MEASURED.symbol, "size": 10, "color": MEASURED.color}
    if run:
        x, y = [str(step.size) for step in run], [step.measured for step in run]
        figure.add_scatter(x=x, y=y, name=f"all of it, {run[0].origin}", mode="markers", marker=square)
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text="samples of a micro-batch", type="category")
    figure.update_yaxes(title_text="time of a step (s)")
    return on_card(figure, title, {"modelled", *(step.origin for step in run)})
