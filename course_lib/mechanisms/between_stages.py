r"""Between the stages of a pipeline: what travels to whom, and how nobody waits for longer than they must.

Activations go down the pipeline, gradients come back. Two rules keep ranks from waiting for each other:

    send     hand the message over, and go on: it is on its way, or waits until somebody asks for it
    receive  ask each rank for its messages in the order in which it sends them, and ask for the next one before
             computing with this one, so that it travels meanwhile

    rank 0   F0 --> F1 --> F2 --> ...
                \      \      \           a message needs no label: the schedule, known to all, says which comes next
    rank 1      F0 <-- B0     F1 ...

What a message looks like (how many tensors, of which dtype and shape) is told once, ahead of the first one from a
stage to the next. After that only dimension 0 may change, with the number of samples in a micro-batch.
"""

from __future__ import annotations

import pickle
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.mechanisms.groups import Group
from course_lib.schedules import Action, RankSchedule


class StageMessages:
    """Messages between this rank and others, and between two stages of this rank. Nothing waits here but `fetch`, for
    what it fetches, and `finish`.

    formats: of each stage's inputs, as far as they are known from an earlier pass; they are added to. None: no stage's.
    """

    def __init__(self, own: RankSchedule, group: Group, device: torch.device, formats: Formats | None = None) -> None:
        self.own, self.group, self.device = own, group, device
        self.formats: Formats = {} if formats is None else formats
        self.samples = 0  # of the whole minibatch, as soon as it is known
        self.awaited = {peer: deque(messages) for peer, messages in own.arriving.items()}
        self.upcoming = deque(own.fetching)
        self.arriving: dict[Action, tuple[list[Tensor], list[dist.Work]]] = {}
        self.sending: dict[Action, list[tuple[dist.Work, Tensor]]] = {}

    def send(self, message: Action, tensors: list[Tensor]) -> None:
        """Pass tensors on to the stage that the message is for."""
        to = self.own.rank_of[message.stage]
        if to == self.own.rank:
            self.arriving[message] = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors], []
            return
        if message.op == "F":
            self._describe(message, tensors, to)
        for tensor in tensors:
            self._start_sending(message, tensor.detach().contiguous(), to)

    def fetch(self, message: Action) -> list[Tensor]:
        """Wait for a message, and ask for the next one."""
        if message not in self.arriving:
            self._ask_for(message)
        tensors, works = self.arriving.pop(message)
        for work in works:
            work.wait()
        if self.upcoming and self.upcoming[0] == message:  # it came from another rank
            self.upcoming.popleft()
            self._let_go(self.own.used[message])
            if message.op == "F":
                for tensor, form in zip(tensors, self.formats[message.stage], strict=True):
                    tensor.requires_grad_(form.differentiable)
            if self.upcoming:
                self._ask_for(self.upcoming[0], only_if_known=True)
        return tensors

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        self._let_go(list(self.sending))

    def _let_go(self, messages: list[Action]) -> None:
        """Free what was sent; before `finish` only what has been used by now, so that nothing is waited for."""
        for message in messages:
            for work, _ in self.sending.pop(message, []):
                work.wait()

    def _ask_for(self, message: Action, only_if_known: bool = False) -> None:
        """Start to receive from a peer, in its order, until it was the message's turn."""
        peer = self.own.rank_of[message.stage + (-1 if message.op == "F" else 1)]
        while message not in self.arriving:
            following = self.awaited[peer][0]
            if self._receiver(following) not in self.formats:
                if only_if_known:
                    return
                self._read_description(following.stage, peer)
            tensors = [torch.empty(f.shape, dtype=f.dtype, device=self.device) for f in self._formats_of(following)]
            works = [dist.irecv(tensor, group=self.group, group_src=peer) for tensor in tensors]
            self.arriving[self.awaited[peer].popleft()] = tensors, [work for work in works if work is not None]

    def _receiver(self, message: Action) -> int:
        """The later one of the two stages between which a message travels."""
        return message.stage if message.op == "F" else message.stage + 1

    def _formats_of(self, message: Action) -> list[_Format]:
        forms = [form.of(self._size(message.micro_batch)) for form in self.formats[self._receiver(message)]]
        return forms if message.op == "F" else [form for form in forms if form.differentiable]

    def _size(self, k: int) -> int:
        """Samples in a micro-batch, as `batches.micro_batches` cuts them."""
        size, larger = divmod(self.samples, self.own.n_micro_batches)
        return size + (k < larger)

    def _start_sending(self, message: Action, tensor: Tensor, to: int) -> None:
        work = dist.isend(tensor, group=self.group, group_dst=to)
        assert work is not None  # as it would be outside the group
        self.sending.setdefault(message, []).append((work, tensor))

    def _describe(self, message: Action, tensors: list[Tensor], to: int) -> None:
        """Tell the next stage what to expect, once; from then on, hold the outputs against it."""
        _, stage, k = message
        if stage not in self.formats:
            self.formats[stage] = [_format(tensor, self._size(k)) for tensor in tensors]
            header = _header(self.samples, self.formats[stage], stage - 1)
            self._start_sending(message, header.to(self.device), to)
        promised = self._formats_of(message)
        returned = [_Format(tensor.dtype, tensor.requires_grad, tuple(tensor.shape)) for tensor in tensors]
        if returned != promised:
            raise ValueError(
                f"stage {stage - 1} returned {_words(returned)} for micro-batch {k}, where its first micro-batch makes "
                f"the next stage expect {_words(promised)}; only dimension 0 may change, with the number of samples"
            )

    def _read_description(self, stage: int, peer: int) -> None:
        header = torch.empty(_HEADER, dtype=torch.uint8, device=self.device)
        dist.recv(header, group=self.group, group_src=peer)
        self.samples, self.formats[stage] = pickle.loads(bytes(header.tolist()))  # which ends where its padding begins


class _Format(NamedTuple):
    """What a tensor between stages looks like: `shape` starts with -1 where that stands for a micro-batch's samples."""

    dtype: torch.dtype
    differentiable: bool
    shape: tuple[int, ...]

    def of(self, samples: int) -> _Format:
        """The same in a micro-batch of so many samples."""
        return self._replace(shape=tuple(samples if length == -1 else length for length in self.shape))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}{'' if self.differentiable else ' without gradient'}"


Formats = dict[int, list[_Format]]
_HEADER = 512  # bytes that describe what is passed on: enough for a dozen tensors of three dimensions


def _format(tensor: Tensor, samples: int) -> _Format:
    shape = tuple(tensor.shape)
    if shape[:1] == (samples,):
        shape = (-1, *shape[1:])
    return _Format(tensor.dtype, tensor.requires_grad, shape)


def _header(samples: int, formats: list[_Format], stage: int) -> Tensor:
    packed = pickle.dumps((samples, formats))
    if len(packed) > _HEADER:
        raise ValueError(f"stage {stage} returned {len(formats)} tensors; pass on fewer, a dozen or less")
    return torch.tensor(list(packed.ljust(_HEADER)), dtype=torch.uint8)


def _words(tensors: list[_Format]) -> str:
    return ", ".join(map(str, tensors)) or "nothing"
