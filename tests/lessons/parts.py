"""All parts of the exercises of all lessons."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import lessons  # noqa: F401  (it opens its rooms)
from course_lib.classroom import rooms
from course_lib.classroom.checks.exercise import Exercise

BY_LESSON = {
    page.parent.name: [
        one for one in vars(importlib.import_module(rooms.module_of(page))).values() if isinstance(one, Exercise)
    ]
    for page in rooms.files("checks.md")
}
PARTS = tuple(part for parts in BY_LESSON.values() for part in parts)
checks = SimpleNamespace(PARTS=PARTS, **{part.name: part for part in PARTS})
