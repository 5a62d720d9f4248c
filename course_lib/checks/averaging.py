"""The check for `average_gradients(model, samples)`: after it, every rank holds the gradient of the whole minibatch."""

from __future__ import annotations

from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import data
from course_lib.checks.exercise import Case, Exercise
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


def _play(fn: Any, model: nn.Module, samples: int) -> None:
    fn(model, samples)


average_gradients = Exercise(
    "average_gradients",
    right,
    _play,
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


def _summed(model: nn.Module, by: float = 1, divisor: float = 1) -> None:
    """The way of nearly all mistakes: weight each gradient, add up, divide."""
    for gradient in gradients(model):
        gradient *= by
        dist.all_reduce(gradient)
        gradient /= divisor


@mistake("You average the parameters, in which the replicas do not differ.", ask="In what do they differ?")
def parameters_averaged(model: nn.Module, samples: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


@mistake("Ranks talk, and every `.grad` stays what it was.", ask="Which lines make a new tensor, and who keeps it?")
def result_not_stored(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        dist.all_reduce(gradient * samples)


@mistake("These are the sums of the ranks' gradients.", ask="The loss is a mean. What is its gradient?")
def sum_without_division(model: nn.Module, samples: int) -> None:
    _summed(model)


@mistake("Each gradient is weighted by its samples, and the division is missing.", ask="What does the sum count?")
def weighted_sum_without_division(model: nn.Module, samples: int) -> None:
    _summed(model, by=samples)


@mistake("You weight by samples and divide by ranks.", ask="To what number do the weights add up?")
def weighted_and_divided_by_ranks(model: nn.Module, samples: int) -> None:
    _summed(model, by=samples, divisor=dist.get_world_size())


@mistake("The mean over ranks is divided once more.", ask="Which of your lines divide, before and after?")
def divided_twice(model: nn.Module, samples: int) -> None:
    _summed(model, divisor=dist.get_world_size() ** 2)


@mistake("You divide by a number of samples.", ask="Is a rank's own gradient a sum over its samples, or a mean?")
def divided_by_samples(model: nn.Module, samples: int) -> None:
    _summed(model, divisor=samples)


@mistake("You divide by this rank's samples, times the ranks.", ask="How many samples do all ranks have?")
def divided_by_own_samples(model: nn.Module, samples: int) -> None:
    _summed(model, by=samples, divisor=samples * dist.get_world_size())


@mistake("This is the plain mean over ranks.", ask="How much does one sample count if it is in a small share?")
def shares_counted_alike(model: nn.Module, samples: int) -> None:
    _summed(model, divisor=dist.get_world_size())


@mistake("All ranks have the gradient of rank 0.", ask="Where have the others' samples gone?")
def gradient_of_one_rank(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        dist.broadcast(gradient, 0)


@mistake("Every gradient is zero.", ask="What is `samples // total`, and does any line set gradients to zero?")
def rounded_to_zero(model: nn.Module, samples: int) -> None:
    _summed(model, by=samples // _total(samples))


@mistake("Every parameter gets the beginning of the message.", ask="Where does the next part begin?")
def offset_stuck(model: nn.Module, samples: int) -> None:
    message = torch.cat([gradient.flatten() for gradient in gradients(model)]) * samples / _total(samples)
    dist.all_reduce(message)
    for gradient in gradients(model):
        gradient.copy_(message[: gradient.numel()].view_as(gradient))


@mistake("The total grows from parameter to parameter.", ask="What is in `total` when it is reduced again?")
def total_grows(model: nn.Module, samples: int) -> None:
    total = torch.tensor(samples)
    for gradient in gradients(model):
        dist.all_reduce(total)
        gradient *= samples / total
        dist.all_reduce(gradient)
