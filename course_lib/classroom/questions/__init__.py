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

    Raises ValueError for a name that no room asks for.
    """
    asked = {name: page for name, page in pages().items() if page.asks}
    if name not in asked:
        raise ValueError(f"name={name!r} is not a question; choose one of {', '.join(asked)}")
    return importlib.import_module(rooms.module_of(asked[name].file)).QUESTIONS[name].question(name, seed)
