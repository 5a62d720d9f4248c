"""Conclusions of the lesson on planning, confirmed elsewhere."""

from __future__ import annotations

from functools import cache
from math import isclose

import pytest

from benchmarks import _published as published
from course_lib.planner import Cluster, Estimate, Plan, estimate, search
from course_lib.planner.models import GPT3, LLAMA3
from course_lib.planner.search import Found
from lessons.L09_planning import questions as asked
from tests.lessons.conclusions import Conclusion, confirm

NAME = "planning"
BEYOND = 0.02  # of regret


@cache
def of_gpt3() -> Found:
    """All plans for GPT-3 on 512 H100, with 1,024 samples."""
    return search(GPT3["175B"], Cluster("H100-80GB", nodes=64, between="InfiniBand NDR"), 1024)


def shapes(found: list[Estimate]) -> set[tuple[int, int, int]]:
    return {(one.plan.dp, one.plan.tp, one.plan.pp) for one in found}


def by_hand(pieces: int) -> tuple[int, int, int]:
    """The shape for GPT-3 with the most stages whose bubble is less than a tenth, of those that divide its layers."""
    dp = 512 // pieces
    stages = max(p for p in (1, 2, 4, 8, 16, 32) if 1024 // dp >= 9 * (p - 1) and pieces % p == 0)
    return dp, pieces // stages, stages


def published_row(name: str) -> published.Row:
    (row,) = (row for row in published.rows_of("step time") if row["id"] == name)
    return row


def speed(name: str) -> float:
    """Published samples a second of one device."""
    row = published_row(name)
    return row["global_batch"] / published.published_seconds(row) / published.plan_of(row).devices


def on_tensor_ranks(tp: int) -> float:
    plan = Plan(dp=2, tp=tp, pp=64 // tp, sequence_parallel=True, zero=1)
    return estimate(LLAMA3["405B"], Cluster("H100-80GB", 16, between="InfiniBand NDR"), plan, 256).step_time.total


CONCLUSIONS = [
    Conclusion(
        "Who talks most sits closest: tensor ranks inside a node, pipelines and replicas across.",
        "Llama 3 405B on H100 (whose paper has 8 tensor ranks, section 3.3.2): 8 beat 16; GPT-3: no tied plan has more",
        lambda: on_tensor_ranks(8) < on_tensor_ranks(16) and max(tp for _, tp, _ in shapes(of_gpt3().tied)) <= 8,
    ),
    Conclusion(
        "Two thresholds, memory from below and the bubble from above, lead by hand to the shapes that a search finds.",
        "GPT-3 on 512 H100: 4 N / M is 8.2 pieces, so 16 to 64",
        lambda: (
            8 < 4 * GPT3["175B"].parameters / Cluster("H100-80GB").spec.memory < 9
            and {by_hand(pieces) for pieces in (16, 32, 64)} <= shapes(of_gpt3().tied)
        ),
    ),
    Conclusion(
        "Choosing by the planner loses little, even where its lengths are off.",
        "46 measured plans of GPT-39B (vTrain), and eight sets of five sources; with vTrain left out, too",
        lambda: (
            max(regret for _, regret in published.whole_sweeps().values()) < BEYOND
            and max(one.regret(published.matmul_of_chips("vtrain")["A100"]) for one in published.sweeps()) < BEYOND
        ),
    ),
    Conclusion(
        "The best plan depends on the number of devices and on what they are. New hardware may want a new plan.",
        "Megatron Bridge 26.02, Llama 3 70B in FP8 on 64 devices: 4 x 8 ranks for each replica on H100, FSDP on GB300",
        lambda: (
            published_row("bridge-26.02-H100-70B-fp8-64-256")["plan"]["pp"] == 8
            and published_row("bridge-26.02-GB300-70B-fp8-64-256")["plan"]["zero"] == 3
        ),
    ),
    Conclusion(
        "Faster devices gain less than their peak, unless memory and links keep up.",
        "DGX Cloud recipes, Llama 3 405B in 16 bits: GB200 has 2.5 times the peak of H100 and 2.1 times its speed",
        lambda: (
            speed("dgxc-405B-GB200-bf16-128-64") / speed("dgxc-405B-H100-bf16-512-256")
            < 0.9 * Cluster("GB200-186GB").spec.peak["bf16"] / Cluster("H100-80GB").spec.peak["bf16"]
        ),
    ),
]


@pytest.mark.parametrize("conclusion", CONCLUSIONS, ids=lambda one: one.sentence[:40])
def test_it_holds_elsewhere(conclusion: Conclusion) -> None:
    confirm(NAME, conclusion)


def test_two_offers_that_cannot_be_told_apart_both_count_and_others_do_not() -> None:
    first, close = ({name: asked._buy(name, of).right for name in of} for of in (asked.FIRST, asked.CLOSE))
    assert [name for name, right in first.items() if right] == ["h100"]
    assert [name for name, right in close.items() if right] == ["h100", "others"]
    peaks = [asked._peak(asked.FIRST[name]) for name in ("h100", "others")]
    assert isclose(*peaks, rel_tol=0.01)  # so that the peak tells nothing
