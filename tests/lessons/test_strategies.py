"""What the same plan gains on other devices, with the planner."""

from __future__ import annotations

from typing import Any

import pytest

from course_lib.classroom import questions
from course_lib.classroom.questions.outcome import Outcome


def run(name: str, answer: str) -> Outcome:
    form: Any = questions.load(name).form
    return form.run(form.read(answer))


@pytest.mark.parametrize(
    ("answer", "right", "why"),
    [("2.4", True, "Less than the peak"), ("3.17 x", False, "ratio of the peaks"), ("1.64", False, "memory alone")],
)
def test_the_same_plan_gains_less_than_the_peak(answer: str, right: bool, why: str) -> None:
    outcome = run("same_plan", answer)
    assert outcome.right == right
    assert why in outcome.why
