"""A process group that notes every operation before it passes it on.

`dist.all_reduce`, DistributedDataParallel, fully_shard and pipelining all end in the methods of a
`ProcessGroup`, so this is the one place where everything can be seen:

    student's code, DDP, FSDP  ->  TracedGroup  ->  gloo or NCCL
                                      |
                      the board (now) and the trace (afterwards)
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks import layouts, named_ranks
from course_lib.ranks.board import Operation, group_hash
from course_lib.ranks.tracer import Tracer, clock, torch_calls

_FOREVER = timedelta(days=1)  # the parent ends a run that hangs, not the process group


class TracedWork(dist.Work):
    """A handle that notes when its rank begins to wait for an operation and when that ends."""

    def __init__(self, tracer: Tracer, op: Operation, inner: Any, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.tracer, self.op, self.inner, self.tensors = tracer, op, inner, tensors
        self.started = tracer.steps
        if _is_by_hand():
            tracer.unclaimed[op.number] = self
        if op.is_async and not op.is_message:
            with contextlib.suppress(RuntimeError):  # gloo has no future for a reduce-scatter
                inner.get_future().add_done_callback(self._note_completion)

    def _claim(self) -> None:
        """Somebody waits for it, or will."""
        self.tracer.unclaimed.pop(self.op.number, None)

    def _note_completion(self, _: Any) -> None:
        if not self.op.ended and not self.op.blocked:
            self.op.ended = clock()
            self.tracer.board.mark_ended(self.tracer.rank, self.op)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._claim()
        if self.op.blocked:
            return True
        tracer, op, done = self.tracer, self.op, self.op.ended
        tracer.block(op, self.started)
        op.ended = 0.0
        if self.inner is not None:
            self.inner.wait()
            if op.name == "recv_any_source":
                self._note_sender()
            if tracer.device is not None:
                torch.cuda.current_stream().synchronize()
        if tracer.emulated:
            tracer.emulated.finish(op)
        tracer.finish(op)
        if done:
            op.ended = done
        return True

    def _note_sender(self) -> None:
        op, tracer = self.op, self.tracer
        op.peer = op.member_ranks()[self.inner._source_rank()]
        key = (op.group, "recv", op.peer, op.tag)
        op.order = tracer.orders[key]
        tracer.orders[key] += 1

    def is_completed(self) -> bool:
        if self.tracer.emulated:
            return self.wait()
        completed = self.inner is None or self.inner.is_completed()
        if completed and not self.op.is_message:
            self._claim()
        return completed

    def get_future(self) -> Any:
        self._claim()
        self.op.handed_on = True
        self.tracer.board.write(self.tracer.rank, self.op)
        if self.tracer.emulated:
            self.tracer.emulated.wait_unseen(self)
        return self.inner.get_future()

    def result(self) -> list[torch.Tensor]:
        return self.inner.result()

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        return self.inner._source_rank()


# How students know it, and which argument holds this rank's own part of the data.
_COLLECTIVES: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 0),
    "_reduce_scatter_base": ("reduce_scatter", 0),
    "reduce_scatter_single": ("reduce_scatter", 0),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "barrier": ("barrier", None),
}


_REDUCTIONS = {op.value: name for name, op in dist.ReduceOp.RedOpType.__members__.items()}


def ring_bytes(name: str, n_bytes: int, position: int, n: int) -> int:
    """Bytes one rank sends in a collective on n ranks.

    n_bytes: size of this rank's own tensor (its input; for reduce_scatter and scatter its output).
    position: distance from the root along the ring, 0 for the root.
    Patarasuk and Yuan 2009 for the ring all-reduce; a rooted collective passes whole tensors along a chain.
    """
    last = n - 1
    return {
        "all_reduce": 2 * last * n_bytes // n,
        "all_gather": last * n_bytes,
        "reduce_scatter": last * n_bytes,
        "all_to_all": last * n_bytes // n,
        "broadcast": n_bytes if position < last else 0,
        "reduce": n_bytes if position else 0,
        "gather": n_bytes if position else 0,
        "scatter": 0 if position else last * n_bytes,
        "barrier": 0,
    }[name]


class TracedGroup(dist.ProcessGroup):
    """A process group that traces its operations and has `inner` carry them out."""

    def __init__(self, tracer: Tracer, inner: dist.ProcessGroup, name: str, ranks: list[int]) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.tracer, self.inner, self.ranks, self.place = tracer, inner, ranks, inner.rank()
        self.hash = group_hash(name)
        self.members = sum(1 << rank for rank in ranks)

    def getBackendName(self) -> str:  # the name that torch looks for
        return "traced"

    def _set_group_name(self, name: Any) -> None:
        self.inner._set_group_name(name)

    @property
    def group_name(self) -> Any:
        return self.inner.group_name

    def getGroupName(self) -> str:  # the same for C++
        return self.inner.group_name

    @property
    def _device_types(self) -> list[torch.device]:
        return self.inner._device_types

    def _get_backend(self, device: torch.device) -> Any:
        return self.inner._get_backend(device)

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int = 0) -> TracedWork:
        named_ranks.check(self, "send", group_rank=destination)
        op = self._message(_called("send"), tensors, self.ranks[destination], tag)
        self.tracer.post(op, (self.hash, "send", op.peer, tag))
        return self._start(op, tensors, lambda: self.inner.send(layouts.packed(tensors), destination, tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> TracedWork:
        named_ranks.check(self, "recv", group_rank=source)
        op = self._message(_called("recv"), tensors, self.ranks[source], tag)
        self.tracer.post(op, (self.hash, "recv", op.peer, tag))
        return self._start(op, tensors, lambda: layouts.carry_out(self.inner.recv, op.name, tensors, source, tag))

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> TracedWork:
        op = self._message("recv_any_source", tensors, -1, tag)
        self.tracer.post(op, (self.hash, "recv_any_source", tag))
        return self._start(op, tensors, lambda: layouts.carry_out(self.inner.recv_anysource, op.name, tensors, tag))

    def _message(self, name: str, tensors: list[torch.Tensor], peer: int, tag: int) -> Operation:
        op = self._describe(name, tensors)
        op.peer, op.tag, op.sent, op.is_async = peer, tag, op.bytes, name != "send" and name != "recv"
        return op

    def _describe(self, name: str, tensors: list[torch.Tensor]) -> Operation:
        op = Operation(0, self.members, 0, self.hash, name=name)
        if tensors:
            op.dtype = str(tensors[0].dtype).removeprefix("torch.")
            op.shape = "x".join(map(str, tensors[0].shape)) if len(tensors) == 1 else f"{len(tensors)} tensors"
        for tensor in tensors:
            elements = tensor.numel()
            op.elements += elements
            op.bytes += elements * tensor.element_size()  # sparse ones have no nbytes
        return op

    def _collective(self, method: str, args: tuple, kwargs: dict[str, Any]) -> TracedWork:
        name, place = _COLLECTIVES[method]
        tensors = [] if place is None else layouts.flatten(args[place])
        options = kwargs.get("opts") or (args[-1] if args else None)
        op = self._describe(name, tensors)
        reduction = getattr(options, "reduceOp", None)
        op.detail = "" if reduction is None else _REDUCTIONS[reduction.op.value]
        op.is_async = getattr(options, "asyncOp", False)
        root = getattr(options, "rootRank", None)
        if root is not None:
            named_ranks.check(self, name, group_rank=root)
        op.peer = -1 if root is None else self.ranks[root]
        n = len(self.ranks)
        op.sent = ring_bytes(name, op.bytes, (self.place - (root or 0)) % n, n)
        self.tracer.post(op, (self.hash,), tensors[0] if tensors else None)
        call = getattr(self.inner, method)
        if tensors:
            call = functools.partial(layouts.carry_out, call, name)
        return self._start(op, tensors, lambda: call(*args, **kwargs))

    def _start(self, op: Operation, tensors: list[torch.Tensor], call: Callable[[], Any]) -> TracedWork:
        try:
            return TracedWork(self.tracer, op, call(), tensors)
        except BaseException:
            self.tracer.withdraw(op)
            raise


def _forward(method: str) -> Callable[..., TracedWork]:
    def forward(self: TracedGroup, *args: Any, **kwargs: Any) -> TracedWork:
        return self._collective(method, args, kwargs)

    forward.__name__ = method
    return forward


for _method in _COLLECTIVES:
    setattr(TracedGroup, _method, _forward(_method))


def _is_by_hand() -> bool:
    """Whether a function of torch.distributed was called; what other parts of torch begin, they wait for."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == dist.distributed_c10d.__file__


def _called(direction: str) -> str:
    """Whether the caller used send or isend (recv or irecv); a batch consists of the latter."""
    return direction if direction in torch_calls() else "i" + direction


def register(tracer: Tracer) -> None:
    """Make "traced" a backend of torch.distributed on this process."""

    def create(options: Any, _: Any) -> TracedGroup:
        ranks = options.global_ranks_in_group or list(range(options.group_size))
        inner = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        waiting = Operation(0, sum(1 << r for r in ranks), 0, group_hash(options.group_id), name="new_group")
        tracer.post(waiting, (waiting.group, "new_group"))
        tracer.block(waiting, tracer.steps)
        _connect(inner, options, tracer.device)
        tracer.finish(waiting)
        tracer.groups.append(inner)
        return TracedGroup(tracer, inner, options.group_id, ranks)

    named_ranks.check_before_torch()
    dist.Backend.register_backend("traced", create, extended_api=True, devices=["cpu", "cuda"])


def _connect(inner: dist.ProcessGroup, options: Any, device: torch.device | None) -> None:
    """Open gloo connections for tensors in memory and, given a GPU, NCCL ones for tensors on it."""
    gloo_options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo_options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    gloo_options._timeout = _FOREVER
    store = dist.PrefixStore("gloo", options.store)
    gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, gloo_options)
    gloo._set_sequence_number_for_group()
    inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    if device is not None:
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = _FOREVER
        store = dist.PrefixStore("nccl", options.store)
        nccl = dist.ProcessGroupNCCL(store, options.group_rank, options.group_size, nccl_options)
        nccl._set_sequence_number_for_group()
        inner._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
