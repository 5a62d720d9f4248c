"""The runs behind the open cases show what their model answers say."""

from __future__ import annotations

import functools

import pytest

from course_lib.classroom import questions
from course_lib.classroom.questions.question import Feedback


@functools.cache
def answered(name: str) -> Feedback:
    return questions.load(name).answer("I do not know yet.")


OPEN = (
    *("one_machine", "ideal_speed_up", "evaluate_replicas", "find_the_flaw", "data_distribution", "why_partition"),
    *("pipeline_efficiency", "pipelining_gain", "optimize_stages", "tune_a_pipeline"),
)


@pytest.mark.parametrize("name", OPEN)
def test_a_case_is_run_and_left_to_the_student_to_judge(name: str) -> None:
    feedback = answered(name)
    assert feedback.right is None
    assert feedback.outcome.shown
    assert "A good answer:" in str(feedback)
    assert feedback.outcome.happened


def test_the_flaw_is_seen_in_the_gradients() -> None:
    said = answered("find_the_flaw").outcome.happened
    assert "all gradients are equal to the last bit" in said
    assert "they are different" in said
