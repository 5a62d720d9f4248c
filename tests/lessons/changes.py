"""Tables of solutions that are another one with a place or two written otherwise, as `changed` does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course_lib.classroom.checks.part import changed

Program = Callable[..., Any]


def ways(program: Program, **changes: tuple[str, ...]) -> list[Program]:
    """Other ways to write a program.  changes: what stands there and what is to stand there, by the new name."""
    return [changed(program, name, *places) for name, places in changes.items()]


def told(program: Program, **changes: tuple[str, ...]) -> dict[Program, str]:
    """Wrong ways to write it, and what has to be said.  changes: these words, and then the places, by the new name."""
    return {changed(program, name, *places): words for name, (words, *places) in changes.items()}
