"""Pipeline parallelism: each rank holds some stages of the model, and micro-batches flow through them.

    rank 0   F0 F1 F2          B0    B1    B2         a stage passes its micro-batch on and starts the next at once
    rank 1      F0 F1    B0 F2 B1    B2
    rank 2         F0 B0 F1 B1 F2 B2
              |  ^
              v  |  down go activations, outputs of one stage and inputs of the next; back come their gradients

What is done in which order is the schedule's business (see `schedules`); `run_schedule` does it. A rank takes its
actions one by one: fetch what the action needs, compute, send the result to whoever needs it, never waiting for it
to arrive. Each stage sees its piece of the model alone: between stages the graph of autograd is cut, and the gradient
that comes back continues it.

    stage s      input (leaf)  ->  module  ->  output  | cut |  input (leaf)  -> ...        stage s + 1
                 .grad         <-  output.backward(gradient)  <-  .grad of that input

Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.mechanisms import batches, guards
from course_lib.mechanisms.between_stages import StageMessages
from course_lib.mechanisms.groups import Group
from course_lib.mechanisms.split_backward import WeightGradients
from course_lib.schedules import Action, RankSchedule, Schedule, rank_schedule
from course_lib.timeline import compute


def run_schedule(
    schedule: Schedule,
    stage_modules: Sequence[nn.Module] | Mapping[int, nn.Module],
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    group: Group = None,
    weigh: Callable[[Any], float] = batches.size,
    work: Mapping[int, float] | None = None,
    way_back: Group = None,
) -> Tensor | None:
    """One forward and backward pass over a minibatch; gradients are added to the parameters' `.grad`.

    All ranks of the group call this; rank r of the group runs `schedule.actions[r]`.

    stage_modules: a list of all stages, or a dict with those of this rank; others are not touched. A stage takes what
        the one before it returned: one tensor of floating-point numbers, with the samples along dimension 0.
    inputs, targets: the whole minibatch, cut by `batches.micro_batches`. Only the rank of the first stage reads inputs,
        only that of the last stage reads targets. Elsewhere they may be None.
    loss_fn: loss_fn(output, targets) -> the mean over a micro-batch, a scalar. A sum would come out wrong.
    weigh: weigh(targets) -> how many that mean is over, by which it counts in the minibatch's: samples, if each counts
        alike. With padding left out (`ignore_index`) count tokens: weigh=lambda targets: int((targets != -100).sum()).
    work: of an action on each of this rank's stages, in the unit of the run's pace. None: one each.
    way_back: with NCCL, a second group of the same ranks, see `between_stages`; gloo needs none.

    Returns the minibatch's loss on the rank of the last stage, None on the others. With loss_fn and weigh as said, it
    and the gradients are exactly those of the whole minibatch at once. A parameter that several ranks hold (a tied
    embedding) gets on each the part of its gradient that arose there. A loss that is not finite is returned as it is.
    In the timeline F is "forward", B and I "backward", W "weight_grad"; a B takes as long as I and W.

    Raises ScheduleError for a schedule that cannot run; ValueError for a group of another size and too few samples.
    """
    own = rank_schedule(schedule, guards.rank_for(schedule.n_ranks, group))
    modules = {stage: stage_modules[stage] for stage in own.stages}
    minibatch = _Minibatch(own, inputs, targets, loss_fn, weigh)
    messages = StageMessages(own, group, _device(nn.ModuleList(modules.values())), minibatch.samples, way_back)
    runner = StageRunner(own, modules, messages, minibatch, work or dict.fromkeys(own.stages, 1.0))
    with torch.enable_grad():
        runner.run()
    return minibatch.loss


@dataclass
class StageRunner:
    """The stages of this rank: performs its actions, and holds what lies between a forward and its backward."""

    own: RankSchedule
    modules: Mapping[int, nn.Module]
    messages: StageMessages
    minibatch: _Minibatch
    work: Mapping[int, float]

    def __post_init__(self) -> None:
        self.in_flight: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # inputs and outputs
        self.later = {(stage, k): WeightGradients() for op, stage, k in self.own.actions if op == "W"}

    def run(self) -> None:
        perform: dict[str, Callable[[int, int], None]] = {
            "F": self.forward,
            "B": self.backward,
            "I": partial(self.backward, includes=""),
            "W": self.weight_gradient,
        }
        for op, stage, k in self.own.actions:
            perform[op](stage, k)
        self.messages.finish()

    def forward(self, stage: int, k: int) -> None:
        x = self.messages.fetch(Action("F", stage, k)).requires_grad_() if stage else self.minibatch.inputs[k]
        with self._mark("forward", stage, k), self.later.get((stage, k), nullcontext()):
            output = self.modules[stage](x)
            if stage == self.own.last:
                output = self.minibatch.share_of_loss(output, k)
        self.in_flight[stage, k] = x, output
        if stage != self.own.last:
            self.messages.send(Action("F", stage + 1, k), output)

    def backward(self, stage: int, k: int, includes: str = "weight_grad") -> None:
        gradient = None if stage == self.own.last else self.messages.fetch(Action("B", stage, k))  # the loss's is 1
        x, output = self.in_flight.pop((stage, k))
        with self._mark("backward", stage, k, includes):
            if output.requires_grad:  # not if all stages so far are frozen
                output.backward(gradient)
        if stage:  # and if the input was not used, the stage before still waits for a gradient, which is zero
            self.messages.send(Action("B", stage - 1, k), torch.zeros_like(x) if x.grad is None else x.grad)

    def weight_gradient(self, stage: int, k: int) -> None:
        with self._mark("weight_grad", stage, k):
            self.later.pop((stage, k)).accumulate()

    def _mark(self, kind: str, stage: int, k: int, includes: str = "") -> AbstractContextManager[None]:
        return compute(kind, micro_batch=k, stage=stage, work=self.work[stage], includes=includes)


class _Minibatch:
    """The micro-batches' inputs on the rank of the first stage; targets, and the loss so far, on that of the last."""

    def __init__(
        self, own: RankSchedule, inputs: Any, targets: Any, loss_fn: Callable[[Any, Any], Tensor], weigh: Any
    ) -> None:
        self.loss_fn, self.weigh, self.loss = loss_fn, weigh, None
        self.samples = 0  # of all micro-batches, known to the first stage
        if 0 in own.stages:
            self.samples = batches.size(inputs)
            self.inputs = batches.micro_batches(inputs, own.n_micro_batches)
        if own.last in own.stages:
            self.targets, self.weight = batches.micro_batches(targets, own.n_micro_batches), weigh(targets)

    def share_of_loss(self, output: Any, k: int) -> Tensor:
        """A micro-batch's share of the minibatch's loss: its mean, weighted by how many targets it is a mean over."""
        loss = self.loss_fn(output, self.targets[k])
        share = loss * (self.weigh(self.targets[k]) / self.weight)
        self.loss = share.detach() if self.loss is None else self.loss + share.detach()
        return share


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
