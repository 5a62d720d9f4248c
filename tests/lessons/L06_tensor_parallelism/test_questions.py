"""The questions about tensor parallelism, on real ranks and with the planner."""

from __future__ import annotations

from typing import Any

import pytest

from course_lib.classroom import questions
from course_lib.classroom.questions.outcome import Outcome
from lessons.L06_tensor_parallelism.questions import CANDIDATES, LARGE
from lessons.L06_tensor_parallelism.runs import WAYS, run_cut


def run(name: str, answer: str, seed: int = 0) -> Outcome:
    form: Any = questions.load(name, seed).form
    return form.run(form.read(answer))


@pytest.mark.parametrize(
    ("answer", "right", "sent"),
    [("a", False, "110,592"), ("b", False, "92,160"), ("c", True, "24,576"), ("d", False, "92,160")],
)
def test_the_right_cut_is_the_one_that_sends_least(answer: str, right: bool, sent: str) -> None:
    outcome = run("which_cut", answer)
    assert (outcome.right, outcome.shown) == (right, True)
    assert f"Each of 4 ranks sends {sent} bytes, and the numbers are those of one process." in outcome.happened


def test_other_numbers_of_ranks_have_the_same_best_cut() -> None:
    assert run("which_cut", "c", seed=1).right


@pytest.mark.parametrize(
    ("answer", "right", "why"), [("96", True, "f: four"), ("48", False, "Half"), ("24", False, "One for")]
)
def test_all_reduces_are_counted_and_slips_recognized(answer: str, right: bool, why: str) -> None:
    outcome = run("count_all_reduces", answer)
    assert outcome.right == right
    assert "24 blocks on 2 ranks, forward and backward: 96 all-reduces" in outcome.happened
    assert why in outcome.why


def test_the_proposals_fail_as_the_model_answer_says() -> None:
    outcome = run("choose_strategy", "I do not know yet.")
    assert outcome.right is None
    assert outcome.shown
    assert "64 replicas: does not fit" in outcome.happened
    assert all(name in outcome.happened for name in CANDIDATES)
    assert 64e9 < LARGE.parameters < 66e9


@pytest.mark.parametrize(
    ("way", "wrong"),
    [
        *((way, []) for way in list(WAYS)[:4]),
        ("columns, rows, without f", ["gradient of x"]),
        ("columns, rows, without g", ["y"]),
        ("rows, columns, GELU before the sum", ["y", "gradient of x", "gradient of A", "gradient of B"]),
    ],
)
def test_a_run_is_compared_with_one_process(way: str, wrong: list[str]) -> None:
    assert run_cut(way, 2, hidden=16).wrong == wrong


def test_the_traffic_of_a_run_is_that_of_its_pieces() -> None:
    found = run_cut("columns, rows", 4, hidden=16)
    all_reduced = 32 * 16 * 4 * 3 // 2  # bytes of the hidden states, 3/2 times in a ring of four
    by_name = {operation.name: sent for operation, sent in zip(found.operations, found.traffic, strict=True)}
    assert by_name["f"] == (0, all_reduced)
    assert by_name["g"] == (all_reduced, 0)
    assert found.sent == found.timeline.bytes_sent(0)


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match="way='diagonally' is unknown; choose one of 'columns, rows'"):
        run_cut("diagonally", 2)
