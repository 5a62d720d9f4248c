"""Q4 and Q1, on real ranks: the right answer is accepted, and every wrong one shows what its explanation claims."""

from __future__ import annotations

import pytest

from course_lib.classroom import questions


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize(
    ("answer", "right", "happened"),
    [
        ("a", False, "It cannot be run: workers whose piece is not the whole model"),
        ("b", True, "together they compute every sample once"),
        ("c", False, "together they compute every sample {workers} times"),
        ("d", False, "It cannot be run: workers whose piece is not the whole model"),
    ],
)
def test_q4(seed: int, answer: str, right: bool, happened: str) -> None:
    question = questions.load("Q4", seed)
    workers = question.text.split(" workers")[0].split()[-1]
    outcome = question.form.run(answer)
    assert (outcome.right, outcome.shown) == (right, True)
    assert happened.format(workers=workers) in outcome.happened


@pytest.mark.parametrize("seed", [1, 2])  # two to six workers; the lesson has eight
@pytest.mark.parametrize(
    ("answer", "right", "replicas", "training"),
    [
        ("a", False, "different from each other", "another training"),
        ("b", False, "equal to the last bit", "another training"),
        ("c", True, "equal to the last bit", "the same training, up to rounding"),
        ("d", False, "equal to the last bit", "another training"),
    ],
)
def test_q1(seed: int, answer: str, right: bool, replicas: str, training: str) -> None:
    outcome = questions.load("Q1", seed).form.run(answer)
    assert (outcome.right, outcome.shown) == (right, True)
    assert f"replicas are {replicas}. Compared with one process on all shares: {training}." in outcome.happened
