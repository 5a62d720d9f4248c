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

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms import batches
from course_lib.mechanisms.schedules import Action, Schedule, messages_from, validate
from course_lib.mechanisms.split_backward import WeightGradients, input_gradients
from course_lib.timeline import compute


def run_schedule(
    schedule: Schedule,
    stage_modules: Sequence[nn.Module] | Mapping[int, nn.Module],
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    group: dist.ProcessGroup | None = None,
) -> Tensor | None:
    """One forward and backward pass over a minibatch; gradients are added to the parameters' `.grad`.

    All ranks of the group call this with the same schedule; rank r of the group runs `schedule.actions[r]`.

    stage_modules: a list of all stages, or a dict with those of this rank; others are not touched. A stage is
        called with what the one before it returned: a tensor, or a tuple of tensors as separate arguments. A tensor
        that has the samples along dimension 0 may change its length with the micro-batch, others keep their shape.
    inputs, targets: the whole minibatch, tensors or tuples or dicts of them, cut by `batches.micro_batches`. Only the
        rank of the first stage reads inputs (a tuple is given as arguments, a dict as keyword arguments), only that of
        the last stage reads targets. Elsewhere they may be None.
    loss_fn: loss_fn(output, targets) -> the mean loss over the samples of a micro-batch, a scalar.

    Returns the mean loss over the minibatch on the rank of the last stage, None on the others. It and the gradients
    are exactly the whole minibatch's: a micro-batch counts by its number of samples. A loss that is not finite is
    returned as it is, so that a loss scaler can look at it.

    In the timeline F is marked "forward", B and I "backward", W "weight_grad", with stage and micro-batch.

    Raises ScheduleError (a ValueError) for a schedule that cannot run and ValueError for a group of another size, a
    missing stage, a minibatch smaller than the schedule, and outputs that cannot be passed on.
    """
    plan = _plan(tuple(map(tuple, schedule.actions)), _place(schedule, group))
    _check(plan, stage_modules, inputs, targets)
    mail = _Mail(plan, group, _device(stage_modules[stage] for stage in plan.stages))
    rank = _Rank(plan, stage_modules, inputs, targets, loss_fn, mail)
    perform = {"F": rank.forward, "B": rank.backward, "I": rank.input_gradient, "W": rank.weight_gradient}
    with torch.enable_grad():
        for action in plan.actions:
            perform[action.op](action.stage, action.micro_batch)
    mail.finish()
    return rank.loss


class _Plan(NamedTuple):
    """What one rank has to know of a schedule.

    A message is named after the action that needs it: Action("F", s, k) are the inputs of stage s for micro-batch k,
    Action("B", s, k) the gradients of its outputs.
    """

    rank: int
    actions: tuple[Action, ...]
    stages: list[int]
    rank_of: dict[int, int]
    last: int  # stage
    n_micro_batches: int
    arriving: dict[int, list[Action]]  # messages from each other rank, in the order in which it sends them
    fetching: list[Action]  # the same messages, in the order in which this rank needs them


@lru_cache(maxsize=64)
def _plan(actions: tuple[tuple[Action, ...], ...], rank: int) -> _Plan:
    """Check a schedule, and find out who sends what to this rank; a training run asks for the same again and again."""
    schedule = Schedule([list(row) for row in actions])
    validate(schedule)
    arriving = {
        peer: [message for to, message in messages_from(schedule, peer) if to == rank]
        for peer in range(schedule.n_ranks)
        if peer != rank
    }
    remote = {message for messages in arriving.values() for message in messages}
    needed = (Action("F" if action.op == "F" else "B", action.stage, action.micro_batch) for action in actions[rank])
    fetching = [message for message in dict.fromkeys(needed) if message in remote]
    last, stages = schedule.n_stages - 1, schedule.stages_of(rank)
    m = schedule.n_micro_batches
    return _Plan(rank, actions[rank], stages, schedule.rank_of, last, m, arriving, fetching)


class _Rank:
    """The stages of this rank: performs actions, and holds what lies between a forward and its backward."""

    def __init__(
        self,
        plan: _Plan,
        modules: Sequence[nn.Module] | Mapping[int, nn.Module],
        inputs: Any,
        targets: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        mail: _Mail,
    ) -> None:
        self.plan, self.modules, self.loss_fn, self.mail = plan, modules, loss_fn, mail
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
        trainable = {stage: [p for p in modules[stage].parameters() if p.requires_grad] for stage in plan.stages}
        self.trainable = trainable

    def forward(self, stage: int, k: int) -> None:
        inputs = self.mail.fetch(Action("F", stage, k)) if stage else []
        with compute("forward", micro_batch=k, stage=stage):
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
        with compute("backward", micro_batch=k, stage=stage):
            if outputs:
                torch.autograd.backward(outputs, gradients)
        self._send_back(stage, k, inputs, [tensor.grad for tensor in inputs])

    def input_gradient(self, stage: int, k: int) -> None:
        gradients = self._gradients(stage, k)
        inputs, outputs = self.held.pop((stage, k))
        with compute("backward", micro_batch=k, stage=stage):
            found, self.unfinished[stage, k] = input_gradients(outputs, gradients, inputs, self.trainable[stage])
        self._send_back(stage, k, inputs, found)

    def weight_gradient(self, stage: int, k: int) -> None:
        with compute("weight_grad", micro_batch=k, stage=stage):
            self.unfinished.pop((stage, k)).accumulate()

    def _loss(self, output: Any, k: int) -> Tensor:
        """The loss of a micro-batch; its share of the minibatch's is added up on the way."""
        loss = self.loss_fn(output, self.targets[k])
        if not isinstance(loss, Tensor) or loss.dim():
            shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"loss_fn returned {shape}; it has to return a scalar tensor, the mean over the samples")
        if self.mail.samples != self.samples:
            raise ValueError(f"inputs have {self.mail.samples} samples, targets {self.samples}; give as many of both")
        part = loss.detach() * self._weight(k)
        self.loss = part if self.loss is None else self.loss + part
        return loss

    def _weight(self, k: int) -> float:
        return batches.size(self.targets[k]) / self.samples

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


class _Format(NamedTuple):
    """What a stage's input looks like: `shape` starts with -1 where that stands for a micro-batch's samples."""

    dtype: torch.dtype
    differentiable: bool
    shape: tuple[int, ...]


_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_HEADER = 64  # numbers that describe what is passed on: enough for a dozen tensors of three dimensions


class _Mail:
    """Messages between this rank and others, and between two stages of this rank.

    A sender never waits before `finish`. A receiver asks each peer for messages in the order in which the peer sends
    them, so they need no labels, and asks for its next one before it computes, so that it travels meanwhile.

    Only the first message from one stage to the next is preceded by a description; the others look alike.
    """

    def __init__(self, plan: _Plan, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.plan, self.group, self.device = plan, group, device
        self.samples = 0  # of the whole minibatch, as soon as it is known
        self.formats: dict[int, list[_Format]] = {}  # of each stage's inputs
        self.awaited = {peer: deque(messages) for peer, messages in plan.arriving.items()}
        self.upcoming = deque(plan.fetching)
        self.arriving: dict[Action, tuple[list[Tensor], list[dist.Work]]] = {}
        self.sending: list[tuple[dist.Work, Tensor]] = []

    def send(self, message: Action, tensors: list[Tensor]) -> None:
        """Pass tensors on to the stage that the message is for."""
        to = self.plan.rank_of[message.stage]
        if to == self.plan.rank:
            self.arriving[message] = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors], []
            return
        if message.op == "F":
            self._describe(message, tensors, to)
        for tensor in tensors:
            self._start_sending(tensor.detach().contiguous(), to)

    def fetch(self, message: Action) -> list[Tensor]:
        """Wait for a message, and ask for the next one."""
        if message not in self.arriving:
            self._ask_for(message)
        tensors, works = self.arriving.pop(message)
        for work in works:
            work.wait()
        if self.upcoming and self.upcoming[0] == message:
            self.upcoming.popleft()
            if message.op == "F":
                for tensor, form in zip(tensors, self.formats[message.stage], strict=True):
                    tensor.requires_grad_(form.differentiable)
            if self.upcoming and self.upcoming[0] not in self.arriving:
                self._ask_for(self.upcoming[0], only_if_known=True)
        return tensors

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for work, _ in self.sending:
            work.wait()

    def _ask_for(self, message: Action, only_if_known: bool = False) -> None:
        """Start to receive from a peer, in its order, until it was the message's turn."""
        peer = self.plan.rank_of[message.stage + (-1 if message.op == "F" else 1)]
        while message not in self.arriving:
            following = self.awaited[peer][0]
            if self._receiver(following) not in self.formats:
                if only_if_known:
                    return
                self._read_description(following.stage, peer)
            tensors = [self._empty(form, following.micro_batch) for form in self._formats_of(following)]
            works = [dist.irecv(tensor, group=self.group, group_src=peer) for tensor in tensors]
            self.arriving[self.awaited[peer].popleft()] = tensors, works

    def _receiver(self, message: Action) -> int:
        """The later one of the two stages between which a message travels."""
        return message.stage if message.op == "F" else message.stage + 1

    def _formats_of(self, message: Action) -> list[_Format]:
        formats = self.formats[self._receiver(message)]
        return formats if message.op == "F" else [form for form in formats if form.differentiable]

    def _empty(self, form: _Format, k: int) -> Tensor:
        return torch.empty(self._shape(form, k), dtype=form.dtype, device=self.device)

    def _shape(self, form: _Format, k: int) -> tuple[int, ...]:
        return tuple(self._size(k) if length == -1 else length for length in form.shape)

    def _size(self, k: int) -> int:
        """Samples in a micro-batch, as `batches.micro_batches` cuts them."""
        size, larger = divmod(self.samples, self.plan.n_micro_batches)
        return size + (k < larger)

    def _start_sending(self, tensor: Tensor, to: int) -> None:
        self.sending.append((dist.isend(tensor, group=self.group, group_dst=to), tensor))

    def _describe(self, message: Action, tensors: list[Tensor], to: int) -> None:
        """Tell the next stage what to expect, once; from then on, hold the outputs against it."""
        _, stage, k = message
        if stage not in self.formats:
            self.formats[stage] = [_format(tensor, self._size(k)) for tensor in tensors]
            self._start_sending(_header(self.samples, self.formats[stage], stage - 1).to(self.device), to)
        promised = [(form.dtype, form.differentiable, self._shape(form, k)) for form in self.formats[stage]]
        returned = [(tensor.dtype, tensor.requires_grad, tuple(tensor.shape)) for tensor in tensors]
        if returned != promised:
            raise ValueError(
                f"stage {stage - 1} returned {_words(returned)} for micro-batch {k}, where its first micro-batch makes "
                f"the next stage expect {_words(promised)}; only dimension 0 may change, with the number of samples"
            )

    def _read_description(self, stage: int, peer: int) -> None:
        header = torch.empty(_HEADER, dtype=torch.int64, device=self.device)
        dist.recv(header, group=self.group, group_src=peer)
        numbers = iter(header.tolist())
        self.samples, n_tensors = next(numbers), next(numbers)
        self.formats[stage] = [
            _Format(_DTYPES[next(numbers)], bool(next(numbers)), tuple(next(numbers) for _ in range(next(numbers))))
            for _ in range(n_tensors)
        ]


def _format(tensor: Tensor, samples: int) -> _Format:
    shape = tuple(tensor.shape)
    if shape[:1] == (samples,):
        shape = (-1, *shape[1:])
    return _Format(tensor.dtype, tensor.requires_grad, shape)


def _header(samples: int, formats: list[_Format], stage: int) -> Tensor:
    numbers = [samples, len(formats)]
    for dtype, differentiable, shape in formats:
        if dtype not in _DTYPES:
            raise ValueError(f"stage {stage} returned a tensor of {dtype}, which cannot be passed on; cast it first")
        numbers += [_DTYPES.index(dtype), differentiable, len(shape), *shape]
    if len(numbers) > _HEADER:
        raise ValueError(f"stage {stage} returned {len(formats)} tensors; pass on fewer, a dozen or less")
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)))


def _words(tensors: list[tuple[torch.dtype, bool, tuple[int, ...]]]) -> str:
    shown = (
        f"{dtype} {list(shape)}{'' if differentiable else ' without gradient'}"
        for dtype, differentiable, shape in tensors
    )
    return ", ".join(shown) or "nothing"


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


def _check(plan: _Plan, modules: Sequence[nn.Module] | Mapping[int, nn.Module], inputs: Any, targets: Any) -> None:
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
