"""What the lesson on tensor parallelism says is so."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
import torch.distributed as dist

from course_lib import Link, Pace, Timeline, launch, questions
from course_lib.experiments.cuts import run_cut
from course_lib.mechanisms.collectives import ring_all_reduce
from course_lib.planner import estimate, search
from course_lib.questions.tensor import BATCH, CANDIDATES, LARGE, NODES
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "tensor_parallelism"
numbers, shows = lesson(NAME).numbers, lesson(NAME).shows


def sent(way: str) -> float:
    return numbers("for way in WAYS:", f"{way}  ")[0]


def for_the_loss(what: str) -> float:
    return numbers("def evaluate(", what)[0]


@lru_cache
def step(ranks: int, per_node: int) -> Timeline:
    """The run behind the figure on nodes."""
    inside, between = Link(latency=0.0002, bandwidth=4e6), Link(latency=0.0005, bandwidth=4e5)
    pace = Pace({"forward": 4e-6, "backward": 8e-6}, inside, between, per_node)
    return run_cut("columns, rows", ranks, pace=pace).timeline


def speed_up(ranks: int, per_node: int) -> float:
    return step(1, per_node).makespan / step(ranks, per_node).makespan


def _ring(rank: int) -> None:
    """Of sends, a reduce-scatter and then an all-gather: what it sends is really counted."""
    ring_all_reduce(torch.ones(64))


def _all_reduce(rank: int) -> None:
    dist.all_reduce(torch.ones(64))


def waits() -> dict[int, float]:
    """Percent of a step, by the number of tensor ranks."""
    rows = numbers("for tp in (1, 2, 4, 8, 16, 32, 64):")
    return {int(row[0]): row[2] for row in (rows[i : i + 4] for i in range(0, len(rows), 4))}


PROOFS: Proofs = {
    "There are two ways.": lambda: shows("A.chunk(2, dim)", "by columns [[4, 3], [4, 3]]", "by rows [[2, 6], [2, 6]]"),
    "The second one gives you an idea of what will travel: a sum over ranks is an all-reduce.": lambda: shows(
        'compare("rows, added up"',
        "rows, added up               the same",
        "columns, side by side        the same",
    ),
    "the timeline counts what each rank sends if it goes around in a ring": lambda: (
        run_cut("columns, rows", 2, hidden=8).sent == 2 * 32 * 8 * 4
    ),
    "A quarter of both matrices on each rank": lambda: shows("def cut_mlp(", "holds [64, 64] and [64, 64]"),
    "One of the two all-reduces you have seen coming": lambda: shows(
        "travels(run.timeline)", "['all_reduce', 'all_red"
    ),
    "All four cuts are right, but only one is cheap.": lambda: (
        lesson(NAME).shown("for way in WAYS:").count("bytes  right") == 4
        and min(sent(way) for way in ("columns, columns", "rows, rows", "rows, columns")) > 3 * sent("columns, rows")
    ),
    "This layer's own gradients are right, so looking at them proves nothing.": lambda: shows(
        "for way in WAYS:", "wrong: gradient of x\n"
    ),
    "**GELU before the sum** spoils everything": lambda: shows(
        "for way in WAYS:", "wrong: y, gradient of x, gradient of A, gradient of B"
    ),
    "What grows with the square of the hidden size, and what with the hidden size itself?": lambda: (
        run_cut("columns, rows", 2, hidden=16).sent == 2 * run_cut("columns, rows", 2, hidden=8).sent
    ),
    "Query, key and value are cut by columns, into **whole heads**; out by rows.": lambda: shows(
        "def shapes(rank):", "attention.query.weight  [64, 64]     [32, 64]", "out.weight    [64, 64]     [64, 32]"
    ),
    "More than a thousand times less.": lambda: (
        for_the_loss("all logits gathered") > 1000 * for_the_loss("what the loss needs")
    ),
    "What travels are three numbers for each target": lambda: (
        for_the_loss("what the loss needs") == 4 * 8 * 3 * 4 * 2 * 3 / 4
        and len({line.split("loss ")[-1] for line in lesson(NAME).shown("def evaluate(").split("\n") if line}) == 1
    ),
    "four ranks learn to add, each with a quarter of every matrix": lambda: shows(
        "four, _ = launch(train", "the same as one process, up to rounding: True"
    ),
    "Not a byte more: in a ring, an all-reduce *is* a reduce-scatter and an all-gather, one after the other.": lambda: (
        len(set(numbers("for is_cut in", "bytes sent")[1::2])) == 1
        and launch(_ring, 4).timeline.bytes_sent(0) == 64 * 4 * 1.5 == launch(_all_reduce, 4).timeline.bytes_sent(0)
    ),
    "And less is kept: the inputs of the norms are shared now.": lambda: (
        (kept := numbers("for is_cut in", "bytes sent")[::2])[0] - kept[1] > 0
        # four norms, 8 x 64 positions x 64 numbers: what was whole is a quarter
        and kept[0] - kept[1] >= 4 * 8 * 64 * 64 * 4 * 3 // 4
    ),
    "come four times in *every layer*": lambda: shows("for is_cut in", "{'all_reduce': 8}"),  # two layers
    "Up to four ranks both lines are one.": lambda: all(speed_up(n, 8) == speed_up(n, 4) for n in (2, 4)),
    "it is less than three times as fast as one rank, and slower than four ranks were": lambda: (
        speed_up(8, 4) < min(3, speed_up(4, 4)) and shows("def timing(", f"{speed_up(8, 4):.2f} times as fast as 1")
    ),
    "Look at the step from 8 to 16, where the groups leave their nodes.": lambda: (
        waits()[16] - waits()[8] == max(waits()[2 * n] - waits()[n] for n in (1, 2, 4, 8, 16, 32))
        and NODES.devices_per_node == 8
    ),
    "A model of 65 billion parameters on 8 nodes of 8 A100s": lambda: (
        64e9 < LARGE.parameters < 66e9 and NODES.nodes == 8 and NODES.device == "A100-80GB"
    ),
    "Parameters, gradients and optimizer state are divided by the number of ranks": lambda: shows(
        "def shapes(rank):", "mlp.up.weight           [256, 64]    [128, 64]"
    ),
    "What a layer computes grows with the square of the width, what travels only with the width.": lambda: (
        run_cut("columns, rows", 2, hidden=32).sent == 4 * run_cut("columns, rows", 2, hidden=8).sent
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)


def test_the_figures_of_the_case_are_the_planner_s() -> None:
    ((_, answer),) = questions.load("choose_strategy").form.explanations()
    reached = {name: f"{estimate(LARGE, NODES, plan, BATCH).mfu:.0%}" for name, plan in CANDIDATES.items()}
    best = search(LARGE, NODES, BATCH).best
    for name in list(CANDIDATES)[1:]:
        assert reached[name] in answer
    assert f"{best.mfu:.0%}" in answer and (best.plan.tp, best.plan.pp, best.plan.dp) == (2, 4, 8)
    sharded = estimate(LARGE, NODES, CANDIDATES["64 replicas, all states sharded (ZeRO-3)"], BATCH)
    assert sharded.step_time.data > sharded.step_time.total / 4
