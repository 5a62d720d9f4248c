"""Questions whose answers are run.

    from course_lib import questions
    question = questions.load("Q4")
    question.answer("b")            what comes of it on real ranks, in words and pictures
    questions.load("Q4", seed=7)    the same with other numbers

`course_lib.widgets.cards` shows them with buttons. (Nothing but the standard library is imported before `load`.)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from course_lib.questions.catalog import CATALOG

if TYPE_CHECKING:
    from course_lib.questions.question import Question


def load(name: str, seed: int = 0) -> Question:
    """A question of the course. seed: which numbers; 0 are those of the lesson.

    Raises ValueError for a name that is not in the catalog.
    """
    if name not in CATALOG:
        raise ValueError(f"name={name!r} is not a question; choose one of {', '.join(CATALOG)}")
    return importlib.import_module(CATALOG[name].module).QUESTIONS[name].question(name, seed)
