"""The explorer of tensor parallelism, moved without a browser. Its runs are real."""

from __future__ import annotations

from typing import Any

import pytest

from lessons.L06_tensor_parallelism.explorer import BANDWIDTH, FORWARD, LATENCY, PACE, TensorParallelExplorer, predict
from lessons.L06_tensor_parallelism.runs import WAYS, run_cut
from tests.classroom.widgets.hands import move


def said(explorer: TensorParallelExplorer) -> str:
    return explorer.sentences.value


def test_a_move_runs_real_ranks_and_draws_what_they_did() -> None:
    explorer = TensorParallelExplorer(ranks=1, hidden=32)
    assert "1 rank, columns, rows, hidden size 32, emulated: " in said(explorer)
    move(explorer, "ranks", 2)
    assert "2 ranks, columns, rows, hidden size 32, emulated: " in said(explorer)
    assert "8.19 kB in 2 all-reduces: no cut needs less" in said(explorer)
    assert "exactly as predicted" in said(explorer)
    assert "modelled" not in explorer.beside.value
    for place in (explorer.beside, explorer.below):
        assert "emulated" in place.value


def test_mistakes_are_seen_in_the_sentences(called: list[Any]) -> None:
    explorer = TensorParallelExplorer(hidden=32)
    expected = {
        "rows, columns": "4.5 times what columns, rows needs",
        "columns, rows, without f": "Wrong: gradient of x is off by",
        "columns, rows, without g": "Wrong: y is off by",
        "rows, columns, GELU before the sum": "Wrong: y is off by",
    }
    for way in WAYS:
        move(explorer, "cut of A, B", way)
        assert expected.get(way, "All numbers are those of one process.") in said(explorer)


def test_sequence_parallelism_sends_the_same_bytes_in_other_collectives(called: list[Any]) -> None:
    explorer = TensorParallelExplorer(sequence_parallel=True)
    assert "24.6 kB in 2 all-gathers and 2 reduce-scatters: no cut needs less" in said(explorer)


def test_what_is_predicted_is_the_formula() -> None:
    run, hidden, ranks = run_cut("columns, rows", 4), 64, 4
    products = 3 * 2 * 4 * hidden**2 * FORWARD / ranks
    x_bytes = 32 * hidden * 4
    rings = 2 * (2 * (ranks - 1) * LATENCY + 2 * (ranks - 1) / ranks * x_bytes / BANDWIDTH)
    assert predict(run) == pytest.approx(products + rings, rel=1e-9)
    assert run.timeline.bytes_sent(3) == 2 * 2 * (ranks - 1) / ranks * x_bytes


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_real_ranks_take_as_long_as_the_formula_says(way: str, sequence_parallel: bool) -> None:
    run = run_cut(way, 4, 32, sequence_parallel, PACE)
    assert run.timeline.makespan == pytest.approx(predict(run), rel=1e-9)
