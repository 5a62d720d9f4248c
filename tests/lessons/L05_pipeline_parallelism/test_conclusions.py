"""Conclusions of the lesson on pipeline parallelism, confirmed elsewhere."""

from __future__ import annotations

from math import isclose

import pytest
import torch

from course_lib import data, launch
from course_lib.mechanisms.pipeline import run_schedule
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import Cluster, Plan, estimate, simulate
from course_lib.planner.models import GPT3
from course_lib.schedules import SCHEDULES, peak_in_flight
from tests.lessons.conclusions import Conclusion, confirm

NAME = "pipeline_parallelism"
A100 = Cluster(nodes=16)


def step(name: str, ranks: int, micro_batches: int, last: float = 0, transfer: float = 0, each: int = 1) -> float:
    """Seconds of a step whose forward, input and weight passes take 1 second on a rank. last: more of each on the last
    stage. each: stages on a rank."""
    seconds = [1 / each] * (ranks * each)
    seconds[-1] += last
    schedule = SCHEDULES[name](ranks * each, micro_batches)
    return simulate(schedule, seconds, seconds, seconds, transfer).makespan


def lost(name: str, each: int) -> float:
    return step(name, 16, 64, last=0.25, each=each) - step(name, 16, 64, each=each)


def seconds_of(micro_batch: int, recompute: str = "none") -> float:
    plan = Plan(dp=4, tp=4, pp=8, micro_batch=micro_batch, schedule="1f1b", recompute=recompute)
    return estimate(GPT3["13B"], A100, plan, 256).step_time.total


def gradients(rank: int) -> dict[str, torch.Tensor]:
    model = TinyGPT(GPTConfig(layers=4, hidden=48, heads=3), seed=3, dtype=torch.float64)
    stages = [model.blocks[:2], model.blocks[2:3], model.blocks[3:]]
    run_schedule(SCHEDULES["1f1b"](3, 5), stages, *data.fixed_examples(11), data.answer_loss)
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def off(own: dict[str, torch.Tensor]) -> float:
    """How far a rank's gradients are from those of one process."""
    model = TinyGPT(GPTConfig(layers=4, hidden=48, heads=3), seed=3, dtype=torch.float64)
    inputs, targets = data.fixed_examples(11)
    data.answer_loss(model(inputs), targets).backward()
    alone = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return max((gradient - alone[name]).abs().max().item() for name, gradient in own.items())


# Qi et al. 2024, "Zero Bubble Pipeline Parallelism", table 5: models of 1.5, 6.2, 14.6 and 28.3 billion parameters
PUBLISHED_BUBBLES = {(8, 24): 0.2431, (8, 32): 0.1898, (8, 64): 0.1091, (16, 48): 0.2552, (32, 96): 0.2646}

CONCLUSIONS = [
    Conclusion(
        "The gradients are those of one process, up to rounding.",
        "another model and schedule, 11 samples in five micro-batches, three ranks",
        lambda: max(off(own) for own in launch(gradients, 3).results) < 1e-12,
    ),
    Conclusion(
        "Filling and draining leave a bubble of $(p-1)/(m+p-1)$: more micro-batches make it smaller, more "
        "stages larger.",
        "Qi et al. 2024, table 5, 1F1B with passes and messages as timed on A100s: at most 12% above the formula",
        lambda: all(1 < bubble * (m + p - 1) / (p - 1) < 1.12 for (p, m), bubble in PUBLISHED_BUBBLES.items()),
    ),
    Conclusion(
        "GPipe and 1F1B have the same bubble. GPipe holds all $m$ micro-batches, 1F1B at most $p$.",
        "64 stages, 512 micro-batches",
        lambda: (
            isclose(step("gpipe", 64, 512), step("1f1b", 64, 512))
            and max(peak_in_flight(SCHEDULES["gpipe"](64, 512))) == 512
            and max(peak_in_flight(SCHEDULES["1f1b"](64, 512))) == 64
        ),
    ),
    Conclusion(
        "Interleaving and zero-bubble schedules make the bubble smaller, for more messages or more memory. They do "
        "not cure an uneven cut.",
        "16 ranks, 64 micro-batches, a quarter more on the last rank: with 1, 2 and 4 stages on each the same is lost, "
        "and zero bubble loses more",
        lambda: (
            step("zb_h1", 16, 64) < step("interleaved_1f1b", 16, 64, each=2) < step("1f1b", 16, 64)
            and isclose(lost("1f1b", 1), lost("interleaved_1f1b", 2))
            and isclose(lost("1f1b", 1), lost("interleaved_1f1b", 4))
            and lost("zb_h1", 1) >= lost("1f1b", 1)
        ),
    ),
    Conclusion(
        "All wait for the slowest stage, in every turn.",
        "16 ranks, 64 micro-batches: what the last rank has more in three passes is lost 64 times",
        lambda: lost("1f1b", 1) >= 64 * 3 * 0.25,
    ),
    Conclusion(
        "The size of a micro-batch has an optimum: overhead grows below it, idle time and memory above.",
        "the planner: 13 billion parameters on 128 A100s in 8 stages",
        lambda: seconds_of(1) > min(map(seconds_of, (2, 4, 8))) < seconds_of(16),
    ),
    Conclusion(
        "A backward pass takes about as long as two forward passes, so a second forward pass makes a third more to "
        "compute.",
        "the planner, same plan: what a step computes with full recomputation",
        lambda: 1.25 < seconds_of(2, "full") / seconds_of(2) < 4 / 3 + 0.01,
    ),
    Conclusion(
        "In 1F1B a rank soon needs what its neighbor has just sent, so every message delays somebody",
        "16 ranks, 64 micro-batches, messages of a tenth of a pass",
        lambda: (
            step("1f1b", 16, 64, transfer=0.1) / step("1f1b", 16, 64)
            > step("gpipe", 16, 64, transfer=0.1) / step("gpipe", 16, 64) + 0.03
        ),
    ),
]


@pytest.mark.parametrize("conclusion", CONCLUSIONS, ids=lambda one: one.sentence[:40])
def test_it_holds_elsewhere(conclusion: Conclusion) -> None:
    confirm(NAME, conclusion)
