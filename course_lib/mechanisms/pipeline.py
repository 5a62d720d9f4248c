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

    stage s      inputs (leaf)  ->  module  ->  outputs  | cut |  inputs (leaf) -> ...        stage s + 1
                 .grad          <-  backward(outputs, gradients)  <-  .grad of those inputs

Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms import batches
from course_lib.mechanisms.between_stages import StageMessages
from course_lib.mechanisms.groups import Group, rank_in
from course_lib.mechanisms.split_backward import WeightGradients, accumulators, input_gradients
from course_lib.schedules import Action, RankSchedule, Schedule, rank_schedule
from course_lib.timeline import compute

Modules = Sequence[Any] | Mapping[int, Any]  # nn.Modules, or other callables, by number of their stage


def run_schedule(
    schedule: Schedule,
    stage_modules: Modules,
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    group: Group = None,
    work: Mapping[int, float] | None = None,
) -> Tensor | None:
    """One forward and backward pass over a minibatch; gradients are added to the parameters' `.grad`.

    All ranks of the group call this; rank r of the group runs `schedule.actions[r]`.

    stage_modules: a list of all stages, or a dict with those of this rank; others are not touched. A stage is
        called with what the one before it returned: a tensor, or a tuple of tensors as separate arguments. A tensor
        that has the samples along dimension 0 may change its length with the micro-batch, others keep their shape.
    inputs, targets: the whole minibatch, tensors or tuples or dicts of them, cut by `batches.micro_batches`. Only the
        rank of the first stage reads inputs (a tuple is given as arguments, a dict as keyword arguments), only that of
        the last stage reads targets. Elsewhere they may be None.
    loss_fn: loss_fn(output, targets) -> the mean over the samples, a scalar; the sum if its `reduction` is "sum".
    work: of an action on each of this rank's stages, in the unit of the run's pace. None: one each.

    Returns the minibatch's loss on the rank of the last stage, None on the others. It and the gradients are exactly the
    whole minibatch's: means count by their number of samples. A parameter that several ranks hold (a tied embedding)
    gets on each the part of its gradient that arose there. A loss that is not finite is returned as it is.
    In the timeline F is "forward", B and I "backward", W "weight_grad"; a B takes as long as I and W.

    Raises ScheduleError for a schedule that cannot run; ValueError for a group of another size, a missing stage, too
    small a minibatch, and outputs that cannot be passed on.
    """
    own = rank_schedule(schedule, rank_for(schedule, group))
    _check_stages(own, stage_modules)
    messages = StageMessages(own, group, _device(stage_modules[stage] for stage in own.stages))
    minibatch = _Minibatch(inputs, targets, loss_fn, messages)
    runner = StageRunner(stage_modules, messages, minibatch.inputs, minibatch.loss, functools.partial(_mark, work))
    with torch.enable_grad():
        for action in own.actions:
            runner.perform(action)
    messages.finish()
    return minibatch.total


class StageRunner:
    """The stages of this rank: performs actions, and holds what lies between a forward and its backward.

    modules: of its stages, by number.
    inputs: the first stage's, for each micro-batch, on the rank that has it.
    loss_fn: loss_fn(output, k) -> the loss of micro-batch k, from what the last stage puts out; backward begins there.
    mark: mark(kind, stage, k, includes) -> a mark in the timeline, as `compute` makes them.
    """

    def __init__(
        self,
        modules: Modules,
        messages: StageMessages,
        inputs: Sequence[Any],
        loss_fn: Callable[[Any, int], Tensor],
        mark: Callable[[str, int, int, str], AbstractContextManager[None]],
    ) -> None:
        self.modules, self.messages, self.own = modules, messages, messages.own
        self.inputs, self.loss_fn, self.mark = inputs, loss_fn, mark
        self.in_flight: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}  # inputs, outputs
        self.unfinished: dict[tuple[int, int], WeightGradients] = {}
        splitting = {action.stage for action in self.own.actions if action.op == "I"}
        self.weights = {stage: accumulators(modules[stage].parameters()) for stage in splitting}

    def perform(self, action: Action) -> None:
        op, stage, k = action
        {"F": self.forward, "B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}[op](stage, k)

    def forward(self, stage: int, k: int) -> None:
        inputs = self.messages.fetch(Action("F", stage, k)) if stage else []
        with self.mark("forward", stage, k, ""):
            module = self.modules[stage]
            output = module(*inputs) if stage else _call(module, self.inputs[k])
            outputs = [self.loss_fn(output, k)] if stage == self.own.last else _tensors(output, stage)
        differentiable = [tensor for tensor in inputs if tensor.requires_grad]
        self.in_flight[stage, k] = differentiable, [tensor for tensor in outputs if tensor.requires_grad]
        if stage != self.own.last:
            self.messages.send(Action("F", stage + 1, k), outputs)

    def backward(self, stage: int, k: int) -> None:
        gradients = self._gradients(stage, k)
        inputs, outputs = self.in_flight.pop((stage, k))
        with self.mark("backward", stage, k, "weight_grad"):
            if outputs:
                torch.autograd.backward(outputs, gradients)
        self._send_back(stage, k, inputs, [tensor.grad for tensor in inputs])

    def input_gradient(self, stage: int, k: int) -> None:
        gradients = self._gradients(stage, k)
        inputs, outputs = self.in_flight.pop((stage, k))
        with self.mark("backward", stage, k, ""):
            found, self.unfinished[stage, k] = input_gradients(outputs, gradients, inputs, self.weights[stage])
        self._send_back(stage, k, inputs, found)

    def weight_gradient(self, stage: int, k: int) -> None:
        with self.mark("weight_grad", stage, k, ""):
            self.unfinished.pop((stage, k)).accumulate()

    def set_loss(self, k: int, loss: Tensor) -> None:
        """Let the backward pass of a micro-batch begin at this loss, which was made elsewhere."""
        inputs, _ = self.in_flight[self.own.last, k]
        self.in_flight[self.own.last, k] = inputs, [loss] if loss.requires_grad else []

    def _gradients(self, stage: int, k: int) -> Sequence[Tensor | None]:
        if stage != self.own.last:
            return self.messages.fetch(Action("B", stage, k))
        _, losses = self.in_flight[stage, k]
        return [None for _ in losses]  # a scalar's is 1

    def _send_back(self, stage: int, k: int, inputs: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
        if stage:  # who waits for the gradient of a tensor that was not used waits for zeros
            found = zip(inputs, gradients, strict=True)
            there = [torch.zeros_like(tensor) if gradient is None else gradient for tensor, gradient in found]
            self.messages.send(Action("B", stage - 1, k), there)


class _Minibatch:
    """A minibatch in micro-batches; each one's share of the loss is added up on the way, to the `total`."""

    def __init__(self, inputs: Any, targets: Any, loss_fn: Callable[[Any, Any], Tensor], messages: StageMessages):
        self.loss_fn, self.messages = loss_fn, messages
        self.inputs: list[Any] = []
        self.total: Tensor | None = None
        own, m = messages.own, messages.own.n_micro_batches
        if 0 in own.stages:
            messages.samples = batches.size(inputs)
            self.inputs = batches.micro_batches(inputs, m)
        if own.last in own.stages:
            self.samples = batches.size(targets)
            self.targets = batches.micro_batches(targets, m)

    def loss(self, output: Any, k: int) -> Tensor:
        """The share of a micro-batch in the minibatch's loss: a mean counts by its number of samples."""
        if self.messages.samples != self.samples:
            given = self.messages.samples
            raise ValueError(f"inputs have {given} samples, targets {self.samples}; give as many of both")
        loss = self.loss_fn(output, self.targets[k])
        if not isinstance(loss, Tensor) or loss.dim():
            shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"loss_fn returned {shape}; it has to return a scalar tensor, the mean over the samples")
        bound = self.loss_fn.keywords if isinstance(self.loss_fn, functools.partial) else {}
        is_sum = "sum" in (bound.get("reduction"), getattr(self.loss_fn, "reduction", None))
        share = loss if is_sum else loss * (batches.size(self.targets[k]) / self.samples)
        self.total = share.detach() if self.total is None else self.total + share.detach()
        return share


def _mark(
    work: Mapping[int, float] | None, kind: str, stage: int, k: int, includes: str
) -> AbstractContextManager[None]:
    return compute(kind, micro_batch=k, stage=stage, work=work[stage] if work else 1.0, includes=includes)


def _tensors(output: Any, stage: int) -> list[Tensor]:
    tensors = list(output) if isinstance(output, (tuple, list)) else [output]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"stage {stage} returned a {type(tensor).__name__}; return a tensor or a tuple of tensors")
    return tensors


def _call(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, (tuple, list)) else module(inputs)


def rank_for(schedule: Schedule, group: Group) -> int:
    """This rank's number in the group, which has to be as large as the schedule."""
    rank, world_size = rank_in(group), dist.get_world_size(group)
    if world_size != schedule.n_ranks:
        raise ValueError(f"schedule is for {schedule.n_ranks} ranks; the group has {world_size}, so build it for these")
    return rank


def _check_stages(own: RankSchedule, modules: Modules) -> None:
    held = modules if isinstance(modules, Mapping) else range(len(modules))
    for stage in own.stages:
        if stage not in held:
            raise ValueError(f"stage_modules lacks stage {stage}, which rank {own.rank} holds; it has {list(held)}")


def _device(modules: Iterable[nn.Module]) -> torch.device:
    parameters = (parameter for module in modules for parameter in module.parameters())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))
