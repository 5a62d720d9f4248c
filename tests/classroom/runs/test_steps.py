"""The training steps that explorers and questions share, run on real ranks."""

from __future__ import annotations

from collections import Counter
from math import ceil

import pytest

from course_lib import Link, Pace, Span, Timeline
from course_lib.classroom.runs.steps import BUCKET, SMALL, after_barrier, pipeline_step, training_step
from course_lib.model import TinyGPT
from course_lib.schedules import SCHEDULES

PACE = Pace(device={"forward": 0.001, "backward": 0.002}, link=Link(latency=0.0, bandwidth=20e6))
PARAMETERS = list(TinyGPT(SMALL).parameters())
GRADIENTS = 4 * sum(parameter.numel() + 1 for parameter in PARAMETERS)  # and how many ranks had one


def kinds(step: Timeline, rank: int) -> Counter[str]:
    return Counter(span.kind for span in step.of(rank) if span.kind in ("forward", "backward", "optimizer"))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_is_one_forward_one_backward_and_one_update_on_every_rank(world_size: int) -> None:
    step = training_step(world_size, batch_size=6)
    assert step.world_size == world_size
    assert [kinds(step, rank) for rank in range(world_size)] == [
        Counter(forward=1, backward=1, optimizer=1)
    ] * world_size


@pytest.mark.parametrize("overlap", [True, False])
def test_every_rank_sends_its_gradients_once_around_the_ring(overlap: bool) -> None:
    step = training_step(4, batch_size=8, overlap=overlap)
    buckets = ceil(1 / BUCKET) if overlap else 1
    for rank in range(4):
        assert step.bytes_sent(rank) == 2 * 3 / 4 * (GRADIENTS + 4 * buckets)  # each with its number of samples


def test_without_overlap_a_step_takes_its_computing_and_one_exchange() -> None:
    step = training_step(2, batch_size=32, pace=PACE, overlap=False)
    assert step.origin == "emulated"
    computing = 32 / 2 * (0.001 + 0.002)
    exchange = 2 * (2 - 1) / 2 * (GRADIENTS + 4) / 20e6  # a ring of two; 4 bytes for the number of samples
    assert step.makespan == pytest.approx(computing + exchange, rel=1e-9)
    for rank in range(2):
        assert step.busy(rank) == pytest.approx(computing, rel=1e-9)
        assert step.transferring(rank) == pytest.approx(exchange, rel=1e-9)


def test_with_overlap_only_the_last_bucket_is_waited_for() -> None:
    step = training_step(2, batch_size=32, pace=PACE, overlap=True)
    for rank in range(2):
        (backward,) = (span for span in step.of(rank) if span.kind == "backward")
        *hidden, last = (span for span in step.of(rank) if span.kind == "transfer")
        assert [backward.start < span.start < span.end < backward.end for span in hidden] == [True, True]
        assert last.start == backward.end
        computing, exchange = 32 / 2 * (0.001 + 0.002), last.bytes / 20e6
        assert step.makespan == pytest.approx(computing + exchange, rel=1e-9)


def test_the_same_step_takes_the_same_time_to_the_bit() -> None:
    one, other = (training_step(4, batch_size=8, pace=PACE) for _ in range(2))
    assert one == other


def test_a_pipeline_takes_as_long_as_its_layers() -> None:
    # The second stage has three times the work: 2 micro-batches keep it busy while the first one fills and drains.
    step = pipeline_step(SCHEDULES["1f1b"](2, 2), Pace({"forward": 1.0, "backward": 2.0}), layers=[1, 3])
    assert step.makespan == pytest.approx(1 + 2 * 3 * (1 + 2) + 2, rel=1e-9)
    assert [step.busy(rank) for rank in range(2)] == pytest.approx([2 * 3, 2 * 9], rel=1e-9)


def step_spans(rank: int, start: float) -> list[Span]:
    """Spans of a barrier that ends at `start`, and of a step of three time units with a transfer in it."""
    return [
        Span(rank, "wait", "barrier", start - 1, start),
        Span(rank, "forward", "", start, start + 1),
        Span(rank, "transfer", "all_reduce", start + 1, start + 2),
        Span(rank, "optimizer", "", start + 2, start + 3),
    ]


def test_the_last_step_is_cut_out_rank_by_rank() -> None:
    timeline = Timeline([s for t in (1, 10, 20) for rank in (0, 1) for s in step_spans(rank, t + 0.1 * rank)], 2)
    assert after_barrier(timeline).spans == step_spans(0, 20)[1:] + step_spans(1, 20.1)[1:]


def test_a_message_that_takes_no_time_is_part_of_the_step_it_follows_the_barrier_in() -> None:
    sent = Span(0, "transfer", "isend", 5.0, 5.0)
    timeline = Timeline([sent, Span(0, "wait", "barrier", 4.0, 5.0), sent, Span(0, "forward", "", 5.0, 6.0)], 1)
    assert after_barrier(timeline).spans == [sent, Span(0, "forward", "", 5.0, 6.0)]


def test_a_run_without_a_barrier_has_no_step() -> None:
    timeline = Timeline(step_spans(0, 1.0) + step_spans(1, 1.0)[1:], 2)
    with pytest.raises(ValueError, match=r"rank 1 met the others at no barrier; call dist\.barrier\(\)"):
        after_barrier(timeline)
