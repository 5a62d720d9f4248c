"""Questions about tensor parallelism."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from course_lib.classroom.questions.asking import choice, each, number, open_case
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Seeded
from course_lib.classroom.questions.units import Quantity
from course_lib.mechanisms import tensor_parallel as tp
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import Cluster, Estimate, ModelSpec, Plan, estimate, search
from course_lib.ranks import launch
from lessons.L06_tensor_parallelism.figure import who_holds_what
from lessons.L06_tensor_parallelism.runs import CUTS, run_cut

# Which cut costs least


def _compare_cuts(way: str, ranks: int) -> Outcome:
    runs = {one: run_cut(one, ranks) for one in map(", ".join, CUTS)}
    run, least = runs[way], min(other.sent for other in runs.values())
    right = run.sent == least
    found = {"ranks": ranks, "run": run, "least": least, "right": right}
    shown = not run.wrong and right == (way == "columns, rows")
    picture = who_holds_what(run, title="Who holds what, and what travels")
    return Outcome(right, found=found, shown=shown, pictures=(picture,))


# How many all-reduces


SLIPS = {"once": 4 / 6, "all": 8 / 6, "half": 1 / 2}
ALL_REDUCES = Quantity("a number of all-reduces", {"all-reduces": 1.0, "all-reduce": 1.0, "": 1.0}, "10 all-reduces")


def _count_all_reduces(layers: int) -> Outcome:
    count = all_reduces(layers, recomputes=True)
    return Outcome(None, found={"layers": layers, "count": count}, measured=count)


def all_reduces(layers: int, recomputes: bool, early_stop: bool = False) -> int:
    """The all-reduces of blocks in a step.  recomputes, early_stop: whether PyTorch's checkpoint runs them again, and
    whether it stops as soon as it has what the backward pass needs.
    """
    run = launch(_train_blocks, 2, (layers, recomputes, early_stop))
    return sum(span.kind == "transfer" and span.name == "all_reduce" for span in run.timeline.of(0))


def _train_blocks(rank: int, layers: int, recomputes: bool, early_stop: bool) -> None:
    blocks = TinyGPT(GPTConfig(layers=layers, hidden=8, heads=2)).blocks[1:-1]
    x = torch.ones(1, 8, 8, requires_grad=True)
    for block in tp.parallelize(blocks).children():
        x = checkpoint(block, x, use_reentrant=False, early_stop=early_stop) if recomputes else block(x)
    x.sum().backward()
    dist.barrier()


# Choosing a parallelism strategy for a large model


LARGE = ModelSpec(layers=80, hidden=8192, heads=64, sequence=2048, vocab=32_000, flash_attention=True)
NODES = Cluster(device="A100-80GB", nodes=8, devices_per_node=8)
BATCH = 512
SHARDED, FIRST_TRY = "64 replicas, all states sharded (ZeRO-3)", "8 tensor ranks, 4 stages, 2 replicas"
CANDIDATES = {
    "64 replicas": Plan(dp=64),
    SHARDED: Plan(dp=64, zero=3),
    "64 tensor ranks": Plan(tp=64),
    "64 stages": Plan(pp=64),
    FIRST_TRY: Plan(dp=2, tp=8, pp=4, zero=1, sequence_parallel=True),
}


def suited(plan: Plan, cluster: Cluster = NODES) -> Estimate:
    """The plan with the micro-batch and recomputation that suit it: the fastest that fits, or else the smallest."""
    most = BATCH // plan.dp
    sizes, ways = [n for n in (1, 2, 4, 8) if n <= most], ("none", "selective", "full")
    plans = [replace(plan, micro_batch=n, recompute=how) for n in sizes for how in ways]
    found = [estimate(LARGE, cluster, one, BATCH) for one in plans]
    return min(found, key=lambda one: (not one.fits, one.step_time.total if one.fits else one.memory.total))


@cache
def tried(nodes: int = NODES.nodes) -> dict[str, Estimate]:
    """The proposals on so many nodes, more of which make more replicas."""
    cluster, more = replace(NODES, nodes=nodes), nodes // NODES.nodes
    return {name: suited(replace(plan, dp=plan.dp * more), cluster) for name, plan in CANDIDATES.items()}


@cache
def _best() -> Estimate:
    return search(LARGE, NODES, BATCH).best


def _strategy() -> Outcome:
    best = _best()
    plan = best.plan
    found = f"{plan.tp} tensor ranks, {plan.pp} stages, {plan.dp} replicas"
    lines = [_in_words(name, one) for name, one in (tried() | {f"the best of all plans, {found}": best}).items()]
    right = tried()["64 replicas"].fit == "does not fit" and best.mfu > 4 * tried()["64 tensor ranks"].mfu
    return Outcome(None, found={"lines": "; ".join(lines)}, shown=right and plan.tp <= NODES.devices_per_node)


def _figures(_: None) -> dict[str, object]:
    one_sample = estimate(LARGE, NODES, CANDIDATES[SHARDED], BATCH)
    return {"tried": [*tried().values(), _best()], "one_sample": one_sample, "many": tried(64)}


def _in_words(name: str, one: Estimate) -> str:
    if not one.fits:
        return f"{name}: {one.fit}, {one.memory.total / 2**30:,.0f} GiB on a device that has 80"
    how = f"micro-batches of {one.plan.micro_batch}, recomputation {one.plan.recompute}"
    return f"{name}: {how}, {one.memory.total / 2**30:.0f} GiB, computes at {one.mfu:.0%} of what the devices can"


QUESTIONS: dict[str, Seeded] = {
    "which_cut": Seeded(4, choice(each(_compare_cuts, map(", ".join, CUTS))), (2, 8), lambda ranks: {"ranks": ranks}),
    "count_all_reduces": Seeded(
        24,
        number(ALL_REDUCES, _count_all_reduces, lambda _: SLIPS, tolerance=0.0),
        (12, 32, 40),
        lambda layers: {"layers": layers},
    ),
    "choose_strategy": Seeded(None, open_case(_strategy), fields=_figures),
}
