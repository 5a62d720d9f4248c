"""The sentences of the lesson on tensor parallelism, with their proofs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module, style
from torch.utils.checkpoint import checkpoint

from course_lib import Timeline, launch
from course_lib.classroom.runs import after_barrier
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import Estimate, Plan, estimate
from course_lib.planner.spec import layers_of_stages
from lessons.L06_tensor_parallelism.explorer import PACE
from lessons.L06_tensor_parallelism.questions import BATCH, LARGE, NODES, all_reduces
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


def in_pytorch(rank: int, recomputes: bool = False) -> dict[str, torch.Tensor]:
    """Cut one block of a model with this rank's seed in PyTorch, and use it; return all parameters."""
    model = TinyGPT(GPTConfig(layers=1), seed=rank)
    cuts = dict.fromkeys(COLUMNS, ColwiseParallel()) | dict.fromkeys(ROWS, RowwiseParallel())
    block = parallelize_module(model.blocks[1], init_device_mesh("cpu", (2,)), cuts)  # type: ignore[arg-type]
    dist.barrier()
    run = partial(checkpoint, block, use_reentrant=False, early_stop=False) if recomputes else block
    run(torch.ones(2, 8, 64, requires_grad=True)).sum().backward()
    named = model.named_parameters()
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in named}


def what_is_named_is_rank_0_s_and_the_rest_each_rank_s_own() -> bool:
    first, own = (TinyGPT(GPTConfig(layers=1), seed=seed).state_dict() for seed in (0, 1))
    is_cut = tuple(f"blocks.1.{name}." for name in COLUMNS + ROWS)
    held = launch(in_pytorch, 2).results[1]
    return all(torch.equal(held[name], (first if name.startswith(is_cut) else own)[name]) for name in held)


def planned(tp: int, layers: int = LARGE.layers, sequence_parallel: bool = False) -> Estimate:
    plan = Plan(tp=tp, pp=NODES.devices // tp, sequence_parallel=sequence_parallel)
    return estimate(replace(LARGE, layers=layers), NODES, plan, BATCH)


def sent_on(tp: int, sequence_parallel: bool = False) -> float:
    return planned(tp, sequence_parallel=sequence_parallel).flows["tensor"].bytes


def all_reduces_in_pytorch(recomputes: bool) -> int:
    spans = after_barrier(launch(in_pytorch, 2, (recomputes,)).timeline).of(0)
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
    "and more ranks can be slower than fewer": lambda: explored(8, 32).makespan > explored(4, 32).makespan,
    "Query, key and value are cut by columns, into **whole heads**; out by rows.": lambda: lesson(NAME).shows(
        "def shapes(rank):", "attention.query.weight  [64, 64]     [32, 64]", "out.weight    [64, 64]     [64, 32]"
    ),
    "less is kept: the inputs of the norms are shared now.": lambda: (
        (kept := lesson(NAME).numbers("for is_cut in", "bytes sent")[::2])[0] - kept[1]
        # four norms, 8 x 64 positions x 64 numbers: what was whole is a quarter
        >= 4 * 8 * 64 * 64 * 4 * 3 // 4
    ),
    "So a block has six all-reduces, and not four (with full recomputation eight, and not six)": lambda: (
        [all_reduces_in_pytorch(again) for again in (False, True)] == [6, 8]
        and [all_reduces(3, again) for again in (False, True)] == [4 * 3, 6 * 3]
    ),
    "each f makes three messages of half an all-reduce, and each g two": lambda: (
        sent_on(8, sequence_parallel=True) == sent_on(8) * (3 + 2) / 4
    ),
    "**Up to 4** it is the stages that get better. {{large.layers}} layers do not make 64 equal stages, nor 32: some "
    "devices have a layer more than the others, which wait for them. 16 stages have five layers each": lambda: (
        [set(layers_of_stages(LARGE.layers, stages)) for stages in (64, 32, 16)] == [{0, 1, 2}, {1, 2, 3}, {5}]
    ),
    "With 64 layers, which all these numbers divide, 2 tensor ranks are as good as 4": lambda: (
        abs(planned(2, 64).mfu / planned(4, 64).mfu - 1) < 0.01
    ),
    "**At 8** each device takes part in twice as many layers, so it sends more than twice as much": lambda: (
        sent_on(8) > 2 * sent_on(4)
    ),
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
