r"""Between the stages of a pipeline: what travels to whom, and how no rank waits for longer than it must.

Activations go down the pipeline, gradients come back. Two rules keep ranks from waiting for each other:

    send     hand the message over, and go on: it is on its way, or waits until somebody asks for it
    receive  ask each rank for its messages in the order in which it sends them, and ask for the next one before
             computing with this one, so that it travels meanwhile

    rank 0   F0 --> F1 --> F2 --> ...
                \      \      \           a message needs no label: the schedule, known to all, says which comes next
    rank 1      F0 <-- B0     F1 ...

Between two ranks, NCCL carries the messages of a group one after another, whichever way they go. Where each of two has
something for the other, both ways would wait for each other; so what goes to lower ranks has a group of its own there.
And a receive that waits on a GPU can hold up what the rank computes, and with it what its sender waits for: CUDA loads
a kernel when it is first used, which may have to wait until no other runs. So there a rank asks for a message only when
it needs it.

Dtype and shape are announced once, ahead of the first message from a stage to the next. After that only dimension 0
changes, with the number of samples in a micro-batch; a gradient has the dtype and shape of its activation.
"""

from __future__ import annotations

import pickle
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.mechanisms.groups import Group
from course_lib.schedules import Action, RankSchedule

ASK_AHEAD = ("cpu",)  # devices that compute while a receive waits
DESCRIPTION = 512  # bytes of the message that announces a format and the number of samples


class StageMessages:
    """Messages between this rank and others, and between two stages of this rank. Only `fetch` waits, for the message
    that it fetches, and `finish`.

    way_back: another group of the same ranks, for messages to lower ranks; None: they take the same group.
    samples: of the whole minibatch, on the rank that has its inputs; the others learn it with the first message.
    """

    def __init__(
        self, own: RankSchedule, group: Group, device: torch.device, samples: int, way_back: Group = None
    ) -> None:
        self.own, self.device, self.samples = own, device, samples
        self.group, self.way_back = group, way_back or group
        self.formats: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {}  # of each stage's input, without dimension 0
        self.awaited = {peer: deque(messages) for peer, messages in own.arriving.items()}
        self.upcoming = deque(own.fetching)
        self.arriving: dict[Action, tuple[Tensor, dist.Work | None]] = {}
        self.sending: dict[Action, list[tuple[dist.Work | None, Tensor]]] = {}

    def send(self, message: Action, tensor: Tensor) -> None:
        """Pass a tensor on to the stage that the message is for."""
        to = self.own.rank_of[message.stage]
        if to == self.own.rank:
            self.arriving[message] = tensor.detach(), None
            return
        if message.op == "F":
            self._describe(message, tensor, to)
        self._start_sending(message, tensor.detach().contiguous(), to)

    def fetch(self, message: Action) -> Tensor:
        """Wait for a message, and ask for the next one, if that can wait while the rank computes."""
        if message not in self.arriving:
            self._ask_for(message)
        tensor, work = self.arriving.pop(message)
        if work is not None:  # it comes from another rank
            work.wait()
            self.upcoming.popleft()
            self._free(self.own.used[message])
            if self.upcoming and self.device.type in ASK_AHEAD:
                self._ask_for(self.upcoming[0], only_if_known=True)
        return tensor

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        self._free(list(self.sending))

    def _free(self, messages: list[Action]) -> None:
        """Free messages that were sent. Before `finish` these are some that have been used by now, so nothing waits."""
        for message in messages:
            for work, _ in self.sending.pop(message, []):
                if work is not None:
                    work.wait()

    def _ask_for(self, message: Action, only_if_known: bool = False) -> None:
        """Start to receive the peer's messages, in the order in which it sends them, up to this one."""
        peer = self.own.rank_of[message.stage + (-1 if message.op == "F" else 1)]
        while message not in self.arriving:
            following = self.awaited[peer][0]
            if _receiver(following) not in self.formats:
                if only_if_known:
                    return
                self._read_description(following.stage, peer)
            tensor = self._memory_for(following)
            work = dist.irecv(tensor, group=self._group(peer, self.own.rank), group_src=peer)
            self.arriving[self.awaited[peer].popleft()] = tensor, work

    def _start_sending(self, message: Action, tensor: Tensor, to: int) -> None:
        work = dist.isend(tensor, group=self._group(self.own.rank, to), group_dst=to)
        self.sending.setdefault(message, []).append((work, tensor))

    def _describe(self, message: Action, tensor: Tensor, to: int) -> None:
        """Announce dtype and shape to the next stage, once."""
        if message.stage not in self.formats:
            self.formats[message.stage] = tensor.dtype, tuple(tensor.shape[1:])
            packed = pickle.dumps((self.samples, self.formats[message.stage])).ljust(DESCRIPTION)
            header = torch.tensor(list(packed), dtype=torch.uint8, device=self.device)
            self._start_sending(message, header, to)

    def _read_description(self, stage: int, peer: int) -> None:
        header = torch.empty(DESCRIPTION, dtype=torch.uint8, device=self.device)
        dist.recv(header, group=self._group(peer, self.own.rank), group_src=peer)
        self.samples, self.formats[stage] = pickle.loads(bytes(header.tolist()))  # which ends where its padding begins

    def _group(self, sender: int, receiver: int) -> Group:
        return self.group if sender < receiver else self.way_back

    def _memory_for(self, message: Action) -> Tensor:
        """An empty tensor for a message, as long as what `batches.micro_batches` gives its micro-batch."""
        dtype, shape = self.formats[_receiver(message)]
        size, larger = divmod(self.samples, self.own.n_micro_batches)
        length = size + (message.micro_batch < larger)
        return torch.empty(length, *shape, dtype=dtype, device=self.device)


def _receiver(message: Action) -> int:
    """The later of the two stages between which a message travels."""
    return message.stage if message.op == "F" else message.stage + 1
