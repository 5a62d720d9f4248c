"""Conclusions of the lesson on tensor parallelism, confirmed elsewhere."""

from __future__ import annotations

from dataclasses import replace
from math import isclose
from typing import Any

import pytest

from course_lib.planner import Cluster, Estimate, ModelSpec, Plan, estimate
from course_lib.planner.models import GPT3
from lessons.L06_tensor_parallelism.questions import FIRST_TRY, SHARDED, tried
from tests.lessons.conclusions import Conclusion, confirm

NAME = "tensor_parallelism"
H100 = Cluster("H100-80GB", nodes=16, devices_per_node=8)


def planned(model: ModelSpec, tp: int, pp: int = 16, **how: Any) -> Estimate:
    return estimate(model, H100, replace(Plan(dp=128 // (tp * pp), tp=tp, pp=pp, zero=1), **how), 512)


def sent(**how: Any) -> float:
    """Bytes of f and g for 175 billion parameters, over those of four all-reduces in each layer."""
    plain, plan = GPT3["175B"], Plan(tp=8, pp=16)
    layers, micro_batches = plain.layers // plan.pp, 512
    all_reduce = 2 * 7 / 8 * 2 * plain.sequence * plain.hidden
    return planned(plain, 8, **how).flows["tensor"].bytes / (4 * layers * micro_batches * all_reduce)


def waits(hidden: int) -> float:
    one = planned(replace(GPT3["175B"], hidden=hidden), 8).step_time
    return one.tensor / one.total


def in_a_node() -> list[float]:
    return [planned(GPT3["175B"], tp, pp=8, sequence_parallel=True).mfu for tp in (4, 8, 16)]


CONCLUSIONS = [
    Conclusion(
        "four for each transformer block, each of all hidden states. With full recomputation it is six.",
        "the planner's bytes for 175 billion parameters on 128 H100s, and Narayanan et al. 2021, section 3.2: 8 b s h "
        "(t - 1) / t numbers in a layer",
        lambda: isclose(sent(), 1) and isclose(sent(recompute="full"), 6 / 4),
    ),
    Conclusion(
        "with sequence parallelism, so are the activations between the blocks, for the same bytes, and with a second "
        "gathering all of them, for a quarter more.",
        "the planner, 175 billion parameters; Korthikanti et al. 2022, equations 2 and 4: 34 / t for 10 + 24 / t",
        lambda: (
            isclose(sent(sequence_parallel=True), 5 / 4)
            and isclose(
                planned(GPT3["175B"], 8, sequence_parallel=True).memory.activations
                / planned(GPT3["175B"], 8).memory.activations,
                (34 / 8) / (10 + 24 / 8),
                rel_tol=0.02,
            )
        ),
    ),
    Conclusion(
        "Keep it on the fastest links you have, inside a node, and there use no more ranks than you need.",
        "the planner: 175 billion parameters on 128 H100s",
        lambda: (found := in_a_node())[0] > found[1] > 1.2 * found[2],
    ),
    Conclusion(
        "They are as fast as long as each device has enough samples for each time that weights are fetched.",
        "torchtitan's docs/performance.md: 51.7% for 70 billion parameters with FSDP on 64 A100s; the planner with one "
        "sample on each of 512",
        lambda: (
            isclose(tried()[SHARDED].mfu, 0.517, rel_tol=0.1)
            and tried()[SHARDED].mfu > 0.95 * tried()[FIRST_TRY].mfu
            and tried(64)[SHARDED].mfu < 0.7 * tried(64)[FIRST_TRY].mfu
        ),
    ),
    Conclusion(
        "with a small hidden size there is little to compute for each byte",
        "the planner: 96 layers on 128 H100s, hidden sizes from 1,536 to 12,288",
        lambda: waits(1_536) > 1.5 * waits(6_144) > waits(12_288),
    ),
]


@pytest.mark.parametrize("conclusion", CONCLUSIONS, ids=lambda one: one.sentence[:40])
def test_it_holds_elsewhere(conclusion: Conclusion) -> None:
    confirm(NAME, conclusion)
