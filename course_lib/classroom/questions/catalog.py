"""Which questions there are, in the order of the rooms. (Standard library only; see `progress`.)"""

from __future__ import annotations

import functools

from course_lib.classroom import rooms
from course_lib.classroom.questions.prose import Page, read


@functools.cache
def pages() -> dict[str, Page]:
    """By name; with those of cases, which are named like their rooms."""
    return read(*rooms.files("questions.md", "case.md"))


def case_of(question: str) -> Page:
    """What the page of its room says of the whole case."""
    return pages()[pages()[question].room]
