"""Horizontal bars, one below the other, each cut into the same parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import shorten

from course_lib.figures.chart import Axis, Bar, Label, Mark, Panel, Rule, Write, interval
from course_lib.figures.frame import MARGIN
from course_lib.figures.palette import LIKELY, Style
from course_lib.figures.svg import text_width

BAR, PITCH = 28.0, 38.0
MANY, CLOSE = 5, 21.0  # more bars than this lie closer together
LIMIT = 22.0  # pixels above the bars for the name of the limit


def bars_panel(
    values: Mapping[str, Mapping[str, float]],
    styles: Mapping[str, Style],
    axis: Axis,
    width: int,
    write: Write,
    unit: float = 1.0,
    limit: tuple[float, str] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> Panel:
    """A panel of horizontal bars. bars: the sizes of each bar's parts, by the bar's name.

    styles: the look of each part, in their order.
    write: writes a size in its bar.  unit: the size of 1 on the axis.
    limit: a size that no bar should pass, and its name.  ranges: the 90% interval of the end of a bar.
    """
    inwards = "end" if limit and axis.share(limit[0] / unit) > 0.5 else None
    marks: list[Mark] = [Rule(limit[0] / unit, Label(limit[1], down=-9, anchor=inwards))] if limit else []
    for row, (name, parts) in enumerate(values.items()):
        marks += stacked(name, parts, styles, write, unit, row + 0.5, BAR / PITCH, is_across=True)
        if ranges and name in ranges:
            low, high = ranges[name]
            tip = f"{name}, {LIKELY}: {write(low)} to {write(high)}"
            below = row + 0.5 + 0.6 * BAR / PITCH  # where it covers no number
            marks.append(interval(tip, (low / unit, below), (high / unit, below)))
    pitch = PITCH if len(values) <= MANY else CLOSE
    letters = min(int(0.4 * width / text_width("x")), max(map(len, values)))
    names = [name if len(name) <= letters else shorten(name, letters, placeholder="…") for name in values]
    rows = Axis("", len(names), 0, [row + 0.5 for row in range(len(names))], lambda y: names[int(y)], has_grid=False)
    head = LIMIT if limit else 0.0
    return Panel(axis, rows, marks, pitch * len(names), MARGIN + text_width("x" * letters) + 8, right=30.0, head=head)


def stacked(
    name: str,
    parts: Mapping[str, float],
    styles: Mapping[str, Style],
    write: Write,
    unit: float,
    at: float,
    thickness: float,
    is_across: bool = False,
) -> Iterator[Bar]:
    """The parts of one bar, each beginning where the last one ends; horizontal ones have numbers in them."""
    end = 0.0
    for part, style in styles.items():
        size, text = parts[part] / unit, write(parts[part])
        tip = f"{name}: {style.label} {text}"
        yield Bar(part, style, at, size, end, tip, thickness, text if is_across else "", is_across)
        end += size
