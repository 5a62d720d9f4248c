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
import threading
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks.board import Operation
from course_lib.ranks.worker import contiguous, parts, rank_arguments
from course_lib.ranks.worker.tracer import Tracer, clock, is_called_directly, torch_calls

c10d: Any = dist.distributed_c10d
_FOREVER = timedelta(days=1)  # the parent ends a run that hangs, not the process group


class TracedWork(dist.Work):
    """A handle that notes when its rank begins to wait for an operation, and when the operation ends."""

    sent: Sequence[torch.Tensor] = ()  # keeps tensors alive as long as the handle, as gloo does, where a copy is sent
    checksum: int | None = None  # of what it sends in place, where a change would reach the receiver
    is_shared = False  # whether another message was on its way into the same numbers

    def __init__(self, tracer: Tracer, op: Operation, inner: Any, copies: contiguous.Copies) -> None:
        super().__init__()
        self.tracer, self.op, self.inner, self.copies, self.lock = tracer, op, inner, copies, threading.Lock()
        self.started = tracer.steps
        if is_called_directly():  # other parts of torch wait for their operations, or need not
            tracer.unclaimed[op.number] = self
        if op.is_async and not op.is_message and tracer.device is None:
            with contextlib.suppress(RuntimeError):  # gloo has no future for a reduce-scatter
                inner.get_future().add_done_callback(self._note_completion)

    def _claim(self) -> None:
        """Note that somebody waits for the operation, or will."""
        self.tracer.unclaimed.pop(self.op.number, None)

    def _note_completion(self, _: Any) -> None:
        if not self.op.ended and not self.op.blocked:
            self.op.ended = clock()
            if self.op in self.tracer.operations[self.op.number - 1 :]:  # and it is not of an earlier run
                self.tracer.board.write(self.tracer.rank, self.op)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._claim()
        if self.op.blocked:
            return True
        tracer, op, done = self.tracer, self.op, self.op.ended
        if self.checksum is not None and self.checksum != contiguous.checksum(self.sent):
            op.changed = clock()
        tracer.block(op, self.started)
        op.ended = 0.0
        if self.inner is not None:  # NCCL has none for a call that is not asynchronous, and so in the current stream
            self.inner.wait()
        self._copy_back()
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

    def _copy_back(self) -> None:
        """Fill the non-contiguous tensors, once, before anybody sees that the operation has ended."""
        with self.lock, torch.no_grad():
            while self.copies:
                tensor, copy = self.copies.pop()
                tensor.copy_(copy)
                if self.is_shared:
                    contiguous.spoil(tensor)

    def _note_sender(self) -> None:
        op, tracer = self.op, self.tracer
        op.peer = op.member_ranks()[self.inner._source_rank()]
        key = (op.group, "recv", op.peer, op.tag)
        op.order = tracer.orders[key]
        tracer.orders[key] += 1

    def is_completed(self) -> bool:
        if self.tracer.emulated:
            if self.op.is_message and not self.op.is_send:
                text = "is_completed() asks whether a message has come, which on an emulated clock nobody knows before"
                advice = "Call wait() where you need the message, or launch without a pace."
                raise RuntimeError(f"{text} its sender has gone on. {advice}")
            return self.wait()
        completed = self.inner is None or self.inner.is_completed()
        if completed:
            self._copy_back()
            if not self.op.is_message:
                self._claim()
        return completed

    def get_future(self) -> Any:
        self._claim()
        self.op.handed_on = True
        if self.tracer.device is not None:
            self.op.ended = clock()  # a future of NCCL is done as soon as the operation is in a stream
        self.tracer.board.write(self.tracer.rank, self.op)
        if self.tracer.emulated:
            self.tracer.emulated.wait_unseen(self)
        future = self.inner.get_future()
        return future.then(self._values) if self.copies else future

    def _values(self, future: Any) -> Any:
        self._copy_back()
        return future.value()

    def result(self) -> list[torch.Tensor]:
        return self.inner.result()

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        return self.inner._source_rank()


# The argument of a collective that holds this rank's own part of the data (its input; for reduce_scatter and scatter
# its output), and the bytes that the rank sends, given the size of that part and its place from the root in n ranks.
# Patarasuk and Yuan 2009 for the ring all-reduce; a rooted collective passes whole tensors along a chain.
_COLLECTIVES: dict[str, tuple[int | None, Callable[[int, int, int], int]]] = {
    "all_reduce": (0, lambda size, place, n: 2 * (n - 1) * size // n),
    "all_gather": (1, lambda size, place, n: (n - 1) * size),
    "all_to_all": (1, lambda size, place, n: (n - 1) * size // n),
    "broadcast": (0, lambda size, place, n: size if place < n - 1 else 0),
    "reduce": (0, lambda size, place, n: size if place else 0),
    "reduce_scatter": (0, lambda size, place, n: (n - 1) * size),  # after `reduce`, which begins alike
    "gather": (1, lambda size, place, n: size if place else 0),
    "scatter": (0, lambda size, place, n: 0 if place else (n - 1) * size),
    "barrier": (None, lambda size, place, n: 0),
}
_RACE = "still works on this tensor: on GPUs nothing puts two groups into an order. Call wait() on its handle first."
_REDUCTIONS = {op.value: name for name, op in dist.ReduceOp.RedOpType.__members__.items()}


class TracedGroup(dist.ProcessGroup):
    """A process group that traces its operations and has `inner` carry them out."""

    def __init__(self, tracer: Tracer, inner: dist.ProcessGroup, name: str, ranks: list[int]) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.tracer, self.inner, self.ranks, self.place = tracer, inner, ranks, inner.rank()
        self.hash = zlib.crc32(name.encode())
        self.members = sum(1 << rank for rank in ranks)

    def getBackendName(self) -> str:  # the name that torch looks for
        return "traced"

    def _set_group_name(self, name: Any) -> None:
        self.inner._set_group_name(name)

    def shutdown(self) -> None:
        """Leave the group, but keep its connections: other ranks may still need them in this run."""
        self.tracer.groups.append(self.inner)

    def getGroupName(self) -> str:  # which is its group_name
        return self.inner.group_name

    @property
    def _device_types(self) -> list[torch.device]:
        return self.inner._device_types

    def _get_backend(self, device: torch.device) -> Any:
        return self.inner._get_backend(device)

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int = 0) -> TracedWork:
        op = self._post_message("send", tensors, destination, tag)
        self._copy_back_before(tensors)
        work = self._start(op, self.inner.send, contiguous.copied(tensors, self._is_buffered(op)), destination, tag)
        work.sent = tensors
        if op.is_async and not (self.tracer.emulated or self.tracer.device):
            work.checksum = contiguous.checksum(tensors)
        return work

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> TracedWork:
        op, tracer = self._post_message("recv", tensors, source, tag), self.tracer
        work = self._start(op, self.inner.recv, tensors, source, tag)
        for other in tracer.receiving:
            if contiguous.share_numbers(tensors, [one for one, _ in other.copies]):
                other.is_shared = work.is_shared = True
        tracer.receiving = [one for one in (*tracer.receiving, work) if one.copies]
        return work

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> TracedWork:
        if self.tracer.emulated and len(self.ranks) > 2:
            text = "A receive names no sender. Whose message comes first would depend on the machine, and so would the"
            raise ValueError(f"{text} emulated clock: say src=..., or launch without a pace.")
        if self.tracer.emulated:
            return self.recv(tensors, 1 - self.place, tag)
        op = self._post_message("recv_any_source", tensors, None, tag)
        return self._start(op, self.inner.recv_anysource, tensors, tag)

    def _post_message(self, kind: str, tensors: list[torch.Tensor], place: int | None, tag: int) -> Operation:
        """Post a message. kind: "send" also for isend, "recv" also for irecv; a batch consists of those."""
        peer = self._rank_at(place, kind)
        is_async = kind not in torch_calls()
        op = self._describe(f"i{kind}" if is_async and peer >= 0 else kind, tensors)
        op.peer, op.tag, op.sent, op.is_async = peer, tag, op.bytes, is_async
        self.tracer.post(op, (self.hash, kind, peer, tag))
        return op

    def _rank_at(self, place: int | None, operation: str) -> int:
        """The rank that an operation names by its place in the group; -1 where it names none."""
        if place is None:
            return -1
        rank_arguments.check(self, operation, None, place)
        return self.ranks[place]

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

    def _collective(self, name: str, method: str, args: tuple, kwargs: dict[str, Any]) -> TracedWork:
        own_part, bytes_sent = _COLLECTIVES[name]
        tensors = [] if own_part is None else contiguous.flatten(args[own_part])
        options = kwargs.get("opts") or (args[-1] if args else None)
        op = self._describe(name, tensors)
        reduction = getattr(options, "reduceOp", None)
        op.detail = "" if reduction is None else _REDUCTIONS[reduction.op.value]
        op.is_async = getattr(options, "asyncOp", False)
        root = getattr(options, "rootRank", None)
        op.peer = self._rank_at(root, name)
        n = len(self.ranks)
        if name in parts.NAMES and "coalesced" not in method:
            op.detail = parts.check(name, args, self.place, n) or op.detail
        op.sent = bytes_sent(op.bytes, (self.place - (root or 0)) % n, n)
        self.tracer.post(op, (self.hash,))
        return self._start(op, getattr(self.inner, method), *args, **kwargs)

    def _is_buffered(self, op: Operation) -> bool:
        """Whether to work on copies: on an emulated clock, changes to a tensor on its way must have no effect."""
        return op.is_async and self.tracer.emulated is not None

    def _copy_back_before(self, args: Any) -> None:
        """Fill these tensors with the results of collectives before, as in the stream of a GPU.

        Raises RuntimeError for what an all-reduce of another group, which has a stream of its own, still writes.
        """
        for work in (buffered := self.tracer.buffered):
            written = [tensor for tensor, _ in work.copies]
            if contiguous.storages(written) & contiguous.storages(args):
                others = work.op.name == "all_reduce" and work.op.group != self.hash and work.op.members.bit_count() > 1
                if others and len(self.ranks) > 1 and contiguous.share_numbers(written, args):
                    raise RuntimeError(f"{work.op.name} in another group {_RACE}")
                work.inner.wait()
                work._copy_back()
        buffered[:] = [work for work in buffered if work.copies]

    def _start(self, op: Operation, call: Callable[..., Any], *args: Any, **options: Any) -> TracedWork:
        """Start an operation. args: it writes into the first; those of a send are contiguous already."""
        try:
            is_buffered = self._is_buffered(op)
            self._copy_back_before(args)
            given, copies = contiguous.arguments(op.name, *args, always=is_buffered) if op.dtype else (args, [])
            work = TracedWork(self.tracer, op, self._call(op, call, *given, **options), copies)
            if is_buffered and not op.is_message:
                self.tracer.buffered.append(work)
            return work
        except BaseException:
            self.tracer.withdraw(op)
            raise

    def _call(self, op: Operation, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self.tracer.device is None:
            return call(*args, **options)
        self.tracer.block(op, self.tracer.steps)  # NCCL's first call connects, which waits for the other ranks
        inner = call(*args, **options)
        op.blocked = 0.0
        self.tracer.board.write(self.tracer.rank, op)
        return inner


def _forward(name: str, method: str) -> Callable[..., TracedWork]:
    return lambda self, *args, **kwargs: self._collective(name, method, args, kwargs)


for _name in _COLLECTIVES:  # each has several spellings: allgather, _allgather_base, all_gather_single, ...
    for _method in dir(dist.ProcessGroup):
        if _method.replace("_", "").startswith(_name.replace("_", "")):
            setattr(TracedGroup, _method, _forward(_name, _method))


def _let_batches_begin_together() -> None:
    """Coalesce batches of messages on NCCL, where two ranks that both send first would wait for ever.

    torch does that only in groups of its own class.
    """
    one_by_one: Any = c10d.batch_isend_irecv

    def together(ops: list[Any]) -> list[Any]:
        group: Any = ops[0].group or dist.group.WORLD
        device = ops[0].tensor.device
        if not group._get_backend(device).supports_coalescing:
            return one_by_one(ops)
        group.inner._start_coalescing(device)
        works = one_by_one(ops)
        end = group.inner._end_coalescing(device)
        for work in works:
            work.inner = end
        return works

    c10d.batch_isend_irecv = dist.batch_isend_irecv = together  # type: ignore[assignment]


def _tell_clock_of_callbacks(tracer: Tracer) -> None:
    def add_told(future: Any, add: Callable[..., Any], callback: Callable) -> Any:
        emulated = tracer.emulated
        return add(future, functools.partial(emulated.call_back, callback) if emulated else callback)

    for name in ("then", "add_done_callback"):
        setattr(torch._C.Future, name, functools.partialmethod(add_told, getattr(torch._C.Future, name)))


def _monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """Replace torch's, which takes only gloo's own groups, by a barrier: a missing rank is named there, and sooner."""
    dist.barrier(group)


def register(tracer: Tracer) -> None:
    """Make "traced" a backend of torch.distributed on this process."""

    def create(options: Any, _: Any) -> TracedGroup:
        ranks = options.global_ranks_in_group or list(range(options.group_size))
        inner = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        group = TracedGroup(tracer, inner, options.group_id, ranks)
        waiting = group._describe("new_group", [])
        tracer.post(waiting, (group.hash, "new_group"))
        tracer.block(waiting, tracer.steps)
        _connect(inner, options, tracer.device)
        tracer.finish(waiting)
        return group

    rank_arguments.check_before_torch()
    _let_batches_begin_together()
    _tell_clock_of_callbacks(tracer)
    c10d.monitored_barrier = dist.monitored_barrier = _monitored_barrier
    dist.Backend.register_backend("traced", create, extended_api=True, devices=["cpu", "cuda"])


@functools.cache
def _gloo_device() -> Any:
    """This process's end of all gloo connections, with one thread that polls, whatever the number of groups."""
    return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)


def _connect(inner: dist.ProcessGroup, options: Any, device: torch.device | None) -> None:
    """Open gloo connections for tensors in memory and, given a GPU, NCCL ones for tensors on it."""
    kinds: Any = dist.ProcessGroup.BackendType

    def open_for(device: str, kind: Any, group: Any, chosen: Any) -> None:
        chosen._timeout = _FOREVER
        store = dist.PrefixStore(kind.name, options.store)
        backend = group(store, options.group_rank, options.group_size, chosen)
        backend._set_sequence_number_for_group()
        inner._register_backend(torch.device(device), kind, backend)

    gloo_options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo_options._devices = [_gloo_device()]
    inner._set_default_backend(kinds.GLOO)
    open_for("cpu", kinds.GLOO, dist.ProcessGroupGloo, gloo_options)
    if device is not None:
        open_for("cuda", kinds.NCCL, dist.ProcessGroupNCCL, dist.ProcessGroupNCCL.Options())
