"""The catalog of questions, in the order of the rooms. (Standard library only; see `progress`.)"""

from __future__ import annotations

import functools

from course_lib.classroom import rooms
from course_lib.classroom.questions.prose import Page, read


@functools.cache
def pages() -> dict[str, Page]:
    """All pages by name. The page of a case is named like its room."""
    return read(*rooms.files("questions.md", "case.md"))


def case_of(question: str) -> Page:
    """The page of the whole case that this question belongs to."""
    return pages()[pages()[question].room]
