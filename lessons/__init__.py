"""The course: a room for each lesson and each scenario, with everything that only it uses.

from lessons import Card
Card("Q4")                  a question of any room, with buttons
L05_pipeline_parallelism/   lesson.py exercise.py    the pages, from which `python3 course.py build` makes notebooks
                            questions.md checks.md   the words of its questions and checks
                            questions.py checks.py   the code that runs them
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
    """Import Card when it is first used: it imports widgets, which not every process shows."""
    if name != "Card":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from course_lib.classroom.widgets.cards import Card

    return Card
