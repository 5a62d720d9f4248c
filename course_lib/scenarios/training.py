"""The other half of a job: what it learns. A small model is really trained in mixed precision, as its recipe has it.

It stands for the large one, and its four ranks for the replicas.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from course_lib import data
from course_lib.experiments.ablations import RoundedWeights
from course_lib.experiments.training import SMALL, flat, shares
from course_lib.mechanisms.collectives import all_reduce_in
from course_lib.mechanisms.mixed_precision import LossScaler, MasterWeights
from course_lib.model import TinyGPT
from course_lib.ranks import launch
from course_lib.scenarios.situation import Recipe

RANKS, BATCH, STEPS = 4, 32, 60
GROWTH = 20  # steps after which the scale may grow: a short training stands for a long one


class Trained(NamedTuple):
    """What a rank has to tell of a training.

    losses, scales, skipped, overflowed: by step; of its share, what the loss was multiplied by, whether there was no
        update, whether its own gradient was not finite before any sum.
    moved: how far the last update moved the weights, as a share of their length.  checksum: of all weights at the end.
    """

    losses: list[float]
    scales: list[float]
    skipped: list[bool]
    overflowed: list[bool]
    moved: float = 0.0
    checksum: float = 0.0


@cache
def train(recipe: Recipe) -> list[Trained]:
    """By rank."""
    return launch(_train, RANKS, (recipe,)).results


def _train(rank: int, recipe: Recipe) -> Trained:
    model = TinyGPT(SMALL, dtype=torch.float16)
    weights, scaler = list(model.parameters()), LossScaler(recipe.scale, recipe.dynamic, GROWTH)
    keeps: Any = MasterWeights if recipe.master_weights else RoundedWeights
    optimizer = keeps(weights, torch.optim.AdamW, scaler, lr=recipe.rate)
    found = Trained([], [], [], [])
    for step, (inputs, targets) in enumerate(shares(rank, BATCH, STEPS)):
        loss, before = data.answer_loss(model(inputs).float(), targets), flat(weights).float()
        found.losses.append(loss.item())
        found.scales.append(scaler.scale_factor)
        try:
            scaler.scale(loss).backward()
            total = flat(weight.grad for weight in weights if weight.grad is not None).to(recipe.sums)
            if rank == recipe.bad_rank and step % 3:
                total[0] = math.inf
            found.overflowed.append(not total.isfinite().all())
            _hand_over(_sum(total, recipe), weights, optimizer.parameters)
            found.skipped.append(not optimizer.step())
        except ValueError:  # a loss that is not finite, or a scale that helps no more
            break
        found = found._replace(moved=((flat(weights).float() - before).norm() / before.norm()).item())
    return found._replace(checksum=flat(weights).double().sum().item())


def _sum(gradient: Tensor, recipe: Recipe) -> Tensor:
    return all_reduce_in(recipe.sums)(gradient).div_(RANKS) if recipe.together else gradient


def _hand_over(gradient: Tensor, weights: list[Any], kept: list[Any]) -> None:
    """Let the optimizer find it, in the dtype of what it updates."""
    for weight, own, piece in zip(weights, kept, gradient.split([own.numel() for own in kept]), strict=True):
        weight.grad = None
        own.grad = piece.view_as(own).to(own.dtype)
