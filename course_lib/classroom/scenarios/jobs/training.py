"""The training of a job: a small model is really trained in mixed precision, by the job's recipe.

It stands for the job's large model; its four ranks stand for the replicas.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import vector_to_parameters

from course_lib import data
from course_lib.classroom.runs import training
from course_lib.classroom.runs.training import SMALL, RoundedWeights, average_into, flat, gradients_of, shares
from course_lib.classroom.scenarios.jobs.job import TrainingRecipe
from course_lib.mechanisms.mixed_precision import LossScaler, MasterWeights
from course_lib.model import TinyGPT
from course_lib.ranks import launch

RANKS, BATCH, STEPS = 4, 32, 40
GROWTH = 20  # good steps after which the scale grows: few, since a short training stands for a long one


class TrainingRecord(NamedTuple):
    """A rank's report of a training, step by step.

    losses: of its share.  scales: of the loss.
    overflowed: whether its own gradient, before any sum, was not finite.
    moved: the norm of an update, as a share of the norm of the weights; 0 if it was skipped.
    checksum: of all weights at the end.
    """

    losses: list[float]
    scales: list[float]
    overflowed: list[bool]
    moved: list[float]
    checksum: float

    @property
    def skipped(self) -> list[bool]:
        return [length == 0 for length in self.moved]


@cache
def train(recipe: TrainingRecipe) -> list[TrainingRecord]:
    """Train by a recipe; return the report of each rank."""
    return launch(_train, RANKS, (recipe,)).results


def _train(rank: int, recipe: TrainingRecipe) -> TrainingRecord:
    model, scaler = TinyGPT(SMALL, dtype=torch.float16), LossScaler(recipe.scale, recipe.dynamic, GROWTH)
    weights = nn.Parameter(flat(model.parameters()))
    vector_to_parameters(weights, model.parameters())  # from now on the parameters are views of it
    keeps: Any = MasterWeights if recipe.master_weights else RoundedWeights
    optimizer = keeps([weights], torch.optim.AdamW, scaler, lr=recipe.rate)
    (kept,) = optimizer.master_parameters
    scales, overflowed, were = list[float](), list[bool](), [weights.detach().float()]

    def combine() -> None:
        own = gradients_of(model)
        if rank == recipe.bad_rank and len(scales) % 2:
            own[0].fill_(math.inf)
        scales.append(scaler.scale_factor)
        overflowed.append(not all(gradient.isfinite().all() for gradient in own))
        average_into(kept, model, recipe.sums, recipe.together)

    def remember() -> None:
        were.append(weights.detach().float())

    minibatches = shares(rank, BATCH, STEPS)
    losses = training.train(model, minibatches, data.answer_loss, optimizer, scaler, combine, remember)
    moved = [((after - before).norm() / before.norm()).item() for before, after in pairwise(were)]
    return TrainingRecord(losses, scales, overflowed, moved, weights.double().sum().item())
