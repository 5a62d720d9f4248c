"""Conclusions of the lesson on data parallelism, confirmed elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from course_lib import Link, Pace, data, launch
from course_lib.classroom.runs import training_step
from course_lib.mechanisms import batches
from course_lib.mechanisms.collectives import ring_all_reduce
from course_lib.mechanisms.data_parallel import average_gradients
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import Cluster, Plan, estimate
from course_lib.planner.models import GPT3
from tests.lessons.conclusions import Conclusion, confirm

NAME = "data_parallelism"
OTHER = GPTConfig(layers=3, hidden=48, heads=3)


def off(rank: int) -> float:
    """How far the mean of gradients, weighted by shares, is from the gradient of 23 samples."""
    minibatch = data.fixed_examples(23)

    def gradient(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        model = TinyGPT(OTHER, seed=5, dtype=torch.float64)
        data.answer_loss(model(inputs), targets).backward()
        return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])

    inputs, targets = batches.split(minibatch, dist.get_world_size())[rank]
    total = gradient(inputs, targets) * len(inputs)
    dist.all_reduce(total)
    return float((total / 23 - gradient(*minibatch)).abs().max())


def trained(rank: int) -> torch.Tensor:
    """The weights after three steps of SGD with momentum, with averaged gradients."""
    model = TinyGPT(OTHER, seed=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for samples in (15, 20, 30):
        optimizer.zero_grad()
        inputs, targets = batches.split(data.fixed_examples(samples), dist.get_world_size())[rank]
        data.answer_loss(model(inputs), targets).backward()
        average_gradients(model)
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def are_equal(replicas: list[torch.Tensor]) -> bool:
    return all(torch.equal(replica, replicas[0]) for replica in replicas)


def ring(rank: int) -> None:
    ring_all_reduce(torch.ones(24_000))


def step_of(nodes: int, samples_each: int | None = None) -> float:
    """Seconds of a step of 1.3 billion parameters, with 512 samples or as many for each device."""
    devices = 8 * nodes
    plan = Plan(dp=devices, micro_batch=2)
    return estimate(
        GPT3["1.3B"], Cluster(nodes=nodes), plan, samples_each * devices if samples_each else 512
    ).step_time.total


def emulated(n: int, samples: int) -> float:
    pace = Pace({"forward": 0.001, "backward": 0.002, "optimizer": 0.001}, link=Link(0.0001, 5e6))
    return training_step(n, samples, pace, overlap=False, config=OTHER).makespan


CONCLUSIONS = [
    Conclusion(
        "The mean of the gradients, weighted by the shares, is the gradient of the minibatch, up to rounding.",
        "another model, 23 samples on five ranks, 64 bits",
        lambda: max(launch(off, 5).results) < 1e-12,
    ),
    Conclusion(
        "One all-reduce in each step, after the backward pass and before the update, keeps the replicas equal.",
        "another model and optimizer, five ranks",
        lambda: are_equal(launch(trained, 5).results),
    ),
    Conclusion(
        "Each rank sends $2(N-1)/N$ times the size of the gradients in every step: less than twice, however many ranks "
        "there are.",
        "twelve ranks that pass pieces on themselves; Patarasuk and Yuan 2009 prove that it is the least",
        lambda: launch(ring, 12).timeline.bytes_sent(3) == 2 * 11 / 12 * 24_000 * 4,
    ),
    Conclusion(
        "That is where the speed-up ends; a minibatch that grows with the ranks goes on",
        "12 emulated ranks and another model; and the planner, 1.3 billion parameters on 8 to 256 A100s",
        lambda: (
            12 * emulated(1, 24) / emulated(12, 12 * 24) > 1.5 * emulated(1, 24) / emulated(12, 24)
            and step_of(1) / step_of(32) < 0.85 * 32
            and step_of(1, 64) / step_of(32, 64) > 0.9
        ),
    ),
]


@pytest.mark.parametrize("conclusion", CONCLUSIONS, ids=lambda one: one.sentence[:40])
def test_it_holds_elsewhere(conclusion: Conclusion) -> None:
    confirm(NAME, conclusion)
