"""The base of all cases: questions that share a seed, and a debrief that waits for the right answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from course_lib.classroom import questions
from course_lib.classroom.questions.asking import MakeForm
from course_lib.classroom.questions.outcome import Feedback, Outcome
from course_lib.classroom.questions.question import Question, ask, is_for_a_room


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
        # One card must not change without the others.
        return ask(name, seed, about, self.make_form, self.facts(about), varies=False)


def debrief(question: str, seed: int, until: str, tell: Callable[[], Feedback], anyway: bool = False) -> Feedback:
    """Tell the debrief once the question was answered right, in a room, or `anyway`. until: the step before it."""
    if anyway or is_for_a_room() or questions.load(question, seed).was_right():
        return tell()
    return Feedback("", Outcome(None, f"First {until}."), title="There is no debrief yet.")
