"""Questions whose answers are run.

    from course_lib.classroom import questions
    question = questions.load("Q4")
    question.answer("b")            the outcome on real ranks, in words and pictures
    questions.load("Q4", seed=7)    the same with other numbers

`classroom.widgets.cards` shows them with buttons. (Nothing but the standard library is imported before `load`.)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from course_lib.classroom import rooms
from course_lib.classroom.questions.catalog import pages

if TYPE_CHECKING:
    from course_lib.classroom.questions.question import Question


def load(name: str, seed: int = 0) -> Question:
    """A question of the course. seed: of its numbers; 0 for those of the lesson.

    Raises ValueError for a name that no room asks for, saying where a case's questions are, and as `checked` does.
    """
    asked = {name: page for name, page in pages().items() if page.asks}
    if own := [one for one, page in asked.items() if page.room == name]:
        raise ValueError(f"{name!r} is the page {name.removeprefix('L')}.ipynb; its questions are {', '.join(own)}")
    if name not in asked:
        raise ValueError(f"name={name!r} is not a question; choose one of {', '.join(asked)}")
    checked(seed)
    return importlib.import_module(rooms.module_of(asked[name].file)).QUESTIONS[name].question(name, seed)


def checked(seed: int) -> int:
    """The seed. Raises ValueError, saying what would work, for what is no whole number from 0 to 9999."""
    if type(seed) is not int or not 0 <= seed <= 9999:
        raise ValueError(f"seed={seed!r} is no whole number from 0 to 9999; write for instance seed=1")
    return seed
