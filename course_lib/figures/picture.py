"""A picture that is visible wherever a notebook is opened.

A stored notebook is often opened where no script runs and inline SVG is removed (GitHub, a fresh clone that
JupyterLab does not trust yet). Only an image with its data in the page is visible everywhere, so a cell stores
that. An image has no tooltips; empty elements laid over it carry them, and vanish without a trace where styles
are removed.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from course_lib.figures import chart_plotly, chart_svg
from course_lib.figures.axis import number
from course_lib.figures.chart import Chart
from course_lib.figures.lanes import TimelinePanel
from course_lib.figures.svg import ROOMY, Sheet, Tip, clean, scaled
from course_lib.timeline import Timeline

PLOTLY = "application/vnd.plotly.v1+json"
MOST_TIPS = 500

Row = dict[str, object]


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[Row]:
    """The rows of a picture's table, from the names of the columns and their values."""
    return [dict(zip(columns, row, strict=True)) for row in rows]


class Clock(NamedTuple):
    """The time of a picture that moves. seconds: how long.  says: at which share of it what is to be said."""

    seconds: float
    says: Sequence[tuple[float, str]]

    @classmethod
    def of(cls, timeline: Timeline, says: Iterable[tuple[float, str]]) -> Clock:
        """The clock of a timeline. says: by seconds on the timeline."""
        zero, whole = timeline.began, timeline.makespan
        return cls(whole, [((when - zero) / whole, what) for when, what in says])


@dataclass(frozen=True)
class Picture:
    """A drawing, the sentence that sums it up, and the numbers behind it.

    summary: one plain sentence, for readers who cannot see the picture and for those who can.
    rows: the numbers behind the picture, one dictionary of column to value for each row.
    chart: its data, if plotly can draw it, too.
    clock: its time, if it moves.
    lights: names of what can be lit up in it.
    timelines: the drawn ones, with their places.  over: draws it again over another one, thin.
    """

    sheet: Sheet
    summary: str
    rows: Sequence[Row]
    chart: Chart | None = None
    clock: Clock | None = None
    lights: Sequence[str] = ()
    timelines: Sequence[TimelinePanel] = ()
    over: Callable[..., Picture] | None = None

    @classmethod
    def of(cls, chart: Chart, summary: str, rows: Sequence[Row]) -> Picture:
        return cls(chart_svg.draw(chart), summary, rows, chart)

    @property
    def svg(self) -> str:
        """The picture as an SVG document on a white card, ready to be written to a file."""
        return self.sheet.write(self.summary)

    def inline(self, key: str | None = None) -> str:
        """HTML for `widgets.HTML`: the picture in the colors of JupyterLab's theme, with tooltips, and its numbers.

        key: the prefix of its ids, by default a new one each time. If a page had the same ids twice and
            the first were out of sight, the second would lose its patterns (Chromium paints nothing then).
        """
        svg = self.sheet.write(self.summary, themed=True, key=key or f"p{secrets.token_hex(4)}")
        return svg + self._numbers("In words and numbers")

    def _ipython_display_(self) -> None:
        """Show a zoomable chart as two outputs, since JupyterLab shows one kind of each: the figure, and its numbers
        below. Without scripts, the image replaces the figure.
        """
        from IPython.display import display

        if self.chart is None or not self.chart.is_zoomable:
            display(self._repr_mimebundle_(), raw=True)
            return
        figure = {PLOTLY: chart_plotly.stored(self.chart)}
        display({**figure, "text/html": self._image(tips=[]), "text/plain": self.summary}, raw=True)
        display({"text/html": self._numbers(), "text/plain": self.summary}, raw=True)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """The static form of the picture: for a chart, its image."""
        # In one order on all Pythons: from 3.12 on, sum() of floats rounds differently.
        largest = sorted(self.sheet.tips, key=lambda tip: -round(tip.width, 3))[:MOST_TIPS]  # keeps the notebook small
        return {"text/plain": self.summary, "text/html": self._image(largest) + self._numbers()}

    def _image(self, tips: Sequence[Tip]) -> str:
        data = base64.b64encode(self.sheet.write(self.summary, tips=False).encode()).decode()
        places = "".join(_overlay(tip, self.sheet) for tip in tips)
        height = f"{self.sheet.height:g}"  # known before the image is there
        # On paper it may be narrower than on a screen.
        fit = f"width:{scaled(self.sheet.width)};max-width:max(100cqw,560px);height:auto"
        return (
            f'<div style="{ROOMY};--course-high:{height}"><div style="position:relative;display:inline-block">'
            f'<img src="data:image/svg+xml;base64,{data}" alt="{clean(self.summary)}" width="{self.sheet.width}"'
            f' height="{height}"'
            f' style="display:block;{fit};color-scheme:light">'
            f"{places}</div></div>"
        )

    def _numbers(self, heading: str = "") -> str:
        """The summary with the numbers folded under it, or both folded under a heading."""
        sentence = clean(self.summary)
        if not self.rows:
            return f"<p>{sentence}</p>"
        head = "".join(f"<th>{clean(name)}</th>" for name in self.rows[0])
        body = "".join("<tr>" + "".join(map(_cell, row.values())) + "</tr>" for row in self.rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        head, table = (heading, f"<p>{sentence}</p>{table}") if heading else (sentence, table)
        return f"<details style='margin:4px 0'><summary>{head}</summary>{table}</details>"


def _cell(value: object) -> str:
    return f"<td>{number(value) if isinstance(value, float) else clean(str(value))}</td>"


def _overlay(tip: Tip, sheet: Sheet) -> str:
    # In percent, because the image shrinks with the page.
    left, width = 100 * tip.x / sheet.width, 100 * tip.width / sheet.width
    top, height = 100 * tip.y / sheet.height, 100 * tip.height / sheet.height
    return (
        f'<i aria-hidden="true" title="{clean(tip.text)}" style="position:absolute;'
        f'left:{left:.2f}%;top:{top:.2f}%;width:{width:.2f}%;height:{height:.2f}%"></i>'
    )
