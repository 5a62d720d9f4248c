"""What a student's function does on its rank, seen from below: the memory it takes and the tensors it sends.

torch shows every operation to a dispatch mode, those of torch.distributed included, so both are counted exactly
and come out the same in every run.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Sent(NamedTuple):
    """One message as it left. peer: the rank it went to; content: a copy."""

    peer: int
    content: Tensor


class Watch(TorchDispatchMode):
    """Watches the code inside `with Watch() as watch:`.

    peak: the most bytes of tensor memory held at one time beyond what was there before.
    sent: every message of send and isend, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.sent: list[Sent] = []
        self._communicated: set[int] = set()
        self._held = 0
        self._known: dict[int, object] = {}  # storages: by id, those from before and those still alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            self._known.setdefault(id(storage), storage)
        if func.namespace == "c10d":
            self._note(func, args)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._count(tensor.untyped_storage())
        return result

    def communicated(self, tensor: Tensor) -> bool:
        """Whether this tensor, or one that shares its memory, was part of a collective or a message."""
        return tensor.untyped_storage().data_ptr() in self._communicated

    def _note(self, func: Any, args: Any) -> None:
        self._communicated |= {tensor.untyped_storage().data_ptr() for tensor in _tensors(args)}
        if func is torch.ops.c10d.send.default:
            self.sent += [Sent(args[2], tensor.clone()) for tensor in args[0]]

    def _count(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._known:
            return
        self._known[id(storage)] = None
        self._held += storage.nbytes()
        self.peak = max(self.peak, self._held)
        weakref.finalize(storage, self._release, id(storage), storage.nbytes()).atexit = False

    def _release(self, key: int, size: int) -> None:
        self._held -= size
        del self._known[key]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
