"""A question: the text, the form of its answer, and the run of an answer.

An answer goes two steps. First the student commits to it, and it is kept; then it is run, and the run says whether it
is right. `answer` does both, `commit` and `run` are the steps of a card.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from course_lib.classroom import journal, rooms
from course_lib.classroom.questions.asking import MakeForm
from course_lib.classroom.questions.catalog import pages
from course_lib.classroom.questions.forms import Form
from course_lib.classroom.questions.outcome import Feedback
from course_lib.classroom.questions.prose import Page
from course_lib.figures import axis

POLL = "COURSE_POLL"  # the environment variable that makes all questions polls


def is_for_a_room() -> bool:
    """Whether questions are polls for a room, where no answer is kept."""
    return bool(os.environ.get(POLL))


@dataclass(frozen=True)
class Question:
    """One question with its numbers.

    seed: of the numbers; 0 for those of the lesson.  text: the situation and the question.
    varies: whether there are other numbers.
    """

    name: str
    seed: int
    text: str
    form: Form
    varies: bool = True

    @property
    def entry(self) -> Page:
        return pages()[self.name]

    def answer(self, given: Any) -> Feedback:
        """Keep the answer, run it, and say what happened.

        given: a letter, "12 MB", a list of events or a text, as the form asks.

        Raises ValueError, saying what would work, for something that is no answer to this question.
        """
        return self.run(self.commit(given))

    def commit(self, given: Any) -> Any:
        """Keep the answer; returns it in its one written form. Raises ValueError as `answer` does."""
        answer = self.form.read(given)
        self.keep("committed", answer)
        return answer

    def run(self, answer: Any) -> Feedback:
        """Run an answer that `commit` returned. Raises RunError if it was stopped."""
        outcome = self.form.run(answer)
        self.keep("ran", answer, outcome.right)
        return Feedback(self.form.words(answer), outcome)

    def reveal(self) -> list[Feedback]:
        """Run everything that needs no answer, for a room that has discussed the question; keep nothing."""
        form: Any = self.form
        return [Feedback(words, outcome) for words, outcome in form.reveal()]

    def latest(self) -> journal.Note | None:
        """The latest note about this question with these numbers."""
        with contextlib.suppress(OSError):
            return journal.latest(self.name, self.seed)
        return None

    def was_right(self) -> bool:
        """Whether it was ever answered rightly with these numbers."""
        with contextlib.suppress(OSError):
            return any(note.right for note in journal.notes() if (note.question, note.seed) == (self.name, self.seed))
        return False

    def keep(self, what: str, answer: Any, right: bool | None = None) -> None:
        """Keep a note, where one can be written."""
        with contextlib.suppress(OSError):
            journal.record(what, self.name, self.seed, answer, right)


@dataclass(frozen=True)
class Seeded:
    """A question for any numbers.

    first: the numbers of the lesson; None if there are none.  make_form: makes its form.  others: a seed draws from
        these.  fields: the values of fields of its page.
    """

    first: Any
    make_form: MakeForm
    others: Sequence[Any] = ()
    fields: Callable[[Any], dict[str, object]] = lambda case: {}

    def case(self, seed: int) -> Any:
        return Random(seed).choice(self.others) if seed else self.first

    def question(self, name: str, seed: int = 0) -> Question:
        if seed and not self.others:
            raise ValueError(f"seed={seed}: {name} has no other numbers; leave the seed out")
        case = self.case(seed)
        return ask(name, seed, case, self.make_form, self.fields(case), bool(self.others))


@dataclass(frozen=True)
class CaseQuestion:
    """One question of a case.

    about: the subject that a seed draws.  make_form: called with the page and the subject.  facts: names that fields of
        its page may use, beside the words of `figures.axis`.
    """

    about: Callable[[int], Any]
    make_form: MakeForm
    facts: Callable[[Any], dict[str, object]]

    def question(self, name: str, seed: int = 0) -> Question:
        about = self.about(seed)
        # One card must not change without the others.
        return ask(name, seed, about, self.make_form, self.facts(about), varies=False)


def ask(name: str, seed: int, case: Any, make_form: MakeForm, fields: Mapping[str, object], varies: bool) -> Question:
    """The question of a page, whose fields may use these, the names of its module and the words of `figures.axis`."""
    page = pages()[name]
    own = importlib.import_module(rooms.module_of(page.file))
    page = page.fill(fields, **{**vars(axis), **vars(own)})
    return Question(name, seed, page.text, make_form(page, case), varies)
