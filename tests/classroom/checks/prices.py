"""The price of a right solution; all cases but the price_case one are left to tests/lessons/test_bank.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from course_lib.classroom.checks.evidence import Evidence
from course_lib.classroom.checks.exercise import Exercise, _judge, _weigh
from course_lib.classroom.checks.verdict import Verdict


@functools.cache
def verdict_on(exercise: Exercise, program: Callable[..., Any]) -> Verdict:
    """The verdict on a program in the price_case case alone."""
    case = exercise.price_case
    run, right = exercise.run([program], case), exercise.run_right(case)
    found = Evidence(exercise, case, *([programs[0] for programs in one.results] for one in (run, right)))
    assert _judge(found, []) is None
    return _weigh(Verdict(exercise.name, "passed", "", share=1.0), run, right, exercise.memory)


def costs(exercise: Exercise, program: Callable[..., Any]) -> dict[str, tuple[str, str]]:
    """A program's costs and the best ones, by kind."""
    return {cost.what: (cost.yours, cost.best) for cost in verdict_on(exercise, program).costs}


def counted(exercise: Exercise, program: Callable[..., Any]) -> dict[str, tuple[int, int]]:
    """A program's costs as numbers, and the best ones; shares in percent."""

    def number(text: str) -> int:
        return int(text.replace(",", "").rstrip("%"))

    return {what: (number(yours), number(best)) for what, (yours, best) in costs(exercise, program).items()}
