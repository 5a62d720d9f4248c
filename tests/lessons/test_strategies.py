"""Strategies, on real ranks and with the planner."""

from __future__ import annotations

from typing import Any

import pytest

from course_lib.classroom import questions
from course_lib.classroom.questions.outcome import Outcome
from lessons.L08_combining_mechanisms.questions import ACROSS
from lessons.L08_combining_mechanisms.runs import HybridExperiment


def run(name: str, answer: str) -> Outcome:
    form: Any = questions.load(name).form
    return form.run(form.read(answer))


def test_an_axis_reaches_across_on_real_ranks() -> None:
    outcome = run("which_axis_across", "b")
    assert "Run on 8 ranks" in outcome.happened
    assert len(outcome.pictures) == 2
    assert all(
        len({rank // 4 for rank in HybridExperiment(sizes).group(0, axis)}) == 2 for axis, sizes in ACROSS.items()
    )


@pytest.mark.parametrize(
    ("answer", "right", "why"),
    [("2.4", True, "Less than the peak"), ("3.17 x", False, "ratio of the peaks"), ("1.64", False, "memory alone")],
)
def test_the_same_plan_gains_less_than_the_peak(answer: str, right: bool, why: str) -> None:
    outcome = run("same_plan", answer)
    assert outcome.right == right
    assert why in outcome.why
