"""The verdict of a check: right or not, why, and at what price."""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from course_lib.classroom import journal
from course_lib.classroom.checks.prose import TEXTS
from course_lib.timeline import Timeline

# Of the bar beside a verdict; the others share one.
COLORS = {"passed": "#2e8b57", "met": "#2e8b57", "unwritten": "#808080"}
NOT_YET = "#d98600"


class Cost(NamedTuple):
    """One line of a price: what is counted, the amount of the student's function, and the lowest known.

    best: that of our solution, or the student's if it is lower.
    """

    what: str
    yours: str
    best: str


@dataclass(frozen=True)
class Idle:
    """The idle time of an emulated training step. best: the lowest share known, 0 to 1.

    beside: timelines to compare it with, by their names.
    """

    timeline: Timeline
    best: float
    beside: dict[str, Timeline] = field(default_factory=dict)

    def __str__(self) -> str:
        best = f"{'in ours' if self.beside else 'the lowest known is'} {self.best:.0%}"
        origin = f"({self.timeline.origin}: real messages, on the clock of other devices and links)."
        return f"Idle {self.timeline.idle_fraction():.0%} of the time; {best} {origin}"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        from course_lib.figures import gantt  # only a notebook needs it, and every rank imports this file

        pairs = [gantt(self.timeline, one, names=("yours", name)) for name, one in self.beside.items()]
        shown = [picture._repr_mimebundle_() for picture in pairs or [gantt(self.timeline)]]
        html = f"<p><b>{escape(str(self))}</b></p>" + "".join(picture["text/html"] for picture in shown)
        return {"text/plain": "\n".join([str(self), *(one["text/plain"] for one in shown)]), "text/html": html}


@dataclass(frozen=True)
class Verdict:
    """The result of a check. Everything in it is the same in every run, the emulated step in `idle` too.

    name: the function that was checked.  outcome: one of the first in texts.md.  message: why, in plain words.
    situation: the case that was tried, for instance "3 ranks, 10 samples".
    idea: the misconception that was recognized, by the name of its function in the bank; "" if none was.
    facts: what the run itself reported, label and text.  costs: the price, of a right function only.
    remarks: more sentences.  idle: an emulated training step with the function in it, if there was one.
    share: the share of cases that were right before the first wrong one, 0 to 1.
    """

    name: str
    outcome: str
    message: str
    situation: str = ""
    idea: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    costs: tuple[Cost, ...] = ()
    remarks: tuple[str, ...] = ()
    idle: Idle | None = None
    share: float = 0.0

    @property
    def passed(self) -> bool:
        return self.outcome in ("passed", "met")

    def points(self, of: int) -> None:
        """Show the verdict of a part that is worth `of` points. Raises NotPassed, in one line, unless it passed."""
        _show(self)
        with contextlib.suppress(OSError):  # progress is not kept if nothing can be written
            journal.record("ran", self.name, 0, self.idea.replace("_", " ") or self.outcome, self.passed)
        if not self.passed:
            raise NotPassed(self, of)

    def __str__(self) -> str:
        parts = [self._headline(), self.message, *(f"{label}: {text}" for label, text in self.facts)]
        parts += ["\n".join(f"{what}: {yours}, lowest known {best}" for what, yours, best in self.costs)]
        return "\n\n".join(part.replace("`", "") for part in [*parts, *self.remarks] if part)

    def _headline(self) -> str:
        tried = f" (Tried: {self.situation}.)" if self.situation else ""
        return TEXTS[self.outcome].format(name=self.name) + tried

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._html()}

    def _html(self) -> str:
        parts = [f"<p><b>{escape(self._headline())}</b></p>", _paragraph(self.message)]
        parts += [f"<p><i>{escape(label)}:</i> <code>{escape(text)}</code></p>" for label, text in self.facts]
        parts += [_table(self.costs)] if self.costs else []
        parts += [_paragraph(remark) for remark in self.remarks]
        bar = COLORS.get(self.outcome, NOT_YET)
        return f'<div style="border-left:4px solid {bar};padding-left:12px;max-width:46em">{"".join(parts)}</div>'


class NotPassed(AssertionError):
    """The student's function has not passed the check yet. The text is the whole verdict."""

    def __init__(self, verdict: Verdict, of: int) -> None:
        super().__init__(str(verdict))
        self.verdict, self.of = verdict, of

    def _render_traceback_(self) -> list[str]:
        """The traceback that a notebook shows below the verdict, without the inside of this library."""
        if "NBGRADER_VALIDATING" in os.environ:  # nbgrader shows errors only, and the first 76 characters of a line
            return [textwrap.fill(line, 70) for line in str(self).splitlines()]
        earned = f"So far it earns {partial_credit(self.verdict.share, self.of):g} of {self.of} points."
        again = f"NotPassed: the reason stands above. Change {self.verdict.name} and run this cell again."
        return [again, earned][: 1 + (self.verdict.share > 0)]


def partial_credit(share: float, of: int) -> float:
    """The points for a share of the cases, rounded down to half points."""
    return int(2 * of * share) / 2


def _show(verdict: Verdict) -> None:
    from IPython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        print(verdict)
    else:
        display(verdict)


def _table(costs: Iterable[Cost]) -> str:
    head = "<tr><th style='text-align:left'>price</th><th>yours</th><th>lowest known</th></tr>"
    row = "<tr><td style='text-align:left'>{}</td><td>{}</td><td>{}</td></tr>".format
    body = "".join(row(*map(escape, cost)) for cost in costs)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _paragraph(text: str) -> str:
    """Text with `code` in it, as HTML."""
    with_code = re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))
    return f"<p>{with_code}</p>".replace("\n", "<br>")
