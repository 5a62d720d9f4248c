"""The course: a room for each lesson and each scenario, with everything that it alone has.

from lessons import Card
Card("Q4")                  a question of any room, with buttons
L05_pipeline_parallelism/   lesson.py exercise.py    the pages, which `python3 course.py build` makes notebooks of
                            questions.md checks.md   what its questions ask and what its checks say
                            questions.py checks.py   what runs them
                            explorer.py runs.py figure.py
S02_night_call/             page.py case.md case.py  the same for a case
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.classroom import rooms

if TYPE_CHECKING:
    from course_lib.classroom.widgets.cards import Card

rooms.open_all(__name__, Path(__file__).parent)


def __getattr__(name: str) -> Any:
    """Card, when it is first used: it brings widgets, and not every process shows some."""
    if name != "Card":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from course_lib.classroom.widgets.cards import Card

    return Card
