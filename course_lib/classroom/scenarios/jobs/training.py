"""The training of a job: a small model is really trained, with the job's replicas, minibatch, recipe and data.

All replicas train in one process, side by side in tensors with a row for each, in mixed precision:

    weights in float16 -> loss of each replica -> gradients x scale, in float16 -> added up -> / scale -> AdamW

One step of this training stands for all steps between two reports of the job.
"""

from __future__ import annotations

from functools import cache, reduce
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.adamw import adamw

from course_lib import data
from course_lib.classroom.runs.training import SMALL, flat
from course_lib.classroom.scenarios.jobs.job import Job
from course_lib.mechanisms.loss_scaling import LossScaler
from course_lib.model import TinyGPT

GROWTH = 40  # good steps after which the scale grows: few, since a short training stands for a long one
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9  # of Douillard et al. 2023, DiLoCo: Nesterov over the replicas' mean progress
BROKEN = 2.0**10  # the weight of samples in a broken shard, where 1 is right
WRONG, LANES = -16, 3  # a stuck sign and a stuck exponent bit, in every third number


class State(NamedTuple):
    """What a checkpoint holds. Tensors have a row for each replica.

    anchor, speed: the weights on which nodes agreed last, and the outer optimizer's momentum, for local steps.
    """

    weights: Tensor
    mean: Tensor
    square: Tensor
    updates: Tensor
    anchor: Tensor
    speed: Tensor
    scale: float
    good: int


class Learned(NamedTuple):
    """One step's report. loss: the replicas' mean.  norm: of the gradient that replica 0 applied.

    own: each replica's gradient norm before any sum.  scale: of the loss.  is_skipped: whether there was no update.
    """

    loss: float
    norm: float
    own: list[float]
    scale: float
    is_skipped: bool


@cache
def _model() -> TinyGPT:
    return TinyGPT(SMALL)


def begin(job: Job) -> State:
    weights = flat(_model().parameters()).repeat(job.dp, 1)
    zeros = torch.zeros_like(weights)
    return State(weights, zeros, zeros, torch.zeros(()), weights, zeros, 2.0**16, 0)


def once(state: State) -> State:
    """The state in an eighth of the memory, if it is that of equal replicas."""
    rows = (state.weights, state.mean, state.square, state.anchor, state.speed)
    if not all((part == part[:1]).all() for part in rows):
        return state
    weights, mean, square, anchor, speed = (part[:1].clone().expand_as(part) for part in rows)
    return State(weights, mean, square, state.updates, anchor, speed, state.scale, state.good)


def advance(state: State, job: Job, step: int) -> tuple[State, Learned]:
    """Take one step by the job's recipe."""
    scaler = LossScaler(job.fixed or state.scale, job.fixed is None, GROWTH)
    scaler.finite_in_a_row = state.good
    sent, losses = gradients(state, job, minibatch(job, step), scaler.scale_factor)
    mean = torch.cat([_mean(sent[rows].to(job.sums), job.micro_batches) for rows in _groups(job)]).float()
    weights = state.weights.clone()
    weights.grad = mean
    scale = scaler.scale_factor
    is_finite = scaler.unscale_and_update([weights])
    norms = (sent.float().norm(dim=1) / scale).tolist()
    report = Learned(losses.mean().item(), mean[0].norm().item(), norms, scale, not is_finite)
    after = _update(state, job, mean) if is_finite else state
    if job.local and (step + 1) % job.local == 0:
        after = _agree(after)
    return after._replace(scale=scaler.scale_factor, good=scaler.finite_in_a_row), report


def gradients(state: State, job: Job, batch: tuple[Tensor, ...], scale: float) -> tuple[Tensor, Tensor]:
    """What each replica's device computes of its share: the gradient, scaled and in 16 bits, and the loss."""
    with sdpa_kernel(SDPBackend.MATH):
        gradient, (_, loss) = vmap(grad_and_value(_weighted_loss, has_aux=True))(state.weights.half().float(), *batch)
    sent = (gradient * scale).half()
    for replica in range(job.dp):
        if job.corrupt in [job.device(replica * job.pp * job.tp + part) for part in range(job.pp * job.tp)]:
            sent[replica, ::LANES] *= WRONG
    return sent, loss


def held_out(state: State) -> float:
    """Replica 0's loss on problems that are never trained on."""
    with torch.no_grad():
        return float(_loss(state.weights[0].half().float(), *_problems()[1]))


def minibatch(job: Job, step: int) -> tuple[Tensor, ...]:
    """Every replica's share of a minibatch: inputs and targets, [replicas, samples, 8], and the weight of its loss."""
    inputs, targets = _problems()[0]
    random, shape = torch.Generator().manual_seed(1000 * job.seed + step), (job.dp, job.samples // job.dp)
    drawn = torch.randint(len(inputs), shape, generator=random)
    if job.order == "sorted":
        drawn = (step * job.samples + torch.arange(job.samples)).view(shape) % len(inputs)
    if job.order == "same":
        drawn = drawn[:1].expand(shape)
    weight = torch.ones(job.dp)
    if job.bad and job.bad[0] != job.left_out and torch.rand((), generator=random) < job.bad[1]:
        weight[job.bad[0]] = BROKEN
    return inputs[drawn], targets[drawn], weight


@cache
def _problems() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Examples to train on, in the order of their numbers, and held-out ones."""
    train, test = data.train_test_split()
    return data.examples(train), data.examples(test[::3])


def _loss(weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    shapes = {name: weight.shape for name, weight in _model().named_parameters()}
    ends = [0, *torch.tensor([shape.numel() for shape in shapes.values()]).cumsum(0).tolist()]
    parts = (weights[a:b] for a, b in pairwise(ends))
    named = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    return data.answer_loss(functional_call(_model(), named, (inputs,)), targets)


def _weighted_loss(weights: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    loss = _loss(weights, inputs, targets)
    return weight * loss, loss


def _groups(job: Job) -> list[slice]:
    """The replicas that agree on their gradients."""
    size = {"all": job.dp, "levels": job.dp, "none": 1, "node": max(job.dp // len(job.nodes), 1)}[job.together]
    return [slice(first, first + size) for first in range(0, job.dp, size)]


def _mean(gradients: Tensor, micro_batches: int) -> Tensor:
    """The mean over rows, in every row: all micro-batches are added up, one by one as a ring does, and then divided."""
    return (reduce(torch.add, gradients * micro_batches) / (micro_batches * len(gradients))).expand_as(gradients)


def _update(state: State, job: Job, gradient: Tensor) -> State:
    kept = torch.float32 if job.master_weights else torch.float16
    weights, mean, square = (part.to(kept, copy=True) for part in (state.weights, state.mean, state.square))
    updates = state.updates + 0
    adamw(
        [weights], [gradient.to(kept)], [mean], [square], [], [updates],
        amsgrad=False, beta1=0.9, beta2=0.99, lr=job.rate, weight_decay=0.01, eps=1e-8, maximize=False,
    )  # fmt: skip
    return state._replace(weights=weights.float(), mean=mean.float(), square=square.float(), updates=updates)


def _agree(state: State) -> State:
    """The outer step of DiLoCo: the mean of what the replicas have changed is a gradient for Nesterov's momentum."""
    progress = (state.anchor - state.weights).mean(0, keepdim=True).expand_as(state.weights)
    speed = OUTER_MOMENTUM * state.speed + progress
    weights = state.anchor - OUTER_RATE * (progress + OUTER_MOMENTUM * speed)
    return state._replace(weights=weights, anchor=weights, speed=speed)
