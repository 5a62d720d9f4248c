"""The training of a job: a small model is really trained, with the job's replicas, minibatch, recipe and data.

All replicas train in one process, side by side in tensors with a row for each that differs, in mixed precision:

    weights in float16 -> loss of each replica -> gradients x scale, in float16 -> added up -> / scale -> AdamW

One step of this training stands for all steps between two reports of the job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache, reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.adamw import adamw

from course_lib import data
from course_lib.classroom.runs.training import SMALL, flat
from course_lib.classroom.scenarios.jobs.job import Job
from course_lib.mechanisms.loss_scaling import LossScaler
from course_lib.model import TinyGPT

GROWTH = 40  # good steps after which the scale grows: few, since a short training stands for a long one
LOCAL = 10  # steps between two outer ones
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9  # of Douillard et al. 2023, DiLoCo: Nesterov over the replicas' mean progress
BROKEN = 2.0**10  # the weight of samples in a broken shard, where 1 is right
WRONG, LANES = -16, 3  # a stuck sign and a stuck exponent bit, in every third number
KEPT = 600  # steps that are not trained again: what nights have in common is trained once


@dataclass(frozen=True, eq=False)
class State:
    """The content of a checkpoint. Tensors have a row for each group of equal replicas.

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

    def rows(self, count: int) -> State:
        """The same with so many rows, if it has fewer."""
        parts = (self.weights, self.mean, self.square, self.anchor, self.speed)
        weights, mean, square, anchor, speed = (_spread(part, count) for part in parts)
        return State(weights, mean, square, self.updates, anchor, speed, self.scale, self.good)


class Learned(NamedTuple):
    """One step's report. loss: the replicas' mean.  norm: of the gradient that replica 0 applied.

    own: each replica's gradient norm before any sum.  scale: of the loss.  is_skipped: whether there was no update.
    moved: the size of replica 0's update, as a share of its weights.
    """

    loss: float
    norm: float
    own: list[float]
    scale: float
    is_skipped: bool
    moved: float


@cache
def _model() -> TinyGPT:
    return TinyGPT(SMALL)


@cache
def begin() -> State:
    weights = flat(_model().parameters())[None]
    zeros = torch.zeros_like(weights)
    return State(weights, zeros, zeros, torch.zeros(()), weights, zeros, 2.0**16, 0)


@lru_cache(maxsize=KEPT)
def advance(state: State, job: Job, step: int) -> tuple[State, Learned]:
    """Take one step by the job's recipe."""
    scaler = LossScaler(job.fixed or state.scale, job.fixed is None, GROWTH)
    scaler.finite_in_a_row = state.good
    sent, losses = gradients(state, job, minibatch(job, step), scaler.scale_factor)
    groups = sent.to(job.sums).unflatten(0, (_groups(job), -1))
    state = state.rows(len(groups))
    weights = state.weights.clone()
    weights.grad = _spread(torch.stack([_mean(group, job.micro_batches) for group in groups]).float(), len(weights))
    scale = scaler.scale_factor
    is_finite = scaler.unscale_and_update([weights])
    norms = (sent.float().norm(dim=1) / scale).tolist()
    after = _update(state, job, weights.grad) if is_finite else state
    moved = ((after.weights[0] - weights[0]).norm() / weights[0].norm()).item()
    report = Learned(losses.mean().item(), weights.grad[0].norm().item(), norms, scale, not is_finite, moved)
    if agrees_on_weights(job, step):
        after = _agree(after)
    return replace(after, scale=scaler.scale_factor, good=scaler.finite_in_a_row), report


def gradients(state: State, job: Job, batch: tuple[Tensor, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Each replica's gradient of its share, scaled and in 16 bits, and its loss."""
    inputs, targets, weight = batch
    weights = _spread(state.weights.half().float(), job.dp).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        losses = vmap(_loss)(weights, inputs, targets)
    (gradient,) = torch.autograd.grad(weight @ losses, weights)
    sent = (gradient * scale).half()
    if job.corrupt is not None:
        sent[job.corrupt // (job.pp * job.tp), ::LANES] *= WRONG
    return sent, losses.detach()


@lru_cache(maxsize=KEPT)
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
    if job.bad and torch.rand((), generator=random) < job.bad[1]:
        weight[job.bad[0]] = BROKEN
    return inputs[drawn], targets[drawn], weight


@cache
def _problems() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Examples to train on, in the order of their numbers, and held-out ones."""
    train, test = data.train_test_split()
    return data.examples(train), data.examples(test[::3])


def _loss(weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss on the answers, as `data.answer_loss` has it, in operations that `vmap` knows."""
    shapes = {name: weight.shape for name, weight in _model().named_parameters()}
    parts = weights.split([shape.numel() for shape in shapes.values()])
    named = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    likely = functional_call(_model(), named, (inputs,))[:, -data.ANSWER :].log_softmax(-1)
    return -likely.gather(-1, targets[:, -data.ANSWER :, None]).mean()


def _groups(job: Job) -> int:
    """The number of groups of replicas that agree on their gradients."""
    return min({"node": job.nodes, "local": job.nodes, "none": job.dp}.get(job.together, 1), job.dp)


def _spread(rows: Tensor, count: int) -> Tensor:
    return rows.repeat_interleave(count // len(rows), 0) if count > len(rows) else rows


def _mean(gradients: Tensor, micro_batches: int) -> Tensor:
    """The mean over rows: all micro-batches are added up, one by one as a ring does, and then divided."""
    return reduce(torch.add, gradients * micro_batches) / (micro_batches * len(gradients))


def _update(state: State, job: Job, gradient: Tensor) -> State:
    kept = torch.float32 if job.master_weights else torch.bfloat16
    weights, mean, square = (part.to(kept, copy=True) for part in (state.weights, state.mean, state.square))
    updates = state.updates + 0
    adamw(
        [weights], [gradient.to(kept)], [mean], [square], [], [updates],
        amsgrad=False, beta1=0.9, beta2=0.99, lr=job.rate, weight_decay=0.01, eps=1e-8, maximize=False,
    )  # fmt: skip
    return replace(state, weights=weights.float(), mean=mean.float(), square=square.float(), updates=updates)


def agrees_on_weights(job: Job, step: int) -> bool:
    return job.together == "local" and (step + 1) % LOCAL == 0


def _agree(state: State) -> State:
    """The outer step of DiLoCo: the mean of what the replicas have changed is a gradient for Nesterov's momentum."""
    progress = (state.anchor - state.weights).mean(0, keepdim=True).expand_as(state.weights)
    speed = OUTER_MOMENTUM * state.speed + progress
    weights = state.anchor - OUTER_RATE * (progress + OUTER_MOMENTUM * speed)
    return replace(state, weights=weights, anchor=weights, speed=speed)
