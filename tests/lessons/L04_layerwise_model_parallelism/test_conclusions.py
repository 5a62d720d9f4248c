"""Conclusions of the lesson on layer-wise model parallelism, confirmed elsewhere."""

from __future__ import annotations

from math import isclose

import pytest
import torch

from course_lib import data, launch
from course_lib.mechanisms.layerwise import LayerWise
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import Cluster, Plan, estimate, simulate
from course_lib.planner.models import GPT3
from course_lib.schedules import SCHEDULES
from tests.lessons.conclusions import Conclusion, confirm

NAME = "layerwise_model_parallelism"
OTHER = GPTConfig(layers=5, hidden=48, heads=3, sequence=8, vocab=31)


def gradients(rank: int, passes: int = 1) -> dict[str, torch.Tensor]:
    inputs, targets = data.fixed_examples(7)
    chain = LayerWise(TinyGPT(OTHER, seed=3, dtype=torch.float64).blocks)
    for _ in range(passes):
        output = chain(inputs)
        chain.backward(None if output is None else data.answer_loss(output, targets))
    return {name: weight.grad for name, weight in chain.named_parameters() if weight.grad is not None}


def has_the_bits_of_one_process() -> bool:
    inputs, targets = data.fixed_examples(7)
    model = TinyGPT(OTHER, seed=3, dtype=torch.float64)
    data.answer_loss(model(inputs), targets).backward()
    alone = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    own = {name: gradient for rank in launch(gradients, 3).results for name, gradient in rank.items()}
    return all(torch.equal(own[name], gradient) for name, gradient in alone.items())


def sent_in_a_pass() -> list[int]:
    """Bytes that each of three ranks sends forward and back, without what is sent once at the start."""
    once, twice = (launch(gradients, 3, args=(passes,)).timeline for passes in (1, 2))
    return [twice.bytes_sent(rank) - once.bytes_sent(rank) for rank in range(3)]


def by_devices(pp: int) -> tuple[float, float]:
    """Seconds of a step, messages left out, and bytes of weights on the fullest device."""
    plan = Plan(1, pp=pp, schedule="naive", micro_batch=8)
    step = estimate(GPT3["13B"], Cluster(nodes=pp, devices_per_node=1), plan, 8)
    return step.step_time.total - step.step_time.pipeline, step.memory.parameters


CONCLUSIONS = [
    Conclusion(
        "Each holds its own weights, gradients, optimizer state and activations, and together they hold everything "
        "once, except for some of what crosses a border.",
        "another model, three ranks",
        lambda: (
            sorted(name for own in launch(gradients, 3).results for name in own)
            == sorted(name for name, _ in TinyGPT(OTHER).named_parameters())
        ),
    ),
    Conclusion(
        "Activations travel forward, gradients of the same size back. Nothing else does.",
        "another model, seven samples, three ranks, 64 bits",
        lambda: sent_in_a_pass() == [7 * 8 * 48 * 8 * borders for borders in (1, 2, 1)],
    ),
    Conclusion(
        "It is the training of one process, to the last bit.",
        "another model, seven samples, three ranks, 64 bits",
        has_the_bits_of_one_process,
    ),
    Conclusion(
        "One rank is busy at a time: $p$ devices are as fast as one.",
        "64 stages; and the planner, 13 billion parameters on one A100 and on ten",
        lambda: (
            isclose(simulate(SCHEDULES["naive"](64, 1), 1 / 64, 2 / 64).makespan, 3)
            and isclose(by_devices(10)[0], by_devices(1)[0], rel_tol=0.05)
        ),
    ),
    Conclusion(
        "The fullest stage decides whether the model fits. Cut by what blocks cost, not by their number.",
        "the planner: the fullest of ten A100s holds more than a tenth of 13 billion parameters, as it has an end, too",
        lambda: 1 / 10 < by_devices(10)[1] / by_devices(1)[1] < 1 / 8,
    ),
]


@pytest.mark.parametrize("conclusion", CONCLUSIONS, ids=lambda one: one.sentence[:40])
def test_it_holds_elsewhere(conclusion: Conclusion) -> None:
    confirm(NAME, conclusion)
