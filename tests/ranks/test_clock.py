"""The emulated clock, held against closed forms (LogGP, Alexandrov et al. 1995) and a second clock of a few lines.

Every number here is exact: seconds are powers of two and bytes too, or the comparison allows for rounding alone.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Process
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib import Deadlock, Link, Pace, RankFailed, Span, Timeline, launch
from course_lib.mechanisms.collectives import ring_all_reduce
from course_lib.ranks.worker.clock import Entries, Entry
from course_lib.timeline import compute, now, progress

pytestmark = pytest.mark.long

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as if defined in a notebook cell

MB = 2**20
EXACT = 1e-12  # relative; sums of times may round


def of_kind(timeline: Timeline, rank: int, *kinds: str) -> list[Span]:
    return [span for span in timeline.of(rank) if span.kind in kinds]


def ends(timeline: Timeline, rank: int) -> float:
    """The last time on this rank's clock."""
    return max(span.end for span in timeline.of(rank) if not span.background)


def bytes_of(n: int) -> torch.Tensor:
    return torch.zeros(int(n), dtype=torch.uint8)


# Compute


def one_mark(rank: int, kind: str, work: float) -> None:
    with compute(kind, work=work):
        time.sleep(0.01)  # its real time does not count


@pytest.mark.parametrize(
    ("device", "kind", "work", "expected"),
    [
        (0.125, "forward", 1.0, 0.125),
        (0.125, "forward", 2.5, 0.3125),
        ({"forward": 0.125, "backward": 0.25}, "backward", 1.0, 0.25),
        ({"forward": 0.0}, "forward", 1.0, 0.0),
    ],
)
def test_a_mark_takes_its_work_times_the_seconds_for_its_kind(
    device: float | dict[str, float], kind: str, work: float, expected: float
) -> None:
    timeline = launch(one_mark, 1, (kind, work), pace=Pace(device)).timeline
    assert [(span.kind, span.start, span.end) for span in timeline.spans] == [(kind, 0.0, expected)]
    assert (timeline.origin, timeline.untimed) == ("emulated", ())


@pytest.mark.parametrize("device", [{"forward": 2.0}, None])
def test_a_mark_of_which_the_pace_says_nothing_takes_no_time_and_the_timeline_says_so(device: Any) -> None:
    timeline = launch(one_mark, 1, ("optimizer", 1.0), pace=Pace(device)).timeline
    assert (timeline.makespan, timeline.untimed) == (0.0, ("optimizer",))


def test_what_is_not_marked_takes_no_time() -> None:
    def between_marks(rank: int) -> None:
        for _ in range(2):
            time.sleep(0.01)
            with compute("forward"):
                pass

    timeline = launch(between_marks, 1, pace=Pace(0.5)).timeline
    assert [(span.start, span.end) for span in timeline.spans] == [(0.0, 0.5), (0.5, 1.0)]


def test_a_measured_run_is_on_the_real_clock_as_before() -> None:
    began = time.perf_counter()
    run = launch(one_mark, 1, ("forward", 1.0))
    assert run.timeline.origin == "measured"
    assert 0.01 <= run.timeline.makespan <= time.perf_counter() - began


def test_a_mark_inside_another_is_part_of_it() -> None:
    def nested(rank: int, work: float) -> None:
        with compute("backward"), compute("other", work=work):
            pass

    for work, expected in ((1.0, 0.5), (8.0, 1.0)):
        timeline = launch(nested, 1, (work,), pace=Pace({"backward": 0.5, "other": 0.125})).timeline
        assert {span.kind: span.end for span in timeline.spans} == {"other": 0.125 * work, "backward": expected}


def test_time_blocked_inside_a_mark_is_added_to_its_compute() -> None:
    def blocked_inside(rank: int) -> None:
        if rank == 0:
            with compute("forward"):
                dist.recv(torch.zeros(1), 1)
        else:
            with compute("other"):
                pass
            dist.send(torch.zeros(1), 0)

    timeline = launch(blocked_inside, 2, pace=Pace({"forward": 0.25, "other": 1.0}, Link(latency=0.5))).timeline
    (mark,) = of_kind(timeline, 0, "forward")
    assert (mark.start, mark.end) == (0.0, 1.75)
    assert (timeline.waiting(0), timeline.transferring(0), timeline.busy(0)) == (1.0, 0.5, 0.25)


def test_reach_lets_something_begin_in_the_middle_of_a_mark() -> None:
    def buckets(rank: int) -> None:
        works = []
        with compute("backward"):
            for fraction in (0.25, 0.75):
                progress(fraction)
                works.append(dist.all_reduce(torch.ones(4), async_op=True))
        for work in works:
            work.wait()

    timeline = launch(buckets, 2, pace=Pace(1.0, Link(latency=0.0625))).timeline
    for rank in (0, 1):
        sent = [(span.start, span.end, span.background) for span in of_kind(timeline, rank, "transfer")]
        assert sent == [(0.25, 0.375, True), (0.75, 0.875, True)]
        assert ends(timeline, rank) == 1.0


# Messages


def send_once(rank: int, n_bytes: int, source: int, destination: int) -> None:
    if rank == source:
        dist.send(bytes_of(n_bytes), destination)
    if rank == destination:
        dist.recv(bytes_of(n_bytes), source)


@pytest.mark.parametrize(
    ("link", "n_bytes", "free", "there"),
    [
        (Link(latency=0.25), 4, 0.0, 0.25),
        (Link(bandwidth=4 * MB), MB, 0.25, 0.25),
        (Link(latency=0.5, bandwidth=4 * MB), MB, 0.25, 0.75),
        (Link(), MB, 0.0, 0.0),
    ],
)
def test_a_sender_is_free_when_its_link_is_and_the_message_is_there_a_latency_later(
    link: Link, n_bytes: int, free: float, there: float
) -> None:
    timeline = launch(send_once, 2, (n_bytes, 0, 1), pace=Pace(link=link)).timeline
    assert (ends(timeline, 0) if free else 0.0, ends(timeline, 1) if there else 0.0) == (free, there)
    assert timeline.bytes_sent(0) == n_bytes


def test_a_send_is_free_whether_or_not_the_receive_has_been_posted() -> None:
    def late_receiver(rank: int) -> None:
        if rank == 0:
            dist.send(bytes_of(MB), 1)
        else:
            with compute("forward"):
                pass
            dist.recv(bytes_of(MB), 0)

    timeline = launch(late_receiver, 2, pace=Pace(8.0, Link(bandwidth=MB))).timeline
    assert (ends(timeline, 0), ends(timeline, 1)) == (1.0, 8.0)
    assert timeline.waiting(0) == timeline.waiting(1) == 0.0
    (received,) = of_kind(timeline, 1, "transfer")  # it was there when it was asked for
    assert (received.start, received.end) == (8.0, 8.0)


@pytest.mark.parametrize("backwards", [False, True])
def test_four_messages_leave_one_after_the_other_whatever_is_waited_for_first(backwards: bool) -> None:
    def four(rank: int) -> None:
        call = dist.isend if rank == 0 else dist.irecv
        works = [call(bytes_of(MB), 1 - rank) for _ in range(4)]
        for work in reversed(works) if backwards else works:
            work.wait()

    timeline = launch(four, 2, pace=Pace(link=Link(latency=1.0, bandwidth=10 * MB))).timeline
    for rank, latency in ((0, 0.0), (1, 1.0)):
        came = sorted({span.end for span in of_kind(timeline, rank, "transfer")})
        assert came == pytest.approx([latency + seconds for seconds in (0.1, 0.2, 0.3, 0.4)], rel=EXACT)


def test_a_rank_has_one_link_inside_its_node_and_one_between_nodes() -> None:
    def to_two(rank: int) -> None:
        if rank == 0:
            for work in [dist.isend(bytes_of(MB), to) for to in (1, 2, 1, 2)]:
                work.wait()
        elif rank < 3:
            for _ in range(2):
                dist.recv(bytes_of(MB), 0)

    pace = Pace(link=Link(bandwidth=4 * MB), inter_node=Link(bandwidth=MB), devices_per_node=2)
    timeline = launch(to_two, 4, pace=pace).timeline
    assert [ends(timeline, rank) for rank in range(3)] == [2.0, 0.5, 2.0]


def test_two_senders_do_not_queue_at_one_receiver() -> None:
    def both_to_zero(rank: int) -> None:
        if rank:
            dist.send(bytes_of(MB), 0)
        else:
            for source in (1, 2):
                dist.recv(bytes_of(MB), source)

    timeline = launch(both_to_zero, 3, pace=Pace(link=Link(bandwidth=MB))).timeline
    assert [ends(timeline, rank) for rank in range(3)] == [1.0, 1.0, 1.0]


def test_messages_are_told_apart_by_tag_and_by_group() -> None:
    def out_of_order(rank: int) -> None:
        pair = dist.new_group([1, 2])
        if rank == 1:
            works = []
            for group, tag in ((None, 1), (None, 2), (pair, 1)):
                with compute("forward"):
                    pass
                works.append(dist.isend(torch.zeros(1), 2, group=group, tag=tag))
            for work in works:
                work.wait()
        if rank == 2:
            early = dist.irecv(torch.zeros(1), 1, group=pair, tag=1)
            for tag in (2, 1):
                dist.recv(torch.zeros(1), 1, tag=tag)
            early.wait()

    timeline = launch(out_of_order, 3, pace=Pace(1.0, Link(latency=0.25))).timeline
    held = [(span.start, span.end) for span in timeline.of(2) if not span.background]
    assert held == [(0.0, 2.0), (2.0, 2.25), (2.25, 3.0), (3.0, 3.25)]


# Collectives


def all_reduce(rank: int) -> None:
    dist.all_reduce(torch.zeros(30_000))


def all_gather(rank: int) -> None:
    n = dist.get_world_size()
    dist.all_gather([torch.zeros(10_000) for _ in range(n)], torch.zeros(10_000))


def reduce_scatter(rank: int) -> None:
    n = dist.get_world_size()
    dist.reduce_scatter(torch.zeros(10_000), [torch.zeros(10_000) for _ in range(n)])


def all_to_all(rank: int) -> None:
    dist.all_to_all_single(torch.zeros(30_000), torch.zeros(30_000))


def broadcast(rank: int) -> None:
    dist.broadcast(torch.zeros(30_000), 0)


def reduce(rank: int) -> None:
    dist.reduce(torch.zeros(30_000), 0)


def gather(rank: int) -> None:
    n = dist.get_world_size()
    dist.gather(torch.zeros(10_000), [torch.zeros(10_000) for _ in range(n)] if rank == 0 else None)


def scatter(rank: int) -> None:
    n = dist.get_world_size()
    dist.scatter(torch.zeros(10_000), [torch.zeros(10_000) for _ in range(n)] if rank == 0 else None)


def barrier(rank: int) -> None:
    dist.barrier()


@pytest.mark.parametrize(
    ("collective", "steps", "bytes_in_a_step"),
    [
        (all_reduce, 4, 40_000),
        (all_gather, 2, 40_000),
        (reduce_scatter, 2, 40_000),
        (all_to_all, 2, 40_000),
        (broadcast, 2, 120_000),
        (reduce, 2, 120_000),
        (gather, 2, 40_000),
        (scatter, 2, 40_000),
        (barrier, 4, 0),
    ],
)
def test_a_collective_takes_the_steps_of_its_algorithm_on_all_its_members(
    collective: Callable[[int], None], steps: int, bytes_in_a_step: int
) -> None:
    """On three ranks a ring has two steps, an all-reduce two rings, and a tree two levels (Thakur et al. 2005)."""
    timeline = launch(collective, 3, pace=Pace(link=Link(latency=0.03, bandwidth=1e6))).timeline
    expected = steps * (0.03 + bytes_in_a_step / 1e6)
    assert [ends(timeline, rank) for rank in range(3)] == pytest.approx([expected] * 3, rel=EXACT)
    assert all(timeline.transferring(rank) == pytest.approx(expected, rel=EXACT) for rank in range(3))


@pytest.mark.parametrize("collective", [all_reduce, broadcast, gather, barrier])
def test_a_collective_begins_when_the_last_member_has_come(collective: Callable[[int], None]) -> None:
    def one_late(rank: int) -> None:
        with compute("forward", work=float(rank == 2)):
            pass
        collective(rank)

    timeline = launch(one_late, 3, pace=Pace(1.0, Link(latency=0.25))).timeline
    assert [timeline.waiting(rank) for rank in range(3)] == [1.0, 1.0, 0.0]
    assert len({ends(timeline, rank) for rank in range(3)}) == 1


def ring_seconds(steps: int, size: float, pace: Pace, n: int) -> float:
    """Seconds of a ring of n ranks: the longest chain of messages, each of which needs the one before.

    Message k of a rank leaves after its message k - 1, and after message k - 1 of the rank before it has come.
    """

    @functools.cache
    def left(k: int, rank: int) -> float:
        if k == 0:
            return 0.0
        here, before = link(rank), link((rank - 1) % n)
        begun = max(left(k - 1, rank), left(k - 1, (rank - 1) % n) + before.latency * (k > 1))
        return begun + size / here.bandwidth

    def link(rank: int) -> Link:
        is_inside = pace.node(rank) == pace.node((rank + 1) % n)
        found = pace.link if is_inside else pace.inter_node
        assert found
        return found

    return max(left(steps, rank) + link(rank).latency for rank in range(n))


@pytest.mark.parametrize(
    ("collective", "turns", "size"), [(all_reduce, 2, 40_000), (all_gather, 1, 40_000), (reduce_scatter, 1, 40_000)]
)
@pytest.mark.parametrize(("inside", "between"), [((0.0, 1e6), (0.25, 1e6)), ((0.125, 1e6), (0.25, 1e5))])
def test_a_ring_over_two_nodes_takes_as_long_as_its_messages(
    collective: Callable[[int], None], turns: int, size: int, inside: tuple[float, float], between: tuple[float, float]
) -> None:
    pace = Pace(link=Link(*inside), inter_node=Link(*between), devices_per_node=2)
    timeline = launch(collective, 3, pace=pace).timeline
    assert timeline.makespan == pytest.approx(ring_seconds(turns * 2, size, pace, 3), rel=EXACT)


@pytest.mark.parametrize(("per_node", "nodes"), [(2, None), (4, None), (8, 2), (3, None)])
def test_the_all_reduce_of_torch_takes_as_long_as_a_ring_by_hand(per_node: int, nodes: int | None) -> None:
    def by_hand(rank: int) -> None:
        ring_all_reduce(torch.zeros(8000))

    def at_once(rank: int) -> None:
        dist.all_reduce(torch.zeros(8000))

    for inside, between in ((1e-3, 1e6), (1e-3, 1e9)), ((4e-3, 1e9), (2e-3, 1e5)):
        pace = Pace(None, Link(*inside), Link(*between), devices_per_node=per_node, nodes=nodes)
        times = [launch(ring, 8, pace=pace).timeline.makespan for ring in (by_hand, at_once)]
        assert times[0] == pytest.approx(times[1], rel=EXACT)


def test_a_ring_over_two_nodes_crosses_between_them_only_where_it_must() -> None:
    """A piece takes 14 hops around eight ranks, not quite two rounds of six links inside and two between."""
    pace = Pace(link=Link(0.001), inter_node=Link(0.004), devices_per_node=4)
    assert launch(all_reduce, 8, pace=pace).timeline.makespan == pytest.approx(10 * 0.001 + 4 * 0.004, rel=EXACT)


def test_a_tree_over_two_nodes_takes_the_slowest_link_in_each_step() -> None:
    def seconds(inside: float, between: float) -> float:
        pace = Pace(link=Link(latency=inside), inter_node=Link(latency=between), devices_per_node=2)
        return launch(broadcast, 3, pace=pace).timeline.makespan

    assert seconds(0.0, 0.25) == seconds(0.125, 0.25) == 2 * 0.25
    assert seconds(0.5, 0.25) == 2 * 0.5


def test_a_monitored_barrier_is_a_barrier() -> None:
    def meet(rank: int) -> None:
        with compute("forward", work=rank):
            pass
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=5))

    timeline = launch(meet, 3, pace=Pace(1.0, Link(latency=0.25))).timeline
    assert [timeline.waiting(rank) for rank in range(3)] == [2.0, 1.0, 0.0]
    assert timeline.makespan == 2.0 + 4 * 0.25
    with pytest.raises(Deadlock, match="rank 1 has already returned without that barrier"):
        launch(lambda rank: None if rank else dist.monitored_barrier(), 2)


def test_collectives_of_a_group_come_one_after_the_other_and_other_groups_do_not_mind() -> None:
    def two_groups(rank: int) -> None:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        works = [
            dist.all_reduce(bytes_of(MB), group=group, async_op=True) for group in [halves[rank // 2]] * 2 + [None]
        ]
        for work in works:
            work.wait()

    timeline = launch(two_groups, 4, pace=Pace(link=Link(bandwidth=MB))).timeline
    # On two ranks a megabyte takes two times half a second, on four six times a quarter of one.
    assert {span.end for span in of_kind(timeline, 0, "transfer")} == {1.0, 1.5, 2.0}


def test_a_root_stays_until_all_have_come_and_a_member_that_never_comes_is_a_deadlock() -> None:
    def without_the_last(rank: int) -> None:
        if rank < 2:
            dist.broadcast(torch.zeros(1), 0)

    with pytest.raises(Deadlock, match="rank 2 has already returned without that broadcast"):
        launch(without_the_last, 3, pace=Pace(1.0))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_ring_of_messages_takes_what_theory_says(n: int) -> None:
    """2 (n - 1) steps, each a piece of the tensor and a latency (Patarasuk and Yuan 2009)."""

    def ring(rank: int, numbers: int) -> torch.Tensor:
        tensor = torch.full((numbers,), float(rank))
        ring_all_reduce(tensor)
        return tensor

    numbers = n * 1000
    run = launch(ring, n, (numbers,), pace=Pace(link=Link(latency=0.125, bandwidth=1e5)))
    assert torch.equal(run.results[0], torch.full((numbers,), float(sum(range(n)))))
    expected = 2 * (n - 1) * (0.125 + 4 * numbers / n / 1e5)
    assert [ends(run.timeline, rank) for rank in range(n)] == pytest.approx([expected] * n, rel=EXACT)


# Waiting


def test_asking_whether_a_work_is_completed_waits_for_it() -> None:
    def ask(rank: int) -> bool:
        work = dist.all_reduce(torch.zeros(4), async_op=True)
        answer = work.is_completed()
        with compute("forward"):
            pass
        work.wait()
        return answer

    run = launch(ask, 2, pace=Pace(1.0, Link(latency=0.25)))
    assert run.results == [True, True]
    assert of_kind(run.timeline, 0, "forward")[0].start == 0.5


def take_futures(rank: int, inside: bool) -> None:
    """Begin two all-reduces in a mark (or before it) whose futures are waited for out of sight."""

    def begin() -> torch.futures.Future:
        return dist.all_reduce(torch.ones(4), async_op=True).get_future()

    if inside:
        with compute("backward"):
            progress(0.5)
            futures = [begin(), begin()]
            torch.futures.wait_all(futures)
    else:
        futures = [begin(), begin()]
    with compute("optimizer"):
        torch.futures.wait_all(futures)
    begin().wait()


@pytest.mark.parametrize(("inside", "update"), [(True, 1.5), (False, 1.0)])
def test_a_future_that_was_taken_counts_as_waited_for_where_its_mark_ends_or_before_the_next_thing(
    inside: bool, update: float
) -> None:
    pace = Pace({"backward": 1.0, "optimizer": 1.0}, Link(latency=0.25))  # an all-reduce takes half a second
    timeline = launch(take_futures, 2, (inside,), pace=pace).timeline
    assert of_kind(timeline, 0, "optimizer")[0].start == update
    assert timeline.makespan == update + 1.5  # the last one counts at the end of the run


def test_distributed_data_parallel_hides_its_gradients_behind_the_backward_pass() -> None:
    def one_step(rank: int) -> torch.Tensor:
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1, bias=False))
        dist.barrier()
        with compute("forward"):
            loss = model(torch.full((1, 4), float(rank))).sum()
        with compute("backward"):
            loss.backward()
        with compute("optimizer"):
            pass
        return model.module.weight.grad

    pace = Pace({"forward": 0.5, "backward": 0.25, "optimizer": 1.0}, Link(latency=0.125))
    run = launch(one_step, 4, pace=pace)
    assert all(torch.equal(gradient, torch.full((1, 4), 1.5)) for gradient in run.results)  # mean of 0, 1, 2 and 3
    for rank in range(4):
        (backward,), (update,) = (of_kind(run.timeline, rank, kind) for kind in ("backward", "optimizer"))
        # The one bucket leaves when its gradient is computed, at the end, and takes six latencies from there.
        assert update.start == backward.start + 0.25 + 6 * 0.125


def send_from_hooks(rank: int, make: Callable[[], tuple[nn.Module, list[Any]]]) -> list[float]:
    """The time on the clock at which each gradient can leave, as shares of the backward pass of a second."""
    model, watched = make()
    times: list[float] = []
    for parameter in watched:
        parameter.register_post_accumulate_grad_hook(lambda _: times.append(now()))
    loss = model(torch.ones(1, 4)).sum()
    with compute("backward"):
        loss.backward()
    return times


def three_layers() -> Any:
    """Layers of 12, 6 and 2 numbers."""
    return [nn.Linear(width, width - 1, bias=False) for width in (4, 3, 2)]


def plain() -> tuple[nn.Module, list[Any]]:
    model = nn.Sequential(*three_layers())
    return model, list(model.parameters())


def with_a_frozen_layer() -> tuple[nn.Module, list[Any]]:
    first, second, third = three_layers()
    second.requires_grad_(False)
    return nn.Sequential(first, second, third), [first.weight, third.weight]


def used_twice() -> tuple[nn.Module, list[Any]]:
    twice, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)
    return nn.Sequential(twice, twice, last), [twice.weight, last.weight]


class Again(nn.Module):
    """A module that is computed again in its backward pass."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.module, x.requires_grad_() if x.is_leaf else x, use_reentrant=True)


def computed_again() -> tuple[nn.Module, list[Any]]:
    layers = three_layers()
    return nn.Sequential(*map(Again, layers)), [layer.weight for layer in layers]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (plain, [2 / 20, 8 / 20, 1.0]),
        (with_a_frozen_layer, [2 / 14, 1.0]),
        (used_twice, [8 / 40, 1.0]),
        (computed_again, [1.0, 1.0, 1.0]),  # nobody can know how much is still to come
    ],
)
def test_a_gradient_leaves_when_its_share_of_the_backward_pass_is_done(make: Any, expected: list[float]) -> None:
    (times,) = launch(send_from_hooks, 1, (make,), pace=Pace(1.0)).results
    assert times == pytest.approx(expected, rel=EXACT)


def test_what_a_mark_computes_leaves_when_it_is_over() -> None:
    def relay(rank: int) -> None:
        with compute("forward"):
            if rank:
                dist.recv(torch.zeros(1), rank - 1)
            if rank < 2:
                dist.send(torch.zeros(1), rank + 1)

    timeline = launch(relay, 3, pace=Pace(1.0, Link(latency=0.25))).timeline
    assert [ends(timeline, rank) for rank in range(3)] == [1.0, 2.25, 3.5]


def test_what_is_given_by_a_root_inside_a_mark_was_computed_before() -> None:
    def give(rank: int) -> None:
        with compute("forward") if rank == 0 else contextlib.nullcontext():
            dist.broadcast(torch.zeros(1), 0)

    timeline = launch(give, 2, pace=Pace(1.0, Link(latency=0.25))).timeline
    assert [ends(timeline, rank) for rank in range(2)] == [1.25, 1.25]


def test_a_work_that_nobody_waits_for_is_told_as_in_a_measured_run() -> None:
    def forgetful(rank: int) -> None:
        dist.all_reduce(torch.zeros(1), async_op=True)

    with pytest.raises(RankFailed, match="began all_reduce and returned without waiting for it"):
        launch(forgetful, 2, pace=Pace(1.0))


def one_after_the_other(rank: int, is_async: bool) -> float:
    """Broadcast from rank 0, all-reduce a part of that tensor, and send the part to the next rank, too."""
    tensor = torch.full((2, 2), 3.0 * (rank + 1)).t()[:, :1]  # with gaps
    first: Any = dist.broadcast(tensor, 0, async_op=True)
    second: Any = dist.all_reduce(tensor[:1], async_op=is_async)
    third: Any = dist.isend(tensor[:1], (rank + 1) % 3)
    dist.recv(came := torch.zeros(1, 1), (rank - 1) % 3)
    for work in (first, second, third) if is_async else (first, third):
        work.wait()
    return float(tensor.sum() + came)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_operation_finds_what_the_collective_before_it_leaves_in_its_tensor(is_async: bool) -> None:
    """The same order as in the stream of a GPU."""
    assert launch(one_after_the_other, 3, (is_async,), pace=Pace()).results == [9.0 + 3.0 + 9.0] * 3


# Programs that depend on the machine


def in_two_groups(rank: int, first: Any, second: Any, n: int = 2) -> list[float]:
    """Two all-reduces at once, of two views of one tensor: among neighbors, and among ranks with others between."""
    neighbors = [dist.new_group([0, 1][:n]), dist.new_group([2, 3][:n])]
    apart = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tensor = torch.arange(1.0, 9.0).view(4, 2)
    works = [dist.all_reduce(tensor[first], group=neighbors[rank // 2], async_op=True)] if rank % 2 < n else []
    works.append(dist.all_reduce(tensor[second], group=apart[rank % 2], async_op=True))
    for work in works:
        work.wait()
    return tensor.flatten().tolist()


def test_two_groups_that_reduce_one_tensor_at_once_are_told_that_nothing_puts_them_into_an_order() -> None:
    with pytest.raises(RankFailed, match=r"all_reduce in another group still works on this tensor.* Call wait\(\)"):
        launch(in_two_groups, 4, (slice(0, 3), slice(2, 4)), pace=Pace())


@pytest.mark.parametrize(("first", "n"), [(slice(0, 2), 2), (slice(0, 4), 1)])
def test_two_groups_that_share_no_numbers_or_do_nothing_may_reduce_at_once(first: slice, n: int) -> None:
    of_all = launch(in_two_groups, 4, (first, slice(2, 4), n), pace=Pace()).results
    doubled = 2.0 if n == 2 else 1.0
    assert of_all == [[doubled, 2 * doubled, 3 * doubled, 4 * doubled, 10.0, 12.0, 14.0, 16.0]] * 4


def test_whether_a_message_has_come_is_not_to_be_asked() -> None:
    def ask(rank: int) -> None:
        if rank == 0:
            work: Any = dist.irecv(torch.zeros(1), 1)
            if not work.is_completed():
                dist.send(torch.zeros(1), 1)
            work.wait()
        else:
            dist.recv(torch.zeros(1), 0)
            dist.send(torch.zeros(1), 0)

    with pytest.raises(RankFailed, match=r"whether a message has come.* Call wait\(\) where you need the message"):
        launch(ask, 2, pace=Pace(1.0))


def serve(rank: int) -> list[float]:
    """Rank 0 serves the others as they come, with a receive of rank 1's second message waiting beside."""
    n, box, named = dist.get_world_size(), torch.zeros(1), torch.zeros(1)
    if rank:
        for number in (1, 2):
            with compute("forward", work=rank):
                pass
            dist.send(torch.full((1,), 10.0 * rank + number), 0)
        return []
    came = []
    for _ in range(2 * (n - 1) - 1):
        dist.recv(box)
        came.append(float(box))
    dist.recv(named, 1)
    return [*came, float(named)]


def test_a_receive_that_names_no_sender_has_one_where_there_are_two_ranks_and_is_refused_where_there_are_more() -> None:
    run = launch(serve, 2, pace=Pace(1.0, Link(latency=0.25)))
    assert run.results[0] == [11.0, 12.0]
    assert [span.end for span in of_kind(run.timeline, 0, "transfer")] == [1.25, 2.25]
    with pytest.raises(RankFailed, match=r"Whose message comes first would depend on the machine.* say src="):
        launch(serve, 3, pace=Pace(1.0))


def test_two_receives_that_wait_together_get_the_messages_in_order_whether_or_not_they_name_the_sender() -> None:
    def two(rank: int) -> list[float]:
        if rank:
            return serve(rank)
        boxes = [torch.zeros(1), torch.zeros(1)]
        works: list[Any] = [dist.irecv(boxes[0], 1), dist.irecv(boxes[1])]
        for work in reversed(works):
            work.wait()
        return [float(box) for box in boxes]

    run = launch(two, 2, pace=Pace(1.0))
    assert run.results[0] == [11.0, 12.0]
    assert run.timeline.waiting(0) == 2.0


def in_a_callback(rank: int) -> None:
    tensor = torch.ones(1)
    work: Any = dist.all_reduce(tensor, async_op=True)
    work.get_future().then(lambda _: dist.all_reduce(tensor)).wait()
    work.wait()


def in_a_callback_that_nobody_waits_for(rank: int) -> None:
    """Begin an operation in a callback, which may have been called already or not."""
    tensor, over = torch.ones(1), threading.Event()

    def again(_: Any) -> None:
        try:
            dist.all_reduce(tensor)
        finally:
            over.set()

    work: Any = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    time.sleep(0.1 * rank)
    future.add_done_callback(again)
    work.wait()
    over.wait()


def marks_in_threads(rank: int) -> None:
    def mark() -> None:
        with compute("forward"):
            time.sleep(0.01)

    threads = [threading.Thread(target=mark) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (in_a_callback, "all_reduce"),
        (in_a_callback_that_nobody_waits_for, "all_reduce"),
        (marks_in_threads, "a mark of the kind 'forward'"),
    ],
)
def test_the_clock_follows_the_thread_of_the_function_and_says_so(fn: Callable[[int], None], what: str) -> None:
    launch(fn, 2)  # on the real clock anybody may do it
    with pytest.raises(RankFailed, match=f"Another thread than that of the function has begun {what}, "):
        launch(fn, 2, pace=Pace(1.0), timeout=20)


def changes_what_is_on_its_way(rank: int) -> tuple[float, float]:
    total, message = torch.ones(100_000), torch.ones(100_000)
    adding: Any = dist.all_reduce(total, async_op=True)
    total.zero_()
    moving: Any = (dist.irecv if rank else dist.isend)(message, 1 - rank)
    message.zero_()
    adding.wait()
    moving.wait()
    return float(total.mean()), float(message.mean())


def test_what_is_done_to_a_tensor_on_its_way_is_lost() -> None:
    """On a measured run it depends on who is first. So it does in PyTorch."""
    assert launch(changes_what_is_on_its_way, 2, pace=Pace()).results == [(2, 0), (2, 1)]


def test_two_ranks_that_wait_for_each_other_are_a_deadlock_here_too() -> None:
    def both_receive(rank: int) -> None:
        dist.recv(torch.zeros(1), 1 - rank)

    with pytest.raises(Deadlock, match="0 waits to receive from 1, 1 waits to receive from 0"):
        launch(both_receive, 2, pace=Pace(1.0))


def test_a_member_that_has_not_begun_its_run_is_waited_for(tmp_path: Path) -> None:
    came = Entry(group=7, peer=-1, tag=0, order=0, bytes=8, posted=1.5, arrival=0.0)

    def begin_and_come() -> None:
        Entries(f"{tmp_path}/times-", rank=1).write(came)

    late = threading.Timer(0.05, begin_and_come)
    early = Entries(f"{tmp_path}/times-", rank=0)
    late.start()
    assert early.of(1, (7, -1, 0, 0)) == came
    late.join()


# The same everywhere


class Event(NamedTuple):
    """One step of a random program: kind (c compute, s message, a all-reduce, b barrier of a pair), ranks, amount."""

    what: str
    rank: int
    other: int
    size: int


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[Event]]:
    n = draw(st.integers(2, 4))
    ranks = st.integers(0, n - 1)
    event = st.builds(Event, st.sampled_from("ccssa"), ranks, ranks, st.integers(1, 8))
    return n, draw(st.lists(event, max_size=12))


def follow(rank: int, events: list[Event]) -> None:
    """Run events: computations, all-reduces, and messages received at once, whose senders wait at the end."""
    works = []
    for what, one, other, size in events:
        if what == "c" and rank == one:
            with compute("forward", work=size):
                pass
        elif what == "s" and one != other:
            if rank == one:
                works.append(dist.isend(bytes_of(size), other))
            elif rank == other:
                dist.recv(bytes_of(size), one)
        elif what == "a":
            dist.all_reduce(bytes_of(size))
    for work in works:
        work.wait()


def by_hand(n: int, events: list[Event], pace: Pace) -> list[float]:
    """The last time on each rank's clock, from the rules alone; two ranks are a node."""
    clock, sent = [0.0] * n, [0.0] * n
    link_free: dict[tuple[int, bool], float] = {}
    for what, one, other, size in events:
        if what == "c":
            clock[one] += size * pace.device  # type: ignore[operator]
        elif what == "s" and one != other:
            inside = one // 2 == other // 2
            link = pace.link if inside else pace.inter_node
            assert link
            start = max(clock[one], link_free.get((one, inside), 0.0))
            link_free[one, inside] = sent[one] = start + size / link.bandwidth
            clock[other] = max(clock[other], link_free[one, inside] + link.latency)
            sent[one] = max(link_free.get((one, True), 0.0), link_free.get((one, False), 0.0))
        elif what == "a":
            clock = [max(clock) + ring_seconds(2 * (n - 1), size / n, pace, n)] * n
    return [max(pair) for pair in zip(clock, sent, strict=True)]


def paced(device: float, inside: tuple[float, float], between: tuple[float, float]) -> Pace:
    return Pace(device, Link(*inside), Link(*between), devices_per_node=2)


speeds = st.sampled_from([0.1, 0.3, 1.0])
links = st.tuples(speeds, speeds)
random_programs = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def run_program(n: int, events: list[Event], pace: Pace) -> Timeline:
    return launch(follow, n, (events,), pace=pace).timeline


@random_programs
@given(programs(), speeds, links, links)
def test_random_programs_end_where_the_rules_say(
    program: tuple[int, list[Event]], device: float, inside: tuple[float, float], between: tuple[float, float]
) -> None:
    n, events = program
    pace = paced(device, inside, between)
    timeline = run_program(n, events, pace)
    expected = by_hand(n, events, pace)
    for rank in range(n):
        held = [span.end for span in timeline.of(rank) if not span.background]
        assert max(held, default=0.0) == pytest.approx(expected[rank], rel=EXACT)
    assert timeline.makespan == pytest.approx(max(expected), rel=EXACT)


@random_programs
@given(programs(), speeds, links, links, st.integers(0, 4))
def test_a_faster_device_or_link_never_makes_a_program_longer(
    program: tuple[int, list[Event]],
    device: float,
    inside: tuple[float, float],
    between: tuple[float, float],
    which: int,
) -> None:
    n, events = program
    slow = [device, *inside, *between]
    fast = list(slow)
    fast[which] *= 2 if which in (2, 4) else 0.5  # bandwidths grow, seconds shrink
    before, after = (run_program(n, events, paced(d, (a, b), (c, e))) for d, a, b, c, e in (slow, fast))
    assert after.makespan <= before.makespan * (1 + 1e-12)


def busy_step(rank: int, scale: float = 1.0) -> None:
    """Run operations of all kinds, in an order that a busy machine would change."""
    n = dist.get_world_size()
    works = []
    for k in range(6):
        with compute("forward", micro_batch=k, work=1 + (rank * 7 + k) % 3):
            time.sleep(0.001 * ((rank + k) % 2))
        works.append(dist.isend(bytes_of(1000 * (k + 1)), (rank + 1) % n))
        dist.recv(bytes_of(1000 * (k + 1)), (rank - 1) % n)
        with compute("backward", micro_batch=k):
            progress(0.5)
            works.append(dist.all_reduce(torch.ones(100 * (k + 1)), async_op=True))
    for work in works:
        work.wait()


BUSY = {"forward": 0.1, "backward": 0.3}
SLOW_LINK = {"latency": 0.007, "bandwidth": 1e4}


@contextlib.contextmanager
def loaded_cores(n: int) -> Iterator[None]:
    hogs = [Process(target=_spin, daemon=True) for _ in range(n)]
    for hog in hogs:
        hog.start()
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.join()


def _spin() -> None:
    while True:
        pass


def test_a_run_gives_the_same_timeline_to_the_bit_on_a_busy_machine_too() -> None:
    pace = Pace(BUSY, Link(**SLOW_LINK))
    first = launch(busy_step, 4, pace=pace).timeline
    with loaded_cores(2):
        again = [launch(busy_step, 4, pace=pace).timeline for _ in range(3)]
    assert all(timeline.spans == first.spans for timeline in again)
    assert first.makespan > 6 * 0.4


def test_a_fault_in_an_emulated_run_leaves_the_next_one_as_if_nothing_had_been() -> None:
    def fails(rank: int) -> None:
        with compute("forward"):
            dist.all_reduce(torch.ones(1))
        raise ValueError("on purpose")

    before = launch(busy_step, 2, pace=Pace(BUSY)).timeline
    with pytest.raises(RankFailed, match="on purpose"):
        launch(fails, 2, pace=Pace(1.0))
    assert launch(busy_step, 2, pace=Pace(BUSY)).timeline.spans == before.spans
