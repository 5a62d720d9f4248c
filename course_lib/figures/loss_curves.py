"""Loss curves: the loss over the steps of each training, one line for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile

from course_lib.figures.axis import counted, number, ticks
from course_lib.figures.chart import Axis, Chart, Curve, Label, Panel, Point
from course_lib.figures.palette import Line, lines_of
from course_lib.figures.picture import Picture, Row

LAST = 20  # steps averaged for the loss at the end, as one step alone is too noisy


def loss_curves(
    curves: Mapping[str, Sequence[float]], steps: int | None = None, width: int = 800, title: str | None = None
) -> Picture:
    """Draw losses over the steps of trainings.

    curves: the loss of each step, by the name of the training. One that is not finite ends its line.
    steps: their final number, for a training that is still going on.

    Raises ValueError if there is nothing to draw, or more lines than can be told apart.
    """
    drawn = {name: _finite(curve) for name, curve in curves.items()}
    if not any(drawn.values()):
        raise ValueError('curves has no loss in it; give at least one, for instance {"float32": [2.8, 2.7]}')
    steps = steps or max(map(len, curves.values()))
    losses = [loss for curve in drawn.values() for loss in curve]
    across = Axis("step", 0, max(steps, 1), ticks(steps, 8))
    up = Axis.around("loss", losses, 5)
    looks = lines_of(drawn)
    ends = [len(curve) for curve in drawn.values()]
    lines = [
        _line(name, curve, curves[name], looks[name], beside=ends[:place].count(len(curve)))
        for place, (name, curve) in enumerate(drawn.items())
        if curve
    ]
    panel = Panel(across, up, lines, height=180.0)
    chart = Chart([panel], {"measured"}, title, width, looks, has_crosshair=True)
    return Picture.of(chart, _summary(curves, steps), _rows(curves, steps))


def loss_at_end(losses: Sequence[float]) -> float:
    """The mean loss of the last steps; NaN if one of them is not finite."""
    last = losses[-LAST:]
    return sum(last) / len(last) if all(map(math.isfinite, last)) else math.nan


def _finite(losses: Sequence[float]) -> list[float]:
    """The losses up to the first one that is not finite."""
    return list(takewhile(math.isfinite, losses))


def _summary(curves: Mapping[str, Sequence[float]], steps: int) -> str:
    return f"Loss over {steps} steps: {'; '.join(f'{name} {_in_words(curve)}' for name, curve in curves.items())}."


def _in_words(losses: Sequence[float]) -> str:
    finite = _finite(losses)
    if len(finite) < len(losses):
        return f"is not a number after {counted(len(finite), 'step')}"
    if not finite:
        return "has not begun"
    return f"from {number(finite[0])} to {number(loss_at_end(finite))}"


def _rows(curves: Mapping[str, Sequence[float]], steps: int) -> list[Row]:
    """The losses of all trainings at ten steps, evenly spread."""
    chosen = [round(tenth * (steps - 1) / 10) for tenth in range(11)]
    return [
        {"step": step, **{name: curve[step] if step < len(curve) else "" for name, curve in curves.items()}}
        for step in dict.fromkeys(chosen)
    ]


def _line(name: str, finite: Sequence[float], losses: Sequence[float], look: Line, beside: int) -> Curve:
    """A curve with a symbol at its end, and the reason if it ends early. beside: other curves that end at this step."""
    points = [Point(step, loss) for step, loss in enumerate(finite)]
    reason = Label(f"✗ {name}: not a number", right=10, down=16 * beside - 8)
    words = None if math.isfinite(losses[-1]) else reason
    points[-1] = points[-1]._replace(tip=f"{name} {_in_words(losses)}", words=words)
    return Curve(name, points, look)
