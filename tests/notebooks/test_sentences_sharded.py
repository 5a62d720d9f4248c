"""What the lesson on sharded data parallelism says is so."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import log2
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import _fully_shard, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard

from course_lib import Link, Pace, launch
from course_lib.planner.memory import RECIPES
from course_lib.timeline import Span, Timeline
from lessons.L03_sharded_data_parallelism.explorer import DEVICES, SAMPLES, planned
from lessons.L03_sharded_data_parallelism.runs import ShardedStep, sharded_step
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "sharded_data_parallelism"
numbers = lesson(NAME).numbers
PACE = Pace({"forward": 0.08, "backward": 0.16, "optimizer": 0.0}, Link(0.0002, 80e6))  # of section 5

COUNTS = 1e-3  # next to the numbers in a gradient: for each parameter, how many ranks had one


@lru_cache
def step(stage: int, recompute: bool = False) -> ShardedStep:
    """On four ranks with the devices and links of section 5."""
    return sharded_step(stage, 4, PACE, recompute=recompute)


def sent(stage: int) -> int:
    return step(stage).timeline.bytes_sent(0)


def called(stage: int, name: str) -> int:
    """How often rank 0 calls this in a step."""
    return sum(span.name == name for span in step(stage).timeline.of(0) if span.kind == "transfer")


def times(timeline: Timeline, background: bool = False) -> list[Span]:
    """What rank 0 sends in the background, or what it waits for."""
    found = [span for span in timeline.of(0) if span.kind == "transfer" and span.background == background]
    return sorted((span for span in found if span.duration), key=lambda span: span.start)


def places(spans: list[Span]) -> int:
    """How many stretches of time they make, with less than a millisecond between two that belong together."""
    return 1 + sum(later.start - earlier.end > 1e-3 for earlier, later in pairwise(spans))


def gathers_at_the_end(stage: int) -> float:
    """The share of the held-up time that comes after the update."""
    timeline = step(stage).timeline
    updated = next(span.end for span in timeline.of(0) if span.kind == "optimizer")
    gathers = [span for span in times(timeline) if span.end > updated]
    assert {span.name for span in gathers} == {"all_gather"}
    return sum(span.duration for span in gathers)


# By the formulas of section 2, written once more: seconds on links of 1 ms and 2.5 MB/s, in nodes of eight.
RANKS = [8 * 2**k for k in range(8)]


def ring(n: int, size: float) -> float:
    return 2 * (n - 1) * (1e-3 + size / n / 2.5e6)


def tree(n: int, size: float) -> float:
    return 2 * log2(n) * (1e-3 + size / 2.5e6)


def hierarchy(n: int, size: float) -> float:
    return 2 * 7 * (1e-3 + size / 8 / 2.5e6) + 2 * (n // 8 - 1) * (1e-3 + size / n / 2.5e6)


def small_and_large() -> bool:
    small = {way: [way(n, 1e4) for n in RANKS] for way in (ring, tree, hierarchy)}
    climbs = all(small[ring][-1] / small[ring][0] > small[way][-1] / small[way][0] for way in (tree, hierarchy))
    wins = small[tree][-1] == min(line[-1] for line in small.values())
    return climbs and wins and all(tree(n, 1e7) > max(ring(n, 1e7), hierarchy(n, 1e7)) for n in RANKS)


def a_hierarchy_takes_fewer_steps() -> bool:
    pieces = [(7 / 8 + (n // 8 - 1) / n, (n - 1) / n) for n in RANKS]
    steps = [(7 + n // 8 - 1, n - 1) for n in RANKS[1:]]
    return all(abs(one - other) < 1e-12 for one, other in pieces) and all(one <= 0.6 * other for one, other in steps)


# PyTorch's own, on ranks


def of_pytorch(rank: int) -> tuple[Any, float, float]:
    """How a weight is cut; one that began differently on each rank; the mean gradient of unequal shares."""
    layer = torch.nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.fill_(float(rank))
    fully_shard(layer)
    whole: Any = layer.weight
    begun = whole.full_tensor()[1, 0].item()
    layer(torch.ones(1 + 2 * rank, 2) * (1 + rank)).mean().backward()
    return whole.placements, begun, whole.grad.full_tensor()[0, 0].item()


@lru_cache
def pytorch() -> list[tuple[Any, float, float]]:
    return launch(of_pytorch, 2).results


# Explorer


def fits(model: str, devices: int, stage: int, recompute: str = "none") -> bool:
    return planned(model, devices, stage, recompute).fits


def seconds(model: str, devices: int, stage: int, recompute: str = "none") -> float:
    return planned(model, devices, stage, recompute).step_time.total


def lost(devices: int) -> float:
    one = planned("175B", devices, 3, "full").step_time
    return one.data / one.total


def what_zero_1_leaves_is_too_much() -> bool:
    memory = planned("13B", 512, 1).memory
    left = 4 * 12.85e9 + memory.activations + memory.margin
    return not any(fits("13B", n, 1) for n in DEVICES) and left > 80 * 2**30


PROOFS: Proofs = {
    "until nothing is held twice": lambda: abs(4 * step(3).held[0].total / step(0).held[0].total - 1) < 0.01,
    "Each half costs half": lambda: (
        [numbers("def go_around(", f"ring_{name} ")[0] for name in ("reduce_scatter", "all_gather")] == [0.75, 0.75]
        and numbers("def go_around(", "ring_all_reduce ") == [1.5]
    ),
    "Data parallelism holds 16 bytes for each parameter on each rank.": lambda: (
        round(step(0).held[0].total / step(0).weights.numel(), 2) == 16
    ),
    "A rank has its own gradients, 4 bytes, and its shard of their mean.": lambda: (
        round(step(1).held[0].gradients / step(1).weights.numel(), 2) == 4 + 4 / 4
    ),
    "In ZeRO-3 a rank holds a quarter of each layer": lambda: (
        abs(4 * step(3).held[0].parameters / step(0).held[0].parameters - 1) < 0.01
    ),
    "That happens twice, in the forward and in the backward pass.": lambda: (
        called(3, "all_gather") == 2 * called(3, "all_to_all") > 0  # once for the gradients of each
    ),
    "a device needs 80 ms for the forward pass of the whole minibatch and twice as long for the backward pass, and "
    "links carry 80 MB per second": lambda: all(
        word in lesson(NAME).code("ahead, waiting") for word in ('"forward": 0.08, "backward": 0.16', "bandwidth=80e6")
    ),
    "A step is one forward pass, and a backward pass that takes twice as long; with a second forward pass that makes 4 "
    "in place of 3.": lambda: (
        3 * step(3, recompute=True).timeline.busy(0) == pytest.approx(4 * step(3).timeline.busy(0), rel=1e-6)
    ),
    "(Not quite 4, because the last block, which makes the model's answer, is not computed again.)": lambda: (
        3.99 < numbers("keeping, computing", "compute again")[-1] < 4 and numbers("keeping, computing", "keep")[0] == 3
    ),
    "ZeRO-3 cuts the parameters, too, and sends half as much again.": lambda: abs(sent(3) / sent(1) - 1.5) < COUNTS,
    "Recomputing saves activations, which no stage does, for about a third more computing.": lambda: (
        step(3, recompute=True).timeline.busy(0) / step(3).timeline.busy(0) == pytest.approx(4 / 3, rel=1e-6)
        and len({step(stage).activations[0] for stage in (0, 1, 2)}) == 1
    ),
    "Three quarters are copies, and with a thousand ranks it would be nearly everything.": lambda: 1 - 1 / 1000 > 0.99,
    "on the **emulated** links of the last lesson: 1 ms for each message, 2.5 MB/s.": lambda: (
        "Link(latency=0.001, bandwidth=2.5e6)" in lesson("data_parallelism").code("device = {")
    ),
    "the ring's line climbs fastest and the tree wins in the end. On the right, where bytes count, the tree is last "
    "from the start.": small_and_large,
    "The hierarchy sends no more bytes than the ring, in far fewer steps": a_hierarchy_takes_fewer_steps,
    "in a real cluster about seven eighths of its bytes stay on the fast links inside a node": lambda: all(
        abs((7 / 8) / ((n - 1) / n) - 7 / 8) < 0.01 for n in RANKS[-3:]
    ),
    "5 is 1 + 4, from ranks 0 and 2": lambda: 2**0 + 2**2 == 5,
    "The same training, the same bytes, and a quarter of the optimizer state on each rank.": lambda: (
        abs(sent(1) / sent(0) - 1) < COUNTS
        and abs(4 * step(1).held[0].optimizer / step(0).held[0].optimizer - 1) < 0.01
    ),
    "the optimizer state can be cut for free, and the gradients too": lambda: (
        max(sent(1), sent(2)) < (1 + COUNTS) * sent(0)
    ),
    "In a step of four ranks each sends 6, which is 1.5 times the 4 bytes of a gradient.": lambda: (
        abs(sent(0) / step(0).weights.numel() / 6 - 1) < COUNTS
    ),
    "With four ranks, ZeRO-3 holds a quarter. Stages 1 and 2 send what data parallelism sends, and stage 3 half as "
    "much again.": lambda: (
        abs(4 * step(3).held[0].total / step(0).held[0].total - 1) < 0.01 and abs(sent(3) / sent(1) - 1.5) < COUNTS
    ),
    "traffic sticks out in three places: before the first layer, in the middle, where the last layer is wanted back at "
    "once, and after the last gradient.": lambda: places(times(step(3).timeline)) == 3,
    "ZeRO-3 sends half as much again, and is still faster than stages 1 and 2 here.": lambda: (
        step(3).timeline.makespan < min(step(1).timeline.makespan, step(2).timeline.makespan)
    ),
    "These gather all updated parameters at the end of a step, and nothing is left there to hide that": lambda: (
        min(gathers_at_the_end(1), gathers_at_the_end(2)) > 0.75 * 4 * step(1).weights.numel() / 80e6
    ),
    "Less than a third of the activations, for a third more computing.": lambda: (
        3 * step(3, recompute=True).activations[0] < step(3).activations[0]
        and abs(step(3, recompute=True).timeline.busy(0) / step(3).timeline.busy(0) - 4 / 3) < 1e-6
    ),
    "Nothing more is sent: a layer is gathered for its backward pass anyway.": lambda: (
        step(3, recompute=True).timeline.bytes_sent(0) == sent(3)
    ),
    "on A100 with 80 GiB in nodes of eight, two samples of 2,048 tokens for each device": lambda: (
        (SAMPLES, planned("13B", 16, 1).model.sequence) == (2, 2048)
        and ((on := planned("13B", 16, 1).cluster).device, on.nodes, on.devices_per_node) == ("A100-80GB", 2, 8)
        and planned("13B", 16, 1).capacity == 80 * 2**30
    ),
    "It also has 16 bytes for each parameter: 2 for the parameter, 2 for its gradient, and 12 that the optimizer "
    "keeps. So ZeRO-1 can cut away 12 of 16.)": lambda: tuple(RECIPES["bf16"]) == (2, 2, 12),
    "1. ZeRO-1 is the first, and its step is shorter: each rank updates an eighth of the parameters.": lambda: (
        not fits("6.7B", 8, 0) and fits("6.7B", 8, 1) and seconds("6.7B", 8, 1) < seconds("6.7B", 8, 0)
    ),
    "2. ZeRO-3 while keeping the activations takes 1.82 s a step. ZeRO-1 with recomputing fits as well, and takes 2.28 "
    "s.": lambda: (
        [fits("13B", 8, stage) for stage in (1, 2, 3)] == [False, False, True]
        and fits("13B", 8, 1, "full")
        and (round(seconds("13B", 8, 3), 2), round(seconds("13B", 8, 1, "full"), 2)) == (1.82, 2.28)
    ),
    "What ZeRO-1 does not cut stays: 4 bytes for each parameter, the activations, and a margin for what no tensor is "
    "in. That is more than 80 GiB, however many devices there are.": what_zero_1_leaves_is_too_much,
    "4. 64 devices are enough, with ZeRO-3 and recomputing. On 512 devices about a third of the step goes into": (
        lambda: fits("175B", 64, 3, "full") and not fits("175B", 32, 3, "full") and 0.3 < lost(512) < 0.36
    ),
    "It cuts every parameter by its first dimension, into `DTensor`s": lambda: all(
        placements == (Shard(0),) for placements, _, _ in pytorch()
    ),
    # The second row is rank 1's, so each rank's own numbers are there.
    "It does not make the ranks equal at the start.": lambda: {begun for _, begun, _ in pytorch()} == {1.0},
    # Rank 0 has one sample with a gradient of 1/2, rank 1 three with 2/2: by samples it would be 7/8.
    "It averages over ranks as if all shares had the same size.": lambda: (
        {gradient for _, _, gradient in pytorch()} == {0.75}
    ),
    "`torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`, from `unshard` to `post_backward`": lambda: all(
        hasattr(_fully_shard._fsdp_param_group.FSDPParamGroup, name) for name in ("unshard", "post_backward")
    ),
    "`torch.distributed.optim.ZeroRedundancyOptimizer`": lambda: issubclass(
        ZeroRedundancyOptimizer, torch.optim.Optimizer
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)


@pytest.mark.parametrize(
    ("stage", "formula"), [(1, "$(8 + 8/N)\\,\\Psi$"), (2, "$(4 + 12/N)\\,\\Psi$"), (3, "$16/N\\,\\Psi$")]
)
def test_the_formulas_of_the_table_are_what_a_ledger_counts(stage: int, formula: str) -> None:
    """ZeRO-1 holds a shard of the mean gradient on top when its gradients are averaged, as the text says."""
    assert lesson(NAME).says(formula)
    assert lesson(NAME).says("A rank has its own gradients, 4 bytes, and its shard of their mean.")
    psi, n = step(stage).weights.numel(), 4
    expected = {1: 8 + 8 / n + 4 / n, 2: 4 + 12 / n, 3: 16 / n}[stage]
    assert step(stage).held[0].total / psi == pytest.approx(expected, rel=0.002)
