"""How the loss of a training falls, beside that of others: one line for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from course_lib.figures.axis import number, ticks
from course_lib.figures.frame import draw_origins, draw_title, new_sheet, on_card
from course_lib.figures.palette import LINES, Line
from course_lib.figures.picture import Picture, Row
from course_lib.figures.plot import Axis, Plot, Scale, draw_axes, draw_line, draw_lines_legend, draw_symbol
from course_lib.figures.svg import HALO, Sheet

if TYPE_CHECKING:
    import plotly.graph_objects as go

LEFT, RIGHT, HEIGHT = 56.0, 24.0, 240.0
LAST = 20  # steps whose mean is the loss at the end: one step alone is too noisy


def loss_curves(
    curves: Mapping[str, Sequence[float]], steps: int | None = None, width: int = 800, title: str | None = None
) -> Picture:
    """Draw losses over the steps of trainings.

    curves: the loss of each step, by the name of the training. One that is not finite ends its line.
    steps: how many there will be, for a training that is still going on.

    Raises ValueError if there is nothing to draw, or more lines than can be told apart.
    """
    drawn = {name: _finite(curve) for name, curve in curves.items()}
    if not any(drawn.values()):
        raise ValueError('curves has no loss in it; give at least one, for instance {"float32": [2.8, 2.7]}')
    if len(drawn) > len(LINES):
        raise ValueError(f"curves has {len(drawn)} trainings; draw at most {len(LINES)} lines in one chart")
    steps = steps or max(map(len, curves.values()))
    sheet = new_sheet(width)
    y = draw_title(sheet, title)
    y = draw_origins(sheet, {"measured"}, y)
    y = draw_lines_legend(sheet, dict(zip(drawn, LINES, strict=False)), y)
    sheet.height = _draw(sheet, curves, drawn, steps, y)
    return Picture(sheet, _summary(curves, steps), _rows(curves, steps), lambda: _plotly(drawn, title))


def loss_at_end(losses: Sequence[float]) -> float:
    """The mean loss of the last steps; not a number where one of these is not finite."""
    last = losses[-LAST:]
    return sum(last) / len(last) if all(map(math.isfinite, last)) else math.nan


def _finite(losses: Sequence[float]) -> list[float]:
    """The losses up to the first one that is not finite."""
    broken = (step for step, loss in enumerate(losses) if not math.isfinite(loss))
    return list(losses[: next(broken, len(losses))])


def _summary(curves: Mapping[str, Sequence[float]], steps: int) -> str:
    return f"Loss over {steps} steps: {'; '.join(f'{name} {_in_words(curve)}' for name, curve in curves.items())}."


def _in_words(losses: Sequence[float]) -> str:
    finite = _finite(losses)
    if len(finite) < len(losses):
        return f"is not a number after {len(finite)} step{'' if len(finite) == 1 else 's'}"
    if not finite:
        return "has not begun"
    return f"from {number(finite[0])} to {number(loss_at_end(finite))}"


def _rows(curves: Mapping[str, Sequence[float]], steps: int) -> list[Row]:
    """Ten steps of all trainings, evenly spread."""
    chosen = [round(tenth * (steps - 1) / 10) for tenth in range(11)]
    return [
        {"step": step, **{name: curve[step] if step < len(curve) else "" for name, curve in curves.items()}}
        for step in dict.fromkeys(chosen)
    ]


def _draw(
    sheet: Sheet,
    curves: Mapping[str, Sequence[float]],
    drawn: Mapping[str, Sequence[float]],
    steps: int,
    top: float,
) -> float:
    losses = [loss for curve in drawn.values() for loss in curve]
    marks = _marks(min(losses), max(losses))
    plot = Plot(LEFT, sheet.width - RIGHT, top, top + HEIGHT, Scale(0, max(steps, 1)), Scale(marks[0], marks[-1]))
    end = draw_axes(sheet, plot, Axis("step", ticks(steps, 8), number), Axis("loss", marks, number))
    for (name, curve), line in zip(drawn.items(), LINES, strict=False):
        points = [plot.at(step, loss) for step, loss in enumerate(curve)]
        if points:
            draw_line(sheet, line, points)
            _draw_end(sheet, line, points[-1], name, curves[name])
    return end


def _draw_end(sheet: Sheet, line: Line, at: tuple[float, float], name: str, losses: Sequence[float]) -> None:
    """The mark of a line where it ends, and why it does if it does so early."""
    draw_symbol(sheet, line, *at, tip=f"{name} {_in_words(losses)}")
    if not math.isfinite(losses[-1]):
        sheet.text(at[0] + 10, at[1] - 8, f"✗ {name}: not a number", font_weight="bold", **HALO)


def _marks(low: float, high: float) -> list[float]:
    """Round numbers from just below the lowest loss to just above the highest."""
    step = ticks(max(high - low, 0.1), 5)[1]
    return [step * count for count in range(math.floor(low / step), math.ceil(high / step + 1e-9) + 1)]


def _plotly(drawn: Mapping[str, Sequence[float]], title: str | None) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    for (name, curve), line in zip(drawn.items(), LINES, strict=False):
        dash = line.dash.replace(",", "px,") + "px" if line.dash else "solid"
        figure.add_scatter(y=list(curve), name=name, mode="lines", line={"color": line.color, "dash": dash})
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="loss")
    return on_card(figure, title, {"measured"})
