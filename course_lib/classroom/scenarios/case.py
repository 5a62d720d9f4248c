"""The questions of a case, which share a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from course_lib.classroom.questions.asking import MakeForm
from course_lib.classroom.questions.question import Question, ask


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
