"""The check for `average_gradients(model, samples)`: after it, every rank holds the gradient of the whole minibatch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import data
from course_lib.checks.exercise import Case, Exercise, effect
from course_lib.model import GPTConfig, TinyGPT
from course_lib.ranks import Link, Pace
from course_lib.timeline import compute

PACE = Pace(device={"forward": 0.05, "backward": 0.1}, link=Link(latency=0.002, bandwidth=1.5e6))
TINIEST = GPTConfig(hidden=8, heads=2, tied_embeddings=True)
FROZEN = "one parameter is frozen, so nobody computes a gradient for it and its `.grad` is None"
UNEQUAL = "a gradient is a mean over 5 samples on rank 0, and over 3 on rank 1"


_all_problems = cache(data.train_test_split)


def right(model: nn.Module, samples: int) -> None:
    """Everything in one message, the number of samples too."""
    each = gradients(model)
    message = torch.cat([*map(torch.flatten, each), each[0].new_ones(1)]) * samples
    dist.all_reduce(message)
    message /= message[-1].clone()
    for gradient, part in zip(each, message[:-1].split([*map(Tensor.numel, each)]), strict=True):
        gradient.copy_(part.view_as(gradient))


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _case(samples: tuple, seed: int, new: str = "", has_frozen: bool = True, config: GPTConfig = TINIEST) -> Case:
    text = f"{len(samples)} ranks with {', '.join(map(str, samples[:-1]))} and {samples[-1]} samples"
    arguments = partial(_arguments, samples, seed, has_frozen, config)
    return Case(text + ", one parameter frozen" * has_frozen, len(samples), arguments, new)


def _arguments(samples: tuple[int, ...], seed: int, has_frozen: bool, config: GPTConfig, rank: int) -> tuple[Any, int]:
    """A model, with two uses of one tied parameter, after the backward pass over this rank's share."""
    model = TinyGPT(config, seed=seed, dtype=torch.float64)
    if config == TINIEST:
        del model.blocks[1:-1]  # embedding and head are enough to be wrong in
    model.get_parameter("blocks.0.position.weight").requires_grad_(not has_frozen)
    start, stop = list(pairwise(accumulate(samples, initial=0)))[rank]
    problems, _ = _all_problems(seed)
    inputs, targets = data.examples(problems[:: len(problems) // sum(samples)][start:stop])
    with compute("forward"):
        loss = data.answer_loss(model(inputs), targets)
    with compute("backward"):
        loss.backward()
    return model, samples[rank]


def _cases(seed: int) -> list[Case]:
    two = [_case((6, 6), seed, has_frozen=False), _case((6, 6), seed, FROZEN), _case((5, 3), seed, UNEQUAL)]
    return [*two, _case((4, 3, 3), seed + 1), _case((3, 3, 2, 2), seed + 2)]


average_gradients = Exercise(
    "average_gradients",
    right,
    effect,
    _cases,
    priced=_case((3, 3, 2, 2), 0, config=GPTConfig(hidden=16)),
    pace=PACE,
    memory=0,
    rounding=1e-5,  # a share's weight may be a float32 number; wrong ideas are 1,000 times farther off
)
mistake = average_gradients.mistake


def _total(samples: int) -> int:
    total = torch.tensor(samples)
    dist.all_reduce(total)
    return int(total)


SUMS: dict[str, Callable[[int, int], tuple[float, float]]] = {
    # Of the samples of a rank and the number of ranks: what gradients are multiplied by, and their sum is divided by.
    "sum_without_division": lambda samples, ranks: (1, 1),
    "weighted_sum_without_division": lambda samples, ranks: (samples, 1),
    "weighted_and_divided_by_ranks": lambda samples, ranks: (samples, ranks),
    "divided_twice": lambda samples, ranks: (1, ranks**2),
    "divided_by_samples": lambda samples, ranks: (1, samples),
    "divided_by_own_samples": lambda samples, ranks: (samples, samples * ranks),
    "shares_counted_alike": lambda samples, ranks: (1, ranks),
    "rounded_to_zero": lambda samples, ranks: (samples // _total(samples), 1),
}


def _summed(name: str) -> Callable[[nn.Module, int], None]:
    def program(model: nn.Module, samples: int) -> None:
        by, divisor = SUMS[name](samples, dist.get_world_size())
        for gradient in gradients(model):
            gradient *= by
            dist.all_reduce(gradient)
            gradient /= divisor

    program.__name__ = program.__qualname__ = name
    return program


split, beginnings = "message[:-1].split([*map(Tensor.numel, each)])", "[message[: one.numel()] for one in each]"
average_gradients.change("offset_stuck", split, beginnings)
for name in SUMS:
    mistake(_summed(name))


@mistake
def parameters_averaged(model: nn.Module, samples: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


@mistake
def result_not_stored(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        dist.all_reduce(gradient * samples)


@mistake
def gradient_of_one_rank(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        dist.broadcast(gradient, 0)


@mistake
def total_grows(model: nn.Module, samples: int) -> None:
    total = torch.tensor(samples)
    for gradient in gradients(model):
        dist.all_reduce(total)
        gradient *= samples / total
        dist.all_reduce(gradient)
