"""The base of all cases: questions that share a seed, and a debrief that waits for the right answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from course_lib.classroom import questions
from course_lib.classroom.questions.asking import MakeForm
from course_lib.classroom.questions.catalog import pages
from course_lib.classroom.questions.outcome import Feedback, Outcome
from course_lib.classroom.questions.question import Question, is_for_a_room
from course_lib.figures import axis


@dataclass(frozen=True)
class CaseQuestion:
    """One question of a case.

    about: the subject that a seed draws.  make_form: called with the page and the subject.  facts: names that fields of
        its page may use, beside the words of `figures.axis`.
    """

    about: Callable[[int], Any]
    make_form: MakeForm
    facts: Callable[[Any], dict[str, object]] = lambda about: {}

    def question(self, name: str, seed: int = 0) -> Question:
        about = self.about(seed)
        page = pages()[name].fill({}, **{**vars(axis), **self.facts(about)})
        form = self.make_form(page, about)
        return Question(name, seed, page.text, form, varies=False)  # otherwise one card would change without the others


def debrief(question: str, seed: int, until: str, tell: Callable[[], Feedback], anyway: bool = False) -> Feedback:
    """Tell the debrief once the question was answered right, in a room, or `anyway`. until: the step before it."""
    if anyway or is_for_a_room() or questions.load(question, seed).was_right():
        return tell()
    return Feedback("", Outcome(None, f"First {until}."), title="There is no debrief yet.")
