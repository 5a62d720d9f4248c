"""An exercise part that checks: called with a student's function, it gives the verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from course_lib.classroom.checks.examine import examine
from course_lib.classroom.checks.part import Part
from course_lib.classroom.checks.verdict import Verdict


@dataclass(eq=False)
class Exercise(Part):
    """A part that students call with their function; its fields are those of `Part`."""

    def __call__(self, fn: Callable[..., Any], seed: int = 0) -> Verdict:
        """Check a student's function on 2, 3 and 4 ranks. seed: other numbers and sizes."""
        return examine(self, fn, seed)
