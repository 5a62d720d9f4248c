"""The watch over a student's function on its rank: the memory that it takes and the tensors that it sends.

torch shows every operation to a dispatch mode, those of torch.distributed included, so both are counted exactly
and come out the same in every run.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Sent(NamedTuple):
    """The tensor passed to one operation. peer: the rank a message went to, -1 for a collective; content: a copy.

    group: the name of the process group.
    """

    operation: str
    peer: int
    content: Tensor
    group: str = ""


class Watch(TorchDispatchMode):
    """A watch over the code inside `with Watch() as watch:`.

    peak: the most bytes of tensor memory held at one time, beyond those held before.  fullest: the shapes of these
        tensors.
    sent: the tensors of every message sent and of every collective, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.fullest: list[list[int]] = []
        self.sent: list[Sent] = []
        self._held = 0
        # The tensors of the last two collectives: gloo releases its inputs a little later, at no fixed moment.
        self._given: deque[list[Tensor]] = deque(maxlen=2)
        self._known: dict[int, object] = {}  # by id: storages from before, and the shapes of new ones still alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            storage = tensor.untyped_storage()
            self._known.setdefault(id(storage), storage)
        if func.namespace == "c10d":
            self._note(func.__name__.partition(".")[0].strip("_"), args)
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._count(tensor, tensor.untyped_storage())
        return result

    def _note(self, operation: str, args: Any) -> None:
        peer = args[2] if operation == "send" else -1
        if not operation.startswith("recv"):  # an output comes before the input
            given = tensors_in(args[1]) or tensors_in(args[0])
            if operation != "send":
                self._given.append(given)
            boxes = [one for one in args if isinstance(one, torch.ScriptObject)]  # the first one is the group
            name = "".join(dist.ProcessGroup.unbox(one).group_name for one in boxes[:1])
            self.sent += [Sent(operation, peer, tensor.clone(), name) for tensor in given]

    def _count(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._known:
            return
        is_all = tensor.nbytes == storage.nbytes()  # the loss lies in what held the loss of each number
        self._known[id(storage)] = [*tensor.shape] if is_all else [storage.nbytes() // tensor.itemsize]
        self._held += storage.nbytes()
        if self._held > self.peak:
            self.peak, self.fullest = self._held, [one for one in self._known.values() if isinstance(one, list)]
        weakref.finalize(storage, self._release, id(storage), storage.nbytes()).atexit = False

    def _release(self, key: int, size: int) -> None:
        self._held -= size
        del self._known[key]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for one in inside for tensor in tensors_in(one)]
