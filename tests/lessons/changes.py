"""Tables of solutions that are made from another one by changing a place or two, with `changed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course_lib.classroom.checks.part import changed

Program = Callable[..., Any]


def ways(program: Program, **changes: tuple[str, ...]) -> list[Program]:
    """Other ways to write a program.  changes: pairs of old and new text, by the new name."""
    return [changed(program, name, *places) for name, places in changes.items()]


def told(program: Program, **changes: tuple[str, ...]) -> dict[Program, str]:
    """Wrong ways to write a program, with words of their verdicts.  changes: words, then old and new text, by name."""
    return {changed(program, name, *places): words for name, (words, *places) in changes.items()}
