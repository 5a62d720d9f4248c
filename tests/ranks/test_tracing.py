"""The report of a run: every operation with its bytes and peer, waits apart from transfers, results, prints.

Bytes are those of the ring algorithms, worked out by hand for four ranks that hold 24 bytes each.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import Link, Pace, launch
from course_lib.figures.words import activity
from course_lib.ranks import Run
from course_lib.timeline import COMPUTE_KINDS, Timeline, compute, progress

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as if defined in a notebook cell

N = 4
LATE = 0.05  # the least seconds that a late rank sleeps, once the others are there


def mine(rank: int) -> Tensor:
    """24 bytes: rank 2 holds 20, 21, ... 25."""
    return torch.arange(6.0) + 10 * rank


def shares(rank: int) -> list[Tensor]:
    """This rank's numbers for each rank: rank 2 holds 20s for rank 0, 21s for rank 1."""
    return [torch.full((6,), 10.0 * rank + other) for other in range(N)]


def empty() -> list[Tensor]:
    return [torch.zeros(6) for _ in range(N)]


SUM = torch.arange(6.0) * 4 + 60  # of all ranks' mine()
ALL = [mine(rank) for rank in range(N)]
# Ring algorithms: an all-reduce sends 3/4 of the tensor twice, an all-gather the own tensor three times.
TWICE_THREE_QUARTERS, THREE_TIMES = [36] * N, [72] * N


def names(timeline: Timeline, rank: int) -> set[str]:
    return {span.name for span in timeline.of(rank)}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


# Collectives, waited for at once and later


def all_reduce(rank: int, **options: Any) -> Any:
    tensor = mine(rank)
    return dist.all_reduce(tensor, **options), tensor


def maximum(rank: int, **options: Any) -> Any:
    tensor = mine(rank)
    return dist.all_reduce(tensor, dist.ReduceOp.MAX, **options), tensor


def broadcast(rank: int, **options: Any) -> Any:
    tensor = mine(rank)
    return dist.broadcast(tensor, 1, **options), tensor


def reduce(rank: int, **options: Any) -> Any:
    tensor = mine(rank)
    work = dist.reduce(tensor, 2, **options)
    return work, tensor if rank == 2 else None  # the contents on other ranks are undefined afterwards


def all_gather(rank: int, **options: Any) -> Any:
    tensors = empty()
    return dist.all_gather(tensors, mine(rank), **options), tensors


def all_gather_single(rank: int, **options: Any) -> Any:
    tensor = torch.zeros(24)
    return dist.all_gather_single(tensor, mine(rank), **options), tensor


def reduce_scatter(rank: int, **options: Any) -> Any:
    tensor = torch.zeros(6)
    return dist.reduce_scatter(tensor, shares(rank), **options), tensor


def reduce_scatter_single(rank: int, **options: Any) -> Any:
    tensor = torch.zeros(6)
    return dist.reduce_scatter_single(tensor, torch.cat(shares(rank)), **options), tensor


def all_to_all(rank: int, **options: Any) -> Any:
    tensors = empty()
    return dist.all_to_all(tensors, shares(rank), **options), tensors


def all_to_all_single(rank: int, **options: Any) -> Any:
    tensor = torch.zeros(24)
    return dist.all_to_all_single(tensor, torch.cat(shares(rank)), **options), tensor


def gather(rank: int, **options: Any) -> Any:
    tensors = empty() if rank == 0 else None
    return dist.gather(mine(rank), tensors, 0, **options), tensors


def scatter(rank: int, **options: Any) -> Any:
    tensor = torch.zeros(6)
    return dist.scatter(tensor, shares(rank) if rank == 3 else None, 3, **options), tensor


def barrier(rank: int, **options: Any) -> Any:
    return dist.barrier(**options), None


def now(rank: int, collective: Callable[..., Any]) -> Any:
    return collective(rank)[1]


def later(rank: int, collective: Callable[..., Any]) -> Any:
    work, value = collective(rank, async_op=True)
    work.wait()
    return value


TRANSPOSED = [[torch.full((6,), 10.0 * other + rank) for other in range(N)] for rank in range(N)]
COLLECTIVES = [
    (all_reduce, "all_reduce", [SUM] * N, TWICE_THREE_QUARTERS),
    (maximum, "all_reduce", [mine(3)] * N, TWICE_THREE_QUARTERS),
    (broadcast, "broadcast", [mine(1)] * N, [0, 24, 24, 24]),  # a chain from rank 1 to rank 0
    (reduce, "reduce", [None, None, SUM, None], [24, 24, 0, 24]),
    (all_gather, "all_gather", [ALL] * N, THREE_TIMES),
    (all_gather_single, "all_gather", [torch.cat(ALL)] * N, THREE_TIMES),
    (reduce_scatter, "reduce_scatter", [torch.full((6,), 60.0 + 4 * r) for r in range(N)], THREE_TIMES),
    (reduce_scatter_single, "reduce_scatter", [torch.full((6,), 60.0 + 4 * r) for r in range(N)], THREE_TIMES),
    (all_to_all, "all_to_all", TRANSPOSED, THREE_TIMES),
    (all_to_all_single, "all_to_all", [torch.cat(tensors) for tensors in TRANSPOSED], THREE_TIMES),
    (gather, "gather", [ALL, None, None, None], [0, 24, 24, 24]),
    (scatter, "scatter", [torch.full((6,), 30.0 + r) for r in range(N)], [0, 0, 0, 72]),
    (barrier, "barrier", [None] * N, [0] * N),
]


@pytest.mark.parametrize("when", [now, later])
@pytest.mark.parametrize(
    ("collective", "name", "results", "sent"), COLLECTIVES, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_collective_gives_the_right_result_and_is_seen_with_its_bytes(
    collective: Callable[..., Any], name: str, results: list[Any], sent: list[int], when: Callable[..., Any]
) -> None:
    run = launch(when, N, (collective,))
    assert equal(run.results, results)
    for rank in range(N):
        assert names(run.timeline, rank) == {name}
        assert {span.kind for span in run.timeline.of(rank)} <= {"wait", "transfer"}
        assert {span.peer for span in run.timeline.of(rank)} == {None}
        assert run.timeline.bytes_sent(rank) == sent[rank]


@pytest.mark.parametrize(("dtype", "sent"), [(torch.float64, 72), (torch.bfloat16, 18), (torch.int8, 9)])
def test_bytes_follow_the_dtype(dtype: torch.dtype, sent: int) -> None:
    def reduce_in(rank: int) -> Tensor:
        tensor = torch.full((6,), rank + 1).to(dtype)
        dist.all_reduce(tensor)
        return tensor

    run = launch(reduce_in, N)
    assert equal(run.results, [torch.full((6,), 10).to(dtype)] * N)
    assert [run.timeline.bytes_sent(rank) for rank in range(N)] == [sent] * N


def test_a_gathered_object_costs_its_size_and_the_longest_pickle() -> None:
    def gathered(rank: int) -> None:
        dist.all_gather_object([None] * N, "x" * rank)

    timeline = launch(gathered, N).timeline
    longest = len(pickle.dumps("xxx"))
    assert [timeline.bytes_sent(rank) for rank in range(N)] == [3 * 8 + 3 * longest] * N


# Messages


def send_and_recv(rank: int) -> Tensor | None:
    tensor = mine(rank)
    if rank == 0:
        dist.send(tensor, 3)
    elif rank == 3:
        dist.recv(tensor, 0)
    return tensor


def isend_and_irecv(rank: int) -> Tensor:
    tensor = mine(rank)
    if rank == 0:
        dist.isend(tensor, 3).wait()
    elif rank == 3:
        dist.irecv(tensor, 0).wait()
    return tensor


@pytest.mark.parametrize(
    ("function", "sending", "receiving"), [(send_and_recv, "send", "recv"), (isend_and_irecv, "isend", "irecv")]
)
def test_a_message_is_seen_on_both_sides_with_its_bytes_and_peer(
    function: Callable[[int], Any], sending: str, receiving: str
) -> None:
    run = launch(function, N)
    assert equal(run.results, [mine(0), mine(1), mine(2), mine(0)])
    for rank, name, peer in [(0, sending, 3), (3, receiving, 0)]:
        spans = run.timeline.of(rank)
        assert {(span.name, span.peer) for span in spans} == {(name, peer)}
        assert sum(span.bytes for span in spans if span.kind == "transfer") == 24
    assert run.timeline.of(1) == run.timeline.of(2) == []
    assert [run.timeline.bytes_sent(rank) for rank in range(N)] == [24, 0, 0, 0]


def test_a_recv_from_anybody_learns_its_peer() -> None:
    def anybody(rank: int) -> int | None:
        if rank == 2:
            dist.send(torch.ones(6), 1)
        return dist.recv(torch.zeros(6)) if rank == 1 else None

    run = launch(anybody, N)
    assert run.results[1] == 2
    assert {span.peer for span in run.timeline.of(1)} == {2}


@pytest.mark.parametrize("pace", [None, Pace(link=Link(latency=1.0))])
def test_messages_of_equal_shape_say_which_of_them_was_received(pace: Pace | None) -> None:
    """Nobody can know that a rank takes the weights for the biases; its timeline shows which message it took."""

    def swapped(rank: int) -> None:
        weights, biases = torch.ones(4), torch.zeros(4)
        for tensor in (weights, biases) if rank == 0 else (biases, weights):
            if rank == 0:
                dist.send(tensor, 1)
            else:
                dist.recv(tensor, 0)

    timeline = launch(swapped, 2, pace=pace).timeline
    for rank in (0, 1):
        moved = [span for span in timeline.of(rank) if span.kind == "transfer"]
        assert list(dict.fromkeys(span.number for span in moved)) == [1, 2]
        assert activity(moved[-1]).startswith(
            f"transfer, {'recv' if rank else 'send'}, message 2, with rank {1 - rank}"
        )


def test_a_batch_of_messages_is_seen_one_by_one() -> None:
    def ring(rank: int) -> Tensor:
        received = torch.zeros(6)
        there = dist.P2POp(dist.isend, mine(rank), (rank + 1) % N)
        here = dist.P2POp(dist.irecv, received, (rank - 1) % N)
        for work in dist.batch_isend_irecv([there, here]):
            work.wait()
        return received

    run = launch(ring, N)
    assert equal(run.results, [mine(3), mine(0), mine(1), mine(2)])
    for rank in range(N):
        seen = {(span.name, span.peer) for span in run.timeline.of(rank)}
        assert seen == {("isend", (rank + 1) % N), ("irecv", (rank - 1) % N)}
        assert run.timeline.bytes_sent(rank) == 24


# Groups


def test_a_subgroup_is_seen_with_global_ranks_and_its_own_size() -> None:
    def in_pairs(rank: int) -> Tensor:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group, tensor = groups[rank % 2], mine(rank)
        dist.all_reduce(tensor, group=group)
        if rank == 1:
            dist.send(tensor, 3, group=group)
        elif rank == 3:
            dist.recv(tensor, group=group, group_src=0)
        return tensor

    run = launch(in_pairs, N)
    assert equal(run.results, [mine(0) + mine(2), mine(1) + mine(3)] * 2)
    sent = [span for span in run.timeline.of(1) if span.name == "send"]
    received = [span for span in run.timeline.of(3) if span.name == "recv"]
    assert {span.peer for span in sent} == {3}
    assert {span.peer for span in received} == {1}
    # On two ranks an all-reduce sends half of its 24 bytes twice.
    assert [run.timeline.bytes_sent(rank) for rank in range(N)] == [24, 24 + 24, 24, 24]


# Messages of PyTorch itself


def ddp_steps(rank: int, steps: int) -> Tensor:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(10, 10))
    for _ in range(steps):
        model.zero_grad()
        model(torch.full((2, 10), float(rank))).sum().backward()
    return model.module.weight.grad


def traffic(function: Callable[..., Any], world_size: int, *args: Any) -> tuple[Run, list[int]]:
    run = launch(function, world_size, args)
    return run, [run.timeline.bytes_sent(rank) for rank in range(world_size)]


def test_distributed_data_parallel_reduces_every_gradient_once_a_step() -> None:
    two, sent_in_two = traffic(ddp_steps, 2, 2)
    three, sent_in_three = traffic(ddp_steps, 2, 3)
    assert equal(three.results, [torch.full((10, 10), 1.0)] * 2)  # mean of 2 samples of 0s and 2 samples of 1s
    gradients = 4 * (10 * 10 + 10)
    assert [b - a for a, b in zip(sent_in_two, sent_in_three, strict=True)] == [gradients, gradients]
    assert "all_reduce" in names(two.timeline, 0)


def noted_late(rank: int) -> None:
    """A step whose all-reduce is reported as over by another thread, after the machine has stood still for a while."""
    from course_lib.ranks.worker import tracer
    from course_lib.ranks.worker.traced_group import TracedWork

    own: Any = dist.group.WORLD.tracer
    note, clock, has_returned = TracedWork._note_completion, tracer.clock, threading.Event()

    def end_run() -> None:
        has_returned.set()
        type(own).end_run(own)

    def late(self: TracedWork, future: Any) -> None:
        if self.op.handed_on:
            has_returned.wait(60)
            time.sleep(0.02)
            tracer.clock = lambda: clock() + 5.0
            time.sleep(0.02)
            tracer.clock = clock
        note(self, future)

    own.end_run = end_run
    with mock.patch.object(TracedWork, "_note_completion", late):
        ddp_steps(rank, 1)


def test_what_is_noted_a_moment_after_the_function_has_returned_counts() -> None:
    assert traffic(noted_late, 2)[1] == traffic(ddp_steps, 2, 1)[1]


def fsdp_steps(rank: int, steps: int) -> tuple[Tensor, Tensor]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    whole = [layer.weight.detach().clone() for layer in model]  # type: ignore[operator]
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(steps):
        model.zero_grad()
        model(torch.full((2, 8), rank + 1.0)).sum().backward()
    return model[1].weight.grad.full_tensor(), whole[0]  # type: ignore[operator]


def test_fully_shard_gathers_weights_and_scatters_gradients() -> None:
    one, sent_in_one = traffic(fsdp_steps, 2, 1)
    _, sent_in_two = traffic(fsdp_steps, 2, 2)
    gradient, first = one.results[0]
    inputs = torch.full((2, 8), 1.0) + torch.full((2, 8), 2.0)
    expected = torch.ones(8, 2) @ (inputs @ first.T) / 2
    assert torch.allclose(gradient, expected, rtol=1e-5)  # the sum is taken in another order
    shard = 4 * 8 * 8 // 2
    gathered, scattered = 2 * 2 * shard, 2 * shard  # two layers: forward and backward; backward
    assert [b - a for a, b in zip(sent_in_one, sent_in_two, strict=True)] == [gathered + scattered] * 2
    assert names(one.timeline, 0) == {"all_gather", "reduce_scatter"}


def pipelined(rank: int, steps: int) -> int:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(nn.Linear(8, 8), rank, 2, torch.device("cpu"))
    losses: list[Tensor] = []
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    for _ in range(steps):
        if rank == 0:
            schedule.step(torch.ones(8, 8))
        else:
            schedule.step(target=torch.ones(8, 8), losses=losses)
    return len(losses)


def test_pipelining_sends_activations_forward_and_gradients_back() -> None:
    one, sent_in_one = traffic(pipelined, 2, 1)
    two, sent_in_two = traffic(pipelined, 2, 2)
    assert one.results == two.results == [0, 4]
    activations = 4 * 8 * 8
    assert [b - a for a, b in zip(sent_in_one, sent_in_two, strict=True)] == [activations, activations]
    assert {span.peer for span in one.timeline.of(0) if span.name == "isend"} == {1}


def tensor_parallel(rank: int, sequence_parallel: bool) -> tuple[Tensor, Tensor]:
    """The output of a model split over two ranks, and the expected one; by rows if sequence parallel."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))
    inputs = torch.randn(4, 8)
    expected = model(inputs).detach()
    outside = Shard(0) if sequence_parallel else Replicate()
    plan = {"0": ColwiseParallel(input_layouts=outside), "2": RowwiseParallel(output_layouts=outside)}
    parallelize_module(model, dist.init_device_mesh("cpu", (2,)), plan)
    dist.barrier()
    part = slice(2 * rank, 2 * rank + 2) if sequence_parallel else slice(None)
    return model(inputs[part]).detach(), expected[part]


@pytest.mark.parametrize(
    ("sequence_parallel", "expected"),
    [
        (False, [("all_reduce", 128)]),  # half of the output's 128 bytes, twice
        (True, [("all_gather", 64), ("reduce_scatter", 64)]),  # the other's half in, the other's half out
    ],
)
def test_parallelize_module_sends_what_tensor_parallelism_says(
    sequence_parallel: bool, expected: list[tuple[str, int]]
) -> None:
    def is_right(rank: int) -> bool:
        return torch.allclose(*tensor_parallel(rank, sequence_parallel), atol=1e-6)

    run = launch(is_right, 2)
    assert run.results == [True, True]
    for rank in (0, 1):
        spans = run.timeline.of(rank)
        begun = max(span.end for span in spans if span.name == "barrier")
        seen: dict[str, int] = {}
        for span in spans:
            if span.start >= begun:
                seen[span.name] = seen.get(span.name, 0) + span.bytes
        assert list(seen.items()) == expected


# Waiting apart from moving data


def sleep_until_there(ranks: Sequence[int], operations: int) -> None:
    """Sleep, on a rank, until a while after these ranks have begun so many operations in this run."""
    board = dist.group.WORLD.tracer.board
    while any(len(board.operations(rank)) < operations for rank in ranks):
        time.sleep(0.001)
    time.sleep(LATE)


def late(rank: int, who: int, others: Sequence[int], collective: Callable[..., Any]) -> None:
    dist.barrier()
    if rank == who:
        sleep_until_there(others, operations=2)
    with compute("other", "the operation"):
        collective(rank)


def time_waiting(timeline: Timeline, rank: int) -> float:
    """Seconds of waiting since the barrier."""
    begun = next(span.start for span in timeline.of(rank) if span.kind == "other")
    return sum(span.duration for span in timeline.of(rank) if span.kind == "wait" and span.start >= begun)


@pytest.mark.parametrize("collective", [all_reduce, all_gather, reduce_scatter, all_to_all, barrier])
def test_until_the_last_rank_arrives_a_collective_is_waiting(collective: Callable[..., Any]) -> None:
    timeline = launch(late, N, (2, (0, 1, 3), collective)).timeline
    waited = [time_waiting(timeline, rank) for rank in range(N)]
    assert all(waited[rank] >= LATE for rank in (0, 1, 3))
    assert waited[2] == 0


@pytest.mark.parametrize("who", [0, 3])
@pytest.mark.parametrize("function", [send_and_recv, isend_and_irecv])
def test_a_message_waits_for_the_other_side(who: int, function: Callable[..., Any]) -> None:
    other = 3 - who
    timeline = launch(late, N, (who, (other,), function)).timeline
    assert time_waiting(timeline, other) >= LATE
    assert time_waiting(timeline, who) == 0


def test_an_operation_that_ends_behind_compute_is_in_the_background() -> None:
    def overlapped(rank: int) -> None:
        work: Any = dist.all_reduce(mine(rank), async_op=True)
        with compute("forward"):
            while not work.is_completed():
                time.sleep(0.001)
        work.wait()

    timeline = launch(overlapped, N).timeline
    for rank in range(N):
        assert timeline.bytes_sent(rank) == 36
        assert all(span.background for span in timeline.of(rank) if span.bytes)
        assert timeline.waiting(rank) == timeline.transferring(rank) == 0


def test_an_operation_asked_for_too_late_does_not_seem_slow() -> None:
    def receive_late(rank: int) -> None:
        if rank == 0:
            dist.isend(mine(0), 1).wait()
        else:
            sleep_until_there([0], operations=1)
            dist.recv(mine(1), 0)

    timeline = launch(receive_late, 2).timeline
    assert timeline.waiting(0) >= LATE
    (sent,) = [span for span in timeline.of(0) if span.kind == "transfer"]
    assert sent.start == timeline.of(1)[0].start


# Compute


def test_a_mark_keeps_its_kind_name_stage_and_micro_batch() -> None:
    def marks(rank: int) -> None:
        for kind in COMPUTE_KINDS:
            with compute(kind, f"my {kind}", micro_batch=3, stage=rank):
                progress(0.5)

    timeline = launch(marks, 2).timeline
    for rank in (0, 1):
        seen = [(s.kind, s.name, s.micro_batch, s.stage, s.bytes, s.peer) for s in timeline.of(rank)]
        assert seen == [(kind, f"my {kind}", 3, rank, 0, None) for kind in COMPUTE_KINDS]


def test_communication_inside_a_mark_is_not_compute() -> None:
    def inside(rank: int) -> None:
        if rank == 0:
            sleep_until_there([1], operations=1)
        with compute("backward"):
            time.sleep(LATE)
            dist.all_reduce(mine(rank))

    timeline = launch(inside, 2).timeline
    (mark,) = [span for span in timeline.of(1) if span.kind == "backward"]
    assert timeline.busy(1) >= LATE
    assert timeline.waiting(1) >= 2 * LATE  # before rank 0 begins, and while it computes
    assert timeline.busy(1) == pytest.approx(mark.duration - timeline.waiting(1) - timeline.transferring(1))


def test_a_mark_inside_a_mark_counts_once() -> None:
    def nested(rank: int) -> None:
        with compute("backward", "outer"), compute("backward", "inner"):
            time.sleep(0.1)

    timeline = launch(nested, 1).timeline
    outer, inner = timeline.spans if timeline.spans[0].name == "outer" else timeline.spans[::-1]
    assert (outer.name, inner.name) == ("outer", "inner")
    assert outer.start <= inner.start < inner.end <= outer.end
    assert timeline.busy(0) == outer.duration


def test_a_mark_that_ends_in_an_exception_is_closed() -> None:
    def caught(rank: int) -> None:
        try:
            with compute("forward"):
                raise ValueError
        except ValueError:
            pass
        with compute("backward"):
            pass

    assert [span.kind for span in launch(caught, 1).timeline.of(0)] == ["forward", "backward"]


# The timeline as a whole


def test_a_timeline_is_measured_and_lies_within_the_run() -> None:
    began = time.perf_counter()
    run = launch(now, N, (all_reduce,))
    seconds = time.perf_counter() - began
    assert run.timeline.origin == "measured"
    assert run.timeline.world_size == run.world_size == N
    assert all(0 <= span.start <= span.end <= seconds for span in run.timeline.spans)


def test_a_new_run_does_not_show_the_one_before() -> None:
    launch(now, N, (all_reduce,))
    timeline = launch(now, N, (barrier,)).timeline
    assert {span.name for span in timeline.spans} == {"barrier"}


def test_more_operations_than_the_board_holds_are_all_in_the_timeline() -> None:
    def many(rank: int) -> None:
        for _ in range(300):
            dist.all_reduce(torch.zeros(2))

    timeline = launch(many, 2).timeline
    assert timeline.bytes_sent(0) == 300 * 8


def test_a_tensor_is_let_go_when_its_operation_is_over() -> None:
    def growth(rank: int) -> int:
        import weakref

        seen = []
        for _ in range(5):
            for asynchronous in (False, True):
                tensor = torch.zeros(1000)
                work = dist.all_reduce(tensor, async_op=asynchronous)
                if work is not None:
                    work.wait()
                seen.append(weakref.ref(tensor))
                del tensor, work
        patience = time.monotonic() + 30  # gloo's own threads may hold some a little longer
        while (held := sum(reference() is not None for reference in seen[:-1])) and time.monotonic() < patience:
            time.sleep(0.01)
        return held

    assert launch(growth, 2).results == [0, 0]


def test_an_operation_that_takes_no_time_is_in_the_timeline_too() -> None:
    def alone(rank: int) -> None:
        dist.barrier()

    timeline = launch(alone, 1, pace=Pace(device=0.01)).timeline
    assert [(span.name, span.kind, span.duration) for span in timeline.spans] == [("barrier", "transfer", 0.0)]


class Coalescing:
    """A stand-in for a group of NCCL: messages of a batch begin at its end, and share one handle."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.said, self.works = inner, [], []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(supports_coalescing=True)

    def _start_coalescing(self, device: torch.device) -> None:
        self.said.append("start")

    def _end_coalescing(self, device: torch.device) -> Coalescing:
        self.said.append("end")
        return self

    def send(self, *args: Any) -> None:
        self.said.append("send")
        self.works.append(self.inner.send(*args))

    def recv(self, *args: Any) -> None:
        self.said.append("recv")
        self.works.append(self.inner.recv(*args))

    def wait(self) -> None:
        while self.works:
            self.works.pop().wait()


def test_messages_of_a_batch_begin_together_where_the_backend_wants_it() -> None:
    def exchange(rank: int) -> tuple[list[str], float]:
        group: Any = dist.group.WORLD
        group.inner = fake = Coalescing(group.inner)
        box = torch.zeros(1)
        to, back = dist.P2POp(dist.isend, torch.ones(1) + rank, 1 - rank), dist.P2POp(dist.irecv, box, 1 - rank)
        for work in dist.batch_isend_irecv([to, back]):
            work.wait()
        group.inner = fake.inner
        return fake.said, float(box)

    run = launch(exchange, 2)
    assert run.results == [(["start", "send", "recv", "end"], 2.0), (["start", "send", "recv", "end"], 1.0)]
    assert [run.timeline.bytes_sent(rank) for rank in (0, 1)] == [4, 4]


def test_a_call_without_a_handle_fills_a_tensor_with_gaps_too() -> None:
    """NCCL gives a handle for asynchronous calls only."""

    def column(rank: int) -> list[list[float]]:
        group: Any = dist.group.WORLD
        inner: Any = group.inner
        group.inner = SimpleNamespace(allreduce=lambda *args: inner.allreduce(*args).wait() and None)
        table = torch.ones(2, 2)
        dist.all_reduce(table[:, 0])
        group.inner = inner
        return table.tolist()

    assert launch(column, 2).results == [[[2.0, 1.0], [2.0, 1.0]]] * 2


def test_a_mark_on_a_gpu_ends_when_its_stream_has_and_waits_for_no_message() -> None:
    """A receive in another stream may wait for what this rank sends after the mark."""

    def ends(rank: int) -> list[str]:
        waits: list[str] = []
        tracer = dist.group.WORLD.tracer
        with pytest.MonkeyPatch.context() as patch:
            computed = SimpleNamespace(synchronize=lambda: waits.append("computed"))
            patch.setattr(torch.cuda, "current_stream", lambda: computed)
            patch.setattr(torch.cuda, "synchronize", lambda *_: waits.append("all messages are there"))
            patch.setattr(tracer, "device", torch.device("cuda"))
            with compute("forward"):
                pass
        return waits

    assert launch(ends, 1).results == [["computed"]]
