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

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms import batches
from course_lib.mechanisms.between_stages import Mail, Plan, plan_for
from course_lib.mechanisms.schedules import Action, Schedule
from course_lib.mechanisms.split_backward import WeightGradients, accumulators, input_gradients
from course_lib.timeline import compute


def run_schedule(
    schedule: Schedule,
    stage_modules: Sequence[nn.Module] | Mapping[int, nn.Module],
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    group: dist.ProcessGroup | None = None,
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
    loss_fn: loss_fn(output, targets) -> the mean over the samples, a scalar; the sum if loss_fn.reduction is "sum".
    work: of an action on each of this rank's stages, in the unit of the run's pace. None: one each.

    Returns the minibatch's loss on the rank of the last stage, None on the others. It and the gradients are exactly the
    whole minibatch's: means count by their number of samples. A parameter that several ranks hold (a tied embedding)
    gets on each the part of its gradient that arose there. A loss that is not finite is returned as it is.
    In the timeline F is "forward", B and I "backward", W "weight_grad"; a B takes as long as I and W.

    Raises ScheduleError for a schedule that cannot run; ValueError for a group of another size, a missing stage, too
    small a minibatch, and outputs that cannot be passed on.
    """
    plan = plan_for(tuple(map(tuple, schedule.actions)), _place(schedule, group))
    _check(plan, stage_modules, inputs, targets)
    mail = Mail(plan, group, _device(stage_modules[stage] for stage in plan.stages))
    rank = _Rank(plan, stage_modules, inputs, targets, loss_fn, mail, work or dict.fromkeys(plan.stages, 1.0))
    perform = {"F": rank.forward, "B": rank.backward, "I": rank.input_gradient, "W": rank.weight_gradient}
    with torch.enable_grad():
        for op, stage, micro_batch in plan.actions:
            perform[op](stage, micro_batch)
    mail.finish()
    return rank.loss


class _Rank:
    """The stages of this rank: performs actions, and holds what lies between a forward and its backward."""

    def __init__(
        self,
        plan: Plan,
        modules: Sequence[nn.Module] | Mapping[int, nn.Module],
        inputs: Any,
        targets: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        mail: Mail,
        work: Mapping[int, float],
    ) -> None:
        self.plan, self.modules, self.loss_fn, self.mail, self.work = plan, modules, loss_fn, mail, work
        self.loss: Tensor | None = None
        self.held: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}  # inputs, outputs
        self.unfinished: dict[tuple[int, int], WeightGradients] = {}
        m = plan.n_micro_batches
        if 0 in plan.stages:
            mail.samples = batches.size(inputs)
            self.inputs = batches.micro_batches(inputs, m)
        if plan.last in plan.stages:
            self.samples = batches.size(targets)
            self.targets = batches.micro_batches(targets, m)
        splitting = {action.stage for action in plan.actions if action.op == "I"}
        self.weights = {stage: accumulators(modules[stage].parameters()) for stage in splitting}

    def forward(self, stage: int, k: int) -> None:
        inputs = self.mail.fetch(Action("F", stage, k)) if stage else []
        with self._mark("forward", stage, k):
            module = self.modules[stage]
            output = module(*inputs) if stage else _call(module, self.inputs[k])
            outputs = [self._loss(output, k)] if stage == self.plan.last else _tensors(output, stage)
        differentiable = [tensor for tensor in inputs if tensor.requires_grad]
        self.held[stage, k] = differentiable, [tensor for tensor in outputs if tensor.requires_grad]
        if stage != self.plan.last:
            self.mail.send(Action("F", stage + 1, k), outputs)

    def backward(self, stage: int, k: int) -> None:
        gradients = self._gradients(stage, k)
        inputs, outputs = self.held.pop((stage, k))
        with self._mark("backward", stage, k, includes="weight_grad"):
            if outputs:
                torch.autograd.backward(outputs, gradients)
        self._send_back(stage, k, inputs, [tensor.grad for tensor in inputs])

    def input_gradient(self, stage: int, k: int) -> None:
        gradients = self._gradients(stage, k)
        inputs, outputs = self.held.pop((stage, k))
        with self._mark("backward", stage, k):
            found, self.unfinished[stage, k] = input_gradients(outputs, gradients, inputs, self.weights[stage])
        self._send_back(stage, k, inputs, found)

    def weight_gradient(self, stage: int, k: int) -> None:
        with self._mark("weight_grad", stage, k):
            self.unfinished.pop((stage, k)).accumulate()

    def _mark(self, kind: str, stage: int, k: int, includes: str = "") -> AbstractContextManager[None]:
        return compute(kind, micro_batch=k, stage=stage, work=self.work[stage], includes=includes)

    def _loss(self, output: Any, k: int) -> Tensor:
        """The loss of a micro-batch; its share of the minibatch's is added up on the way."""
        if self.mail.samples != self.samples:
            raise ValueError(f"inputs have {self.mail.samples} samples, targets {self.samples}; give as many of both")
        loss = self.loss_fn(output, self.targets[k])
        if not isinstance(loss, Tensor) or loss.dim():
            shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"loss_fn returned {shape}; it has to return a scalar tensor, the mean over the samples")
        part = loss.detach() * self._weight(k)
        self.loss = part if self.loss is None else self.loss + part
        return loss

    def _weight(self, k: int) -> float:
        is_sum = getattr(self.loss_fn, "reduction", "mean") == "sum"
        return 1.0 if is_sum else batches.size(self.targets[k]) / self.samples

    def _gradients(self, stage: int, k: int) -> list[Tensor]:
        if stage != self.plan.last:
            return self.mail.fetch(Action("B", stage, k))
        _, losses = self.held[stage, k]
        return [torch.full_like(loss, self._weight(k)) for loss in losses]

    def _send_back(self, stage: int, k: int, inputs: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
        if stage:  # who waits for the gradient of a tensor that was not used waits for zeros
            found = zip(inputs, gradients, strict=True)
            there = [torch.zeros_like(tensor) if gradient is None else gradient for tensor, gradient in found]
            self.mail.send(Action("B", stage - 1, k), there)


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


def _place(schedule: Schedule, group: dist.ProcessGroup | None) -> int:
    """This rank's number in the group, which has to be as large as the schedule."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"group does not contain rank {dist.get_rank()}; only its members may call this")
    if world_size != schedule.n_ranks:
        raise ValueError(f"schedule is for {schedule.n_ranks} ranks; the group has {world_size}, so build it for these")
    return rank


def _check(plan: Plan, modules: Sequence[nn.Module] | Mapping[int, nn.Module], inputs: Any, targets: Any) -> None:
    held = modules if isinstance(modules, Mapping) else range(len(modules))
    for stage in plan.stages:
        if stage not in held:
            raise ValueError(f"stage_modules lacks stage {stage}, which rank {plan.rank} holds; it has {list(held)}")
    for name, value, stage in (("inputs", inputs, 0), ("targets", targets, plan.last)):
        if value is None and stage in plan.stages:
            raise ValueError(f"{name} is None on rank {plan.rank}, which holds stage {stage}; give the minibatch there")


def _device(modules: Iterable[nn.Module]) -> torch.device:
    parameters = (parameter for module in modules for parameter in module.parameters())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))
