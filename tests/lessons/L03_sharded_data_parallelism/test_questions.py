"""The questions about the stage that is enough and about the traffic of stage 3, on real ranks."""

from __future__ import annotations

import pytest

from course_lib.classroom import questions
from lessons.L03_sharded_data_parallelism.questions import QUESTIONS, MemoryBudget


@pytest.mark.parametrize("seed", [2, 5, 7])  # whose answers are b, a and d
def test_other_numbers_have_one_right_answer_too(seed: int) -> None:
    case = QUESTIONS["enough_stage"].case(seed)
    expected = "abcd"[next(stage for stage in range(4) if case.needed(stage) <= case.gigabytes)]
    form = questions.load("enough_stage", seed).form
    outcomes = {answer: form.run(answer) for answer in "abcd"}
    assert all(outcome.shown for outcome in outcomes.values())
    assert [answer for answer, outcome in outcomes.items() if outcome.right] == [expected]


def test_what_is_needed_is_the_table_of_the_zero_paper() -> None:
    """Section 5 of Rajbhandari et al. 2020, in 32 bits: 4 + 4 + 8 bytes, of which each stage shards one more."""
    n = 64
    needed = [MemoryBudget(1, n, 80).needed(stage) for stage in range(4)]
    assert needed == pytest.approx([16, 8 + 8 / n, 4 + 12 / n, 16 / n])


def test_the_difference_is_what_a_second_gathering_sends() -> None:
    happened = questions.load("stage_3_sends").form.run("a").happened
    assert "1,213,500 bytes in a step with stage 1, and 1,819,848 with stage 3" in happened
    assert "stage 3 sends 1,212,672: the difference is gone." in happened
    assert 1_819_848 - 1_213_500 == 3 * 202_112 + 12  # three quarters of 4 bytes, and a count of samples
