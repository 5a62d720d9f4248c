"""The questions about tensor parallelism, on real ranks and with the planner."""

from __future__ import annotations

from typing import Any

import pytest

from course_lib.classroom import questions
from course_lib.classroom.questions.outcome import Outcome
from lessons.L06_tensor_parallelism.runs import WAYS, run_cut


def run(name: str, answer: str, seed: int = 0) -> Outcome:
    form: Any = questions.load(name, seed).form
    return form.run(form.read(answer))


@pytest.mark.parametrize(
    ("answer", "right", "why"),
    [
        ("144", True, "six in all"),
        ("96", False, "each way once"),
        ("192", False, "everything twice"),
        ("72", False, "Half"),
    ],
)
def test_all_reduces_are_counted_and_slips_recognized(answer: str, right: bool, why: str) -> None:
    outcome = run("count_all_reduces", answer)
    assert outcome.right == right
    assert "24 blocks on 2 ranks, forward, forward again and backward: 144 all-reduces" in outcome.happened
    assert why in outcome.why


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
