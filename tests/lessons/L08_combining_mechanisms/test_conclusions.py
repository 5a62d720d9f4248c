"""Conclusions of the lesson on combining mechanisms, confirmed elsewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest

from course_lib.planner import Cluster, Estimate, Plan, estimate
from course_lib.planner.models import GPT3, LLAMA3
from lessons.L08_combining_mechanisms.runs import INSIDE, HybridExperiment
from tests.lessons.conclusions import Conclusion, confirm

NAME = "combining_mechanisms"
H100 = Cluster("H100-80GB", nodes=4, devices_per_node=8)


def planned(**how: Any) -> Estimate:
    return estimate(GPT3["6.7B"], H100, Plan(**{"micro_batch": 2, "zero": 1, **how}), 512)


def slowed(sizes: tuple[int, int, int]) -> float:
    """The factor by which the slow link makes a step longer, with fewer samples and micro-batches."""
    slow = HybridExperiment(sizes, 2, samples=16)
    return slow.run().timeline.makespan / slow._replace(between=INSIDE).run().timeline.makespan


def fetched(**how: Any) -> Estimate:
    return estimate(GPT3["13B"], H100, Plan(dp=32, zero=3, **how), 256)


CONCLUSIONS = [
    Conclusion(
        "Every arrangement is the same training.",
        "four ranks, another schedule, half the samples",
        lambda: all(
            (one := HybridExperiment(sizes, 2, "gpipe", samples=32)).is_right(one.run())
            for sizes in ((4, 1, 1), (1, 2, 2), (2, 1, 2))
        ),
    ),
    Conclusion(
        "The axis that talks most gets the fastest links.",
        "a quarter of the samples, half the micro-batches; the planner, 405 billion on 128 H100s; Llama Team 2024, "
        "section 3.3.2: the order is tensor, context, pipeline, data",
        lambda: slowed((1, 1, 8)) > 1.5 > slowed((1, 2, 4)) and _far(tp=8, pp=16) > 1.5 * _far(tp=16, pp=8),
    ),
    Conclusion(
        "Where the model fits and each replica has many samples, replicas are the fastest. Stages, tensor ranks and "
        "ZeRO-3 pay for memory with time.",
        "the planner: 6.7 billion parameters on 32 H100s, 16 samples for each",
        lambda: (
            (alone := planned(dp=32)).fits
            and all(
                other.step_time.total > alone.step_time.total and other.memory.total < alone.memory.total
                for other in (planned(dp=8, pp=4), planned(dp=8, tp=4), planned(dp=32, zero=3))
            )
        ),
    ),
    Conclusion(
        "ZeRO-3 fetches weights for each micro-batch. Hybrid sharding keeps that inside a machine.",
        "the planner: 13 billion parameters on 32 H100s; Zhao et al. 2023, section 3.2.2",
        lambda: (
            math.isclose(fetched(micro_batch=1).flows["data"].bytes, 2 * fetched(micro_batch=2).flows["data"].bytes)
            and fetched(micro_batch=1, shards=8).step_time.data < fetched(micro_batch=1).step_time.data / 2
        ),
    ),
]


def _far(tp: int, pp: int) -> float:
    """Model FLOPs utilization with these tensor ranks."""
    cluster = Cluster("H100-80GB", nodes=16, devices_per_node=8)
    return estimate(LLAMA3["405B"], cluster, Plan(tp=tp, pp=pp, sequence_parallel=True), 256).mfu


@pytest.mark.parametrize("conclusion", CONCLUSIONS, ids=lambda one: one.sentence[:40])
def test_it_holds_elsewhere(conclusion: Conclusion) -> None:
    confirm(NAME, conclusion)
