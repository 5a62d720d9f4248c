"""The runs behind the open cases show what their model answers say."""

from __future__ import annotations

import pytest

from course_lib import questions
from course_lib.questions.catalog import CATALOG
from course_lib.questions.open_cases import QUESTIONS


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_case_is_run_and_left_to_the_student_to_judge(name: str) -> None:
    feedback = questions.load(name).answer("I do not know yet.")
    assert feedback.right is None
    assert feedback.outcome.shown
    assert "A good answer:" in str(feedback)
    assert feedback.outcome.happened
    assert CATALOG[name].home == "open_cases"


def test_the_flaw_is_seen_in_the_gradients() -> None:
    said = questions.load("find_the_flaw").form.run("?").happened
    assert "all gradients are equal to the last bit" in said
    assert "they are different" in said


def test_the_numbers_of_model_answers() -> None:
    assert round(3.2 / 0.56, 1) == 5.7
    assert round(3.2 / 8 / 0.56, 2) == 0.71
    assert round(3.2 / 9, 2) == 0.36
    assert round(0.04 / 0.56, 2) == 0.07
    assert 16 * 20 == 320
    assert round(2 / 5, 2) == 0.4
    assert round(8 / 11, 2) == 0.73
