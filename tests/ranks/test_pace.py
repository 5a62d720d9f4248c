"""A paced run lasts as long as its Pace says, and only the clock is arranged: the rest is real.

What a paced run may not be is too fast, so lower bounds are exact. It may be late, on a busy machine, so upper
bounds leave room: HURRY seconds, and the paced times are chosen so long that a wrong one would still show.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import Link, Pace, launch
from course_lib.timeline import compute, reach

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as if defined in a notebook cell

HURRY = 0.3  # seconds by which a busy machine may be late
CLOCK = 1e-4  # seconds that reading the clocks of two processes may differ


# The bubble of a pipeline


def pipeline(rank: int, stages: list[nn.Module], batches: list[torch.Tensor]) -> torch.Tensor:
    """All micro-batches forward, then all of them backward, through one stage on each rank."""
    last, stage = len(stages) - 1, stages[rank]
    inputs, outputs, works = [], [], []
    for i, batch in enumerate(batches):
        if rank > 0:
            dist.recv(batch, rank - 1)
        with compute("forward", micro_batch=i):
            inputs.append(batch.requires_grad_())
            outputs.append(stage(batch))
        if rank < last:
            works.append(dist.isend(outputs[i].detach(), rank + 1))
    for i in range(len(batches)):
        gradient = torch.ones(4, 8)
        if rank < last:
            dist.recv(gradient, rank + 1)
        with compute("backward", micro_batch=i):
            outputs[i].backward(gradient)
        if rank > 0:
            works.append(dist.isend(inputs[i].grad, rank - 1))  # type: ignore[arg-type]
    for work in works:
        work.wait()
    return stage[0].weight.grad


def one_process(stages: list[nn.Module], batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of the same stages, one after the other in this process."""
    for batch in batches:
        for stage in stages:
            batch = stage(batch)
        batch.backward(torch.ones(4, 8))
    return [stage[0].weight.grad for stage in stages]


def measured_bubble(p: int, m: int) -> float:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(p)]
    batches = [torch.randn(4, 8) for _ in range(m)]
    run = launch(pipeline, p, (stages, batches), pace=Pace(device={"forward": 0.05, "backward": 0.05}))
    assert all(map(torch.equal, run.results, one_process(stages, batches)))  # type: ignore[arg-type]
    assert run.timeline.origin == "paced"
    return run.timeline.idle_fraction()


@pytest.mark.alone
@pytest.mark.parametrize("m", [1, 4, 8, 16])
@pytest.mark.parametrize("p", [4, 8])
def test_a_paced_pipeline_shows_the_textbook_bubble(p: int, m: int) -> None:
    expected = (p - 1) / (m + p - 1)  # Huang et al. 2019, "GPipe"
    measured = [measured_bubble(p, m)]
    while abs(measured[-1] - expected) > 0.02 and len(measured) < 8:  # somebody else may have used the machine
        measured.append(measured_bubble(p, m))
    assert measured[-1] == pytest.approx(expected, abs=0.02), measured


# Compute


def one_mark(rank: int, kind: str, work: float) -> None:
    with compute(kind, work=work):
        pass


@pytest.mark.parametrize(
    ("device", "kind", "work", "expected"),
    [
        (0.1, "forward", 1.0, 0.1),
        (0.1, "forward", 2.5, 0.25),
        ({"forward": 0.1, "backward": 0.2}, "backward", 1.0, 0.2),
        ({"forward": 2.0}, "optimizer", 1.0, 0.0),
    ],
)
def test_a_mark_lasts_its_work_times_the_seconds_for_its_kind(
    device: float | dict[str, float], kind: str, work: float, expected: float
) -> None:
    run = launch(one_mark, 1, (kind, work), pace=Pace(device=device))
    (span,) = run.timeline.spans
    assert span.kind == kind
    assert expected - CLOCK <= span.duration < expected + HURRY


def test_a_mark_that_really_takes_longer_than_its_pace_keeps_its_real_length() -> None:
    def slow(rank: int) -> None:
        with compute("forward"):
            time.sleep(0.2)

    (span,) = launch(slow, 1, pace=Pace(device=0.01)).timeline.spans
    assert 0.2 <= span.duration < 0.2 + HURRY


def test_time_blocked_inside_a_mark_is_added_to_its_compute() -> None:
    def blocked_inside(rank: int) -> None:
        if rank == 0:
            with compute("forward"):
                dist.recv(torch.zeros(1), 1)
        else:
            time.sleep(0.4)
            dist.send(torch.zeros(1), 0)

    timeline = launch(blocked_inside, 2, pace=Pace(device=0.2)).timeline
    (span,) = [span for span in timeline.of(0) if span.kind == "forward"]
    blocked = timeline.waiting(0) + timeline.transferring(0)
    assert blocked > 0.3
    assert 0.2 - CLOCK <= span.duration - blocked < 0.2 + HURRY
    assert timeline.busy(0) == pytest.approx(span.duration - blocked)


def test_reach_lets_something_start_in_the_middle_of_a_mark() -> None:
    def buckets(rank: int) -> None:
        works = []
        with compute("backward"):
            for fraction in (0.25, 0.75):
                reach(fraction)
                works.append(dist.all_reduce(torch.ones(4), async_op=True))
        for work in works:
            work.wait()

    timeline = launch(buckets, 2, pace=Pace(device=0.8, link=Link(latency=0.05))).timeline
    for rank in (0, 1):
        (mark,) = [span for span in timeline.of(rank) if span.kind == "backward"]
        starts = sorted(span.start - mark.start for span in timeline.of(rank) if span.kind == "transfer")
        assert 0.2 - CLOCK <= starts[0] < 0.2 + HURRY
        assert 0.6 - CLOCK <= starts[-1] < 0.6 + HURRY
        assert 0.8 - CLOCK <= mark.duration < 0.8 + HURRY


# Messages


def send_once(rank: int, n_bytes: int, source: int, destination: int) -> float:
    """When the sender began and when the receiver had it, on the one clock of the machine."""
    data = torch.zeros(n_bytes, dtype=torch.uint8)
    began = time.perf_counter()
    if rank == source:
        dist.send(data, destination)
    if rank == destination:
        dist.recv(data, source)
    return began if rank == source else time.perf_counter()


@pytest.mark.parametrize(
    ("link", "n_bytes", "expected"),
    [
        (Link(latency=0.2), 4, 0.2),
        (Link(bandwidth=1e6), 200_000, 0.2),
        (Link(latency=0.15, bandwidth=1e6), 200_000, 0.35),
    ],
)
def test_a_message_takes_latency_plus_bytes_over_bandwidth(link: Link, n_bytes: int, expected: float) -> None:
    run = launch(send_once, 2, (n_bytes, 0, 1), pace=Pace(link=link))
    sent, received = run.results
    assert expected <= received - sent < expected + HURRY
    (transfer,) = [span for span in run.timeline.of(1) if span.kind == "transfer"]
    assert expected - HURRY < transfer.duration < expected + HURRY


def test_a_sender_is_free_when_its_message_is_on_its_way() -> None:
    run = launch(send_once, 2, (200_000, 0, 1), pace=Pace(link=Link(latency=1.0, bandwidth=1e6)))
    (transfer,) = [span for span in run.timeline.of(0) if span.kind == "transfer"]
    assert transfer.duration < 0.2 + HURRY
    sent, received = run.results
    assert received - sent >= 1.2


def test_messages_of_one_rank_leave_one_after_the_other() -> None:
    def two_messages(rank: int) -> float:
        data = torch.zeros(200_000, dtype=torch.uint8)
        call = dist.isend if rank == 0 else dist.irecv
        began = time.perf_counter()
        for work in [call(data, 1 - rank), call(data.clone(), 1 - rank)]:
            work.wait()
        return began if rank == 0 else time.perf_counter()

    sent, received = launch(two_messages, 2, pace=Pace(link=Link(latency=0.1, bandwidth=1e6))).results
    assert 0.5 <= received - sent < 0.5 + HURRY


def test_an_isend_does_not_hold_up_compute() -> None:
    def overlapping(rank: int) -> None:
        data = torch.zeros(500_000, dtype=torch.uint8)
        if rank == 0:
            work = dist.isend(data, 1)
            with compute("forward"):
                pass
            work.wait()
        else:
            dist.recv(data, 0)

    timeline = launch(overlapping, 2, pace=Pace(device=0.5, link=Link(bandwidth=1e6))).timeline
    (mark,) = [span for span in timeline.of(0) if span.kind == "forward"]
    assert 0.5 <= mark.duration < 0.5 + HURRY
    assert timeline.makespan < 0.5 + HURRY  # one second, if they came one after the other


@pytest.mark.parametrize(("destination", "expected"), [(1, 0.1), (2, 0.6)])
def test_a_message_between_nodes_takes_the_slower_link(destination: int, expected: float) -> None:
    pace = Pace(link=Link(latency=0.1), inter_node=Link(latency=0.6), devices_per_node=2)
    times = launch(send_once, 4, (4, 0, destination), pace=pace).results
    assert expected <= times[destination] - times[0] < expected + HURRY


def test_without_a_link_between_nodes_the_one_inside_counts() -> None:
    times = launch(send_once, 4, (4, 0, 2), pace=Pace(link=Link(latency=0.3), devices_per_node=2)).results
    assert times[2] - times[0] >= 0.3


# Collectives


def all_reduce(rank: int) -> None:
    dist.all_reduce(torch.zeros(30_000))


def all_gather(rank: int) -> None:
    dist.all_gather([torch.zeros(10_000) for _ in range(3)], torch.zeros(10_000))


def reduce_scatter(rank: int) -> None:
    dist.reduce_scatter(torch.zeros(10_000), [torch.zeros(10_000) for _ in range(3)])


def broadcast(rank: int) -> None:
    dist.broadcast(torch.zeros(30_000), 0)


@pytest.mark.parametrize(
    ("collective", "steps", "bytes_in_a_step"),
    [(all_reduce, 4, 40_000), (all_gather, 2, 40_000), (reduce_scatter, 2, 40_000), (broadcast, 2, 120_000)],
)
def test_a_collective_takes_the_steps_of_its_algorithm(
    collective: Callable[[int], None], steps: int, bytes_in_a_step: int
) -> None:
    """On three ranks a ring has two steps, an all-reduce two rings, and a tree two levels."""
    link = Link(latency=0.03, bandwidth=1e6)
    expected = steps * (0.03 + bytes_in_a_step / 1e6)
    run = launch(collective, 3, pace=Pace(link=link))
    for rank in range(3):
        transfer = [span for span in run.timeline.of(rank) if span.kind == "transfer"]
        took = transfer[-1].end - transfer[0].start
        assert expected - CLOCK <= took < expected + HURRY


def test_a_collective_over_two_nodes_takes_the_slower_link() -> None:
    pace = Pace(link=Link(latency=0.001), inter_node=Link(latency=0.1), devices_per_node=2)
    run = launch(all_reduce, 3, pace=pace)
    assert all(run.timeline.transferring(rank) >= 4 * 0.1 - CLOCK for rank in range(3))


def test_collectives_that_overlap_share_the_link() -> None:
    def two_at_once(rank: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        works = [dist.all_reduce(torch.zeros(50_000), async_op=True) for _ in range(2)]
        for work in works:
            work.wait()
        return time.perf_counter() - began

    run = launch(two_at_once, 2, pace=Pace(link=Link(bandwidth=1e6)))  # each moves 200 kB in 0.2 s
    assert all(0.4 <= seconds < 0.4 + HURRY for seconds in run.results)


def test_distributed_data_parallel_runs_at_the_pace_of_the_links() -> None:
    def one_step(rank: int) -> torch.Tensor:
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1, bias=False))
        dist.barrier()
        with compute("backward"):
            model(torch.full((1, 4), float(rank))).sum().backward()
        return model.module.weight.grad

    run = launch(one_step, 4, pace=Pace(link=Link(latency=0.05)))
    assert all(torch.equal(gradient, torch.full((1, 4), 1.5)) for gradient in run.results)  # mean of 0, 1, 2 and 3
    for rank in range(4):
        transfer = max((s for s in run.timeline.of(rank) if s.name == "all_reduce"), key=lambda span: span.end)
        assert 6 * 0.05 - CLOCK <= transfer.duration < 6 * 0.05 + HURRY


def test_a_paced_run_starts_on_all_ranks_together() -> None:
    run = launch(one_mark, 4, ("forward", 1.0), pace=Pace(device=0.02))
    assert max(span.start for span in run.timeline.spans) < HURRY


# Arguments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(latency=-1.0), "latency=-1.0"),
        (lambda: Link(latency=math.nan), "latency=nan"),
        (lambda: Link(bandwidth=0), "bandwidth=0"),
        (lambda: Link(bandwidth="fast"), "bandwidth='fast'"),  # type: ignore[arg-type]
        (lambda: Link(latency=True), "latency=True"),
        (lambda: Pace(device=-0.1), "device=-0.1"),
        (lambda: Pace(device={"forward": "slow"}), r"device\['forward'\]='slow'"),  # type: ignore[dict-item]
        (lambda: Pace(device={"sideways": 1.0}), "'sideways'.*forward, backward"),
        (lambda: Pace(device={"wait": 1.0}), "'wait'"),
        (lambda: Pace(link=0.001), "link=0.001 must be a Link"),  # type: ignore[arg-type]
        (lambda: Pace(inter_node=1e9), "inter_node=.* must be a Link"),  # type: ignore[arg-type]
        (lambda: Pace(devices_per_node=0), "devices_per_node=0"),
        (lambda: Pace(devices_per_node=2.5), "devices_per_node=2.5"),  # type: ignore[arg-type]
    ],
)
def test_a_pace_that_makes_no_sense_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_launch_wants_a_pace_and_says_which_kind_of_thing_it_got() -> None:
    with pytest.raises(TypeError, match=r"pace=0\.02 must be a Pace"):
        launch(one_mark, 1, ("forward", 1.0), pace=0.02)  # type: ignore[arg-type]


def test_a_link_adds_latency_and_bytes_over_bandwidth() -> None:
    assert Link(latency=0.5, bandwidth=100.0).seconds(50) == 1.0
    assert Link().seconds(10**12) == 0.0


@pytest.mark.parametrize(
    ("device", "seconds"),
    [({"backward": 0.02, "weight_grad": 0.01}, 0.06), ({"backward": 0.02}, 0.04), ({"weight_grad": 0.01}, None)],
)
def test_what_a_mark_includes_takes_its_own_time_too(device: dict[str, float], seconds: float | None) -> None:
    assert Pace(device).compute_seconds("backward", 2.0, "weight_grad") == pytest.approx(seconds)


def test_one_number_for_all_kinds_counts_once() -> None:
    assert Pace(0.02).compute_seconds("backward", 2.0, "weight_grad") == 0.04
