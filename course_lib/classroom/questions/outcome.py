"""The outcome of an answer that was run, and its display."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan

from course_lib.classroom.questions.markup import inline, to_html, to_text
from course_lib.figures import Picture

RIGHT, WRONG, NEITHER = "#2e8b57", "#d98600", "#808080"  # of the bar beside a feedback, whose words say the same
VERDICTS = {True: "Right.", False: "Not this one.", None: "Compare."}
UNSHOWN = "(This run did not show it.)"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one answer that was run.

    right: as judged by the run; None if only the student can judge.
    happened: the result of the run in words; if it is empty, the question's page says it.
    why: its meaning.
    shown: whether the run showed what `why` claims.
    found: the values of fields of the page.
    measured: the true number, in the first unit of the question's quantity.
    """

    right: bool | None
    happened: str = ""
    why: str = ""
    shown: bool = True
    pictures: tuple[Picture, ...] = ()
    found: Mapping[str, object] = field(default_factory=dict)
    measured: float = nan


@dataclass(frozen=True)
class Feedback:
    """The outcome of an answer, in words and pictures. Shows itself in a notebook.

    answer: in words.  title: the heading if nothing was answered.
    """

    answer: str
    outcome: Outcome
    title: str = "This is what the run says."

    @property
    def right(self) -> bool | None:
        return self.outcome.right

    @property
    def headline(self) -> str:
        return f"{VERDICTS[self.right]} You answered: {self.answer}" if self.answer else self.title

    def __str__(self) -> str:
        return "\n\n".join(filter(None, map(to_text, [self.headline, *self._words()])))

    def inline(self, key: str) -> str:
        """HTML for `widgets.HTML`, the pictures in the colors of JupyterLab's theme. key: what their ids begin with."""
        pictures = self.outcome.pictures
        return self._html([picture.inline(f"{key}-{number}") for number, picture in enumerate(pictures)])

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        pictures = [picture._repr_mimebundle_() for picture in self.outcome.pictures]
        text = [str(self), *(picture["text/plain"] for picture in pictures)]
        return {"text/plain": "\n\n".join(text), "text/html": self._html([p["text/html"] for p in pictures])}

    def _words(self) -> list[str]:
        outcome = self.outcome
        return [outcome.happened, outcome.why, "" if outcome.shown else UNSHOWN]

    def _html(self, pictures: list[str]) -> str:
        bar = {True: RIGHT, False: WRONG, None: NEITHER}[self.right]
        headline = inline(self.headline).replace("\n", "<br>")
        words = "".join(to_html(text) for text in self._words() if text)
        style = f"border-left:4px solid {bar};padding-left:12px;line-height:1.4"
        said = f"<div style='max-width:46em'>{words}</div>"
        # On a narrow page, pictures scroll and words wrap.
        shown = f"<div style='contain:inline-size;overflow-x:auto'>{''.join(pictures)}</div>" if pictures else ""
        rest = f"{said}{shown}" if self.answer else f"{shown}{said}"  # evidence is seen, and then read
        return f"<div style='{style}'><p style='max-width:46em'><b>{headline}</b></p>{rest}</div>"
