"""The sentences of the lesson on tensor parallelism, with their proofs."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module, style

from course_lib import Timeline, launch
from course_lib.classroom import questions
from course_lib.classroom.runs import after_barrier
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import estimate, search
from lessons.L06_tensor_parallelism.explorer import PACE
from lessons.L06_tensor_parallelism.questions import BATCH, CANDIDATES, LARGE, NODES
from lessons.L06_tensor_parallelism.runs import POSITIONS, run_cut
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "tensor_parallelism"
COLUMNS, ROWS = ("attention.query", "attention.key", "attention.value", "mlp.up"), ("attention.out", "mlp.down")


@lru_cache
def explored(ranks: int, hidden: int) -> Timeline:
    return run_cut("columns, rows", ranks, hidden, pace=PACE).timeline


def directions_of_the_widest(way: str) -> str:
    """The directions in which an all-reduce of four times x travels. In a ring of four a rank sends 3/2 of it."""
    wide = 4 * POSITIONS * 64 * 4 * 3 // 2
    traffic = zip(("forward", "backward"), zip(*run_cut(way, 4).traffic, strict=True), strict=True)
    return " ".join(direction for direction, sent in traffic if wide in sent)


# PyTorch's own, on ranks


def in_pytorch(rank: int) -> dict[str, torch.Tensor]:
    """Cut one block of a model with this rank's seed in PyTorch, and use it; return all parameters."""
    model = TinyGPT(GPTConfig(layers=1), seed=rank)
    cuts = dict.fromkeys(COLUMNS, ColwiseParallel()) | dict.fromkeys(ROWS, RowwiseParallel())
    block = parallelize_module(model.blocks[1], init_device_mesh("cpu", (2,)), cuts)  # type: ignore[arg-type]
    dist.barrier()
    block(torch.ones(2, 8, 64, requires_grad=True)).sum().backward()
    named = model.named_parameters()
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in named}


def what_is_named_is_rank_0_s_and_the_rest_each_rank_s_own() -> bool:
    first, own = (TinyGPT(GPTConfig(layers=1), seed=seed).state_dict() for seed in (0, 1))
    is_cut = tuple(f"blocks.1.{name}." for name in COLUMNS + ROWS)
    held = launch(in_pytorch, 2).results[1]
    return all(torch.equal(held[name], (first if name.startswith(is_cut) else own)[name]) for name in held)


def all_reduces_in_pytorch() -> int:
    spans = after_barrier(launch(in_pytorch, 2).timeline).of(0)
    return sum(span.name == "all_reduce" and span.kind == "transfer" for span in spans)


PROOFS: Proofs = {
    "In *columns, columns* it is on the way back, and *rows, columns* has one in each direction.": lambda: (
        [directions_of_the_widest(way) for way in ("rows, rows", "columns, columns", "rows, columns")]
        == ["forward", "backward", "forward backward"]
    ),
    "The largest. Eight ranks then compute for": lambda: (
        explored(8, 128).idle_fraction() < explored(8, 32).idle_fraction()
    ),
    "Yes, but not by much": lambda: explored(4, 64).makespan / 2 < explored(8, 64).makespan < explored(4, 64).makespan,
    "with a small hidden size there is little to compute for each byte, and more ranks can be slower than fewer": (
        lambda: explored(8, 32).makespan > explored(4, 32).makespan
    ),
    "Query, key and value are cut by columns, into **whole heads**; out by rows.": lambda: lesson(NAME).shows(
        "def shapes(rank):", "attention.query.weight  [64, 64]     [32, 64]", "out.weight    [64, 64]     [64, 32]"
    ),
    "And less is kept: the inputs of the norms are shared now.": lambda: (
        (kept := lesson(NAME).numbers("for is_cut in", "bytes sent")[::2])[0] - kept[1]
        # four norms, 8 x 64 positions x 64 numbers: what was whole is a quarter
        >= 4 * 8 * 64 * 64 * 4 * 3 // 4
    ),
    "So a block has six all-reduces, and not four.": lambda: all_reduces_in_pytorch() == 6,
    "It cuts what you name, and nothing else": what_is_named_is_rank_0_s_and_the_rest_each_rank_s_own,
    "What it cuts is rank 0's. What it leaves whole stays as each rank has made it": (
        what_is_named_is_rank_0_s_and_the_rest_each_rank_s_own
    ),
    "`torch/distributed/tensor/parallel/style.py`, from `ColwiseParallel` on": lambda: (
        ColwiseParallel.__module__ == style.__name__ == "torch.distributed.tensor.parallel.style"
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)


def test_the_figures_of_the_case_are_the_planner_s() -> None:
    answer = questions.load("choose_strategy").form.why
    reached = {name: f"{estimate(LARGE, NODES, plan, BATCH).mfu:.0%}" for name, plan in CANDIDATES.items()}
    best = search(LARGE, NODES, BATCH).best
    for name in list(CANDIDATES)[1:]:
        assert reached[name] in answer
    assert f"{best.mfu:.0%}" in answer and f"with {best.plan.pp} stages and {best.plan.dp} replicas" in " ".join(
        answer.split()
    )
    assert best.plan.tp < 8
    sharded = estimate(LARGE, NODES, CANDIDATES["64 replicas, all states sharded (ZeRO-3)"], BATCH)
    assert sharded.step_time.data > sharded.step_time.total / 4
