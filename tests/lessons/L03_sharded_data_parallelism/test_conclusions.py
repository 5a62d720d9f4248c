"""Conclusions of the lesson on sharded data parallelism, confirmed elsewhere."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import pytest
import torch

from course_lib.planner import Cluster, Plan, estimate
from course_lib.planner.communication import Spread, hierarchical_seconds, ring_seconds, tree_seconds
from course_lib.planner.estimate import Estimate
from course_lib.planner.memory import layer_activations
from course_lib.planner.models import GPT3, LLAMA3
from lessons.L03_sharded_data_parallelism.runs import sharded_step
from tests.lessons.conclusions import Conclusion, confirm

NAME = "sharded_data_parallelism"
H100 = Cluster("H100-80GB", 16, between="InfiniBand NDR")
CARD = H100.between_link
PAPER = replace(GPT3["175B"], flash_attention=False)


def planned(stage: int, cluster: Cluster = H100, model: str = "13B", passes: int = 1, **how: int | str) -> Estimate:
    plan = Plan(dp=cluster.devices, zero=stage, **{"micro_batch": 2, **how})  # type: ignore[arg-type]
    family = LLAMA3 if model in LLAMA3 else GPT3
    return estimate(family[model], cluster, plan, plan.micro_batch * plan.dp * passes)


def sent(passes: int) -> list[float]:
    """Bytes that a device sends in a step of stages 1, 2 and 3, by those of data parallelism."""
    return [planned(stage, passes=passes).flows["data"].bytes / planned(0).flows["data"].bytes for stage in (1, 2, 3)]


def apart(stage: int) -> float:
    alone, three = (sharded_step(stage, n, samples=36, dtype=torch.float64).weights for n in (1, 3))
    return float((alone - three).abs().max())


def exposed(model: str, samples: int) -> float:
    """The share of a ZeRO-3 step in which its traffic is exposed."""
    time = planned(3, model=model, micro_batch=samples).step_time
    return time.data / time.total


def fastest_that_fits(model: str, cluster: Cluster) -> str:
    tried = [
        planned(3, cluster, model, micro_batch=samples, recompute=recompute)
        for recompute in ("none", "selective", "full")
        for samples in (1, 2, 4, 8, 16)
    ]
    return max((one for one in tried if one.fits), key=lambda one: one.tokens_per_second).plan.recompute


def kept(recompute: str) -> float:
    return layer_activations(PAPER, Plan(tp=8, sequence_parallel=True, recompute=recompute).slice, recompute)


CONCLUSIONS = [
    Conclusion(
        "In the upper half, where latency counts, the ring takes longer and longer: it has $2(N-1)$ steps, and "
        "whatever halves the distance has $2\\log_2 N$. "
        "In the lower half, where bytes count, most times come close to each other: each rank sends about twice the "
        "tensor, and no way sends less.",
        "the planner's links: 10 kB and 10 GB over 1,024 network cards",
        lambda: (
            ring_seconds("all_reduce", 1e4, 1024, CARD) > 20 * tree_seconds(1e4, 1024, CARD)
            and isclose(ring_seconds("all_reduce", 1e10, 1024, CARD), tree_seconds(1e10, 1024, CARD), rel_tol=0.05)
        ),
    ),
    Conclusion(
        "it crosses between nodes with an eighth of the tensor on each of eight devices, each through its own network "
        "card, where one flat ring would leave a node through a single card",
        "the planner's links: 1 GB over 128 devices",
        lambda: (
            ring_seconds("all_reduce", 1e9, 128, CARD)
            > 4 * hierarchical_seconds("all_reduce", 1e9, Spread(128, 8), H100)
        ),
    ),
    Conclusion(
        "ZeRO-1 cuts the optimizer state and ZeRO-2 the gradients, and both send what data parallelism sends. ZeRO-3 "
        "cuts the parameters, too, and sends",
        "the planner: 13 billion parameters in 16 bits on 128 H100",
        lambda: sent(passes=1) == pytest.approx([1, 1, 1.5]),
    ),
    Conclusion(
        "With several passes in a step, only stage 1 sends no more.",
        "the planner: the same, and eight passes",
        lambda: sent(passes=8) == pytest.approx([1, 9 / 2, 24 / 2]),
    ),
    Conclusion(
        "It is the training of one process, up to rounding, in every stage.",
        "three ranks, which divide neither parameters nor the minibatch of the page",
        lambda: max(apart(stage) for stage in (1, 2, 3)) < 1e-9,
    ),
    Conclusion(
        "Still, a higher stage is for memory: where all of them hide what they can, it is not faster.",
        "the planner: two models on 8 to 256 devices of two kinds",
        lambda: all(
            planned(1, cluster, model).step_time.total
            <= planned(2, cluster, model).step_time.total
            < planned(3, cluster, model).step_time.total
            for model in ("6.7B", "13B")
            for cluster in (H100, Cluster(nodes=1), Cluster(nodes=32))
        ),
    ),
    Conclusion(
        "What counts is how many tokens a rank computes at a time.",
        "Austin et al. 2025: 2,475 tokens by the data sheet of an H100; and the planner's exposed share of a step",
        lambda: 990e12 / 400e9 == 2475 and all(exposed(model, 1) > 2 * exposed(model, 8) for model in ("1.3B", "13B")),
    ),
    Conclusion(
        "Recomputing everything saves activations, which no stage does, for one more forward pass. Selective "
        "recomputation saves less of them, and costs little as long as it leaves out matrix products.",
        "Korthikanti et al. 2022: 70% for GPT-3; and the planner's time for it",
        lambda: (
            round(1 - kept("selective") / kept("none"), 2) == 0.70
            and kept("full") < kept("selective")
            and planned(3, recompute="selective").step_time.total < 1.02 * planned(3).step_time.total
            and planned(3, recompute="full").step_time.total > 1.2 * planned(3).step_time.total
        ),
    ),
    Conclusion(
        "So take what is enough: nothing, then selective, then full.",
        "the planner: a small, a middle and a large model on 8 or 128 devices; fms-fsdp's settings are the same",
        lambda: (
            [fastest_that_fits(*of) for of in (("2.7B", H100), ("13B", Cluster(nodes=1)), ("70B", H100))]
            == ["none", "selective", "full"]
        ),
    ),
]


@pytest.mark.parametrize("conclusion", CONCLUSIONS, ids=lambda one: one.sentence[:40])
def test_it_holds_elsewhere(conclusion: Conclusion) -> None:
    confirm(NAME, conclusion)
