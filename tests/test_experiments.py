"""The training step behind the explorer, run on real ranks."""

from __future__ import annotations

from collections import Counter

import pytest

from course_lib import Link, Pace, Span, Timeline
from course_lib.experiments import SMALL, fastest, last_steps, training_step
from course_lib.model import TinyGPT

PACE = Pace(device={"forward": 0.001, "backward": 0.002}, link=Link(latency=0.0, bandwidth=20e6))
GRADIENTS = 4 * sum(parameter.numel() for parameter in TinyGPT(SMALL).parameters())


def kinds(step: Timeline, rank: int) -> Counter[str]:
    return Counter(span.kind for span in step.of(rank) if span.kind in ("forward", "backward", "optimizer"))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_is_one_forward_one_backward_and_one_update_on_every_rank(world_size: int) -> None:
    step = training_step(world_size, batch_size=6, repeat=2)
    assert step.world_size == world_size
    assert [kinds(step, rank) for rank in range(world_size)] == [
        Counter(forward=1, backward=1, optimizer=1)
    ] * world_size


@pytest.mark.parametrize("overlap", [True, False])
def test_every_rank_sends_its_gradients_once_around_the_ring(overlap: bool) -> None:
    step = training_step(4, batch_size=8, overlap=overlap)
    for rank in range(4):
        extra = step.bytes_sent(rank) - 2 * 3 / 4 * GRADIENTS
        assert 0 <= extra < 100  # the number of samples travels too


@pytest.mark.alone
def test_with_overlap_gradients_leave_before_the_backward_pass_is_over() -> None:
    step = training_step(2, batch_size=32, pace=PACE, overlap=True, repeat=5)
    (backward,) = (span for span in step.of(0) if span.kind == "backward")
    assert min(span.start for span in step.of(0) if span.kind == "transfer") < backward.end


def test_without_overlap_gradients_leave_after_the_backward_pass() -> None:
    step = training_step(2, batch_size=32, pace=PACE, overlap=False)
    for rank in range(2):
        (backward,) = (span for span in step.of(rank) if span.kind == "backward")
        assert min(span.start for span in step.of(rank) if span.kind in ("transfer", "wait")) >= backward.end


def test_a_paced_step_computes_for_as_long_as_its_share_takes_on_the_device() -> None:
    step = training_step(2, batch_size=32, pace=PACE)
    assert step.origin == "paced"
    durations = {span.kind: span.duration for span in step.of(1) if span.kind in ("forward", "backward")}
    clock = 1e-6  # times are differences of a clock that counts from long ago
    assert durations["forward"] >= 16 * 0.001 - clock
    assert durations["backward"] >= 16 * 0.002 - clock


def test_more_ranks_than_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=3 is less than world_size=4"):
        training_step(4, batch_size=3)


def step_spans(rank: int, start: float) -> list[Span]:
    """A step of three time units with a transfer in it."""
    return [
        Span(rank, "forward", "", start, start + 1),
        Span(rank, "transfer", "all_reduce", start + 1, start + 2),
        Span(rank, "optimizer", "", start + 2, start + 3),
    ]


def test_last_steps_are_cut_out_of_a_run_rank_by_rank() -> None:
    barrier = Span(1, "wait", "barrier", 13.2, 13.9)
    timeline = Timeline([s for t in (0, 10, 20) for r in (0, 1) for s in step_spans(r, t + 0.1 * r)] + [barrier], 2)
    second, third = last_steps(timeline, 2)
    assert second.spans == step_spans(0, 10) + step_spans(1, 10.1)
    assert third.spans == step_spans(0, 20) + step_spans(1, 20.1)
    assert third.origin == timeline.origin


def test_a_barrier_that_took_no_time_before_a_step_is_no_part_of_it() -> None:
    timeline = Timeline([Span(0, "wait", "barrier", 0, 0), *step_spans(0, 0)], 1)
    assert last_steps(timeline)[0].spans == step_spans(0, 0)


def test_steps_that_a_run_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="n=2 steps are not in this timeline; rank 0 has marked 1"):
        last_steps(Timeline(step_spans(0, 0.0), 1), 2)


def lasting(seconds: float, origin: str = "paced") -> Timeline:
    return Timeline([Span(0, "forward", "", 0.0, seconds)], 1, origin)


@pytest.mark.parametrize(
    ("origin", "seconds", "runs"),
    [
        ("paced", [1.0, 1.005], 2),
        ("paced", [1.5, 1.3, 1.0, 1.001], 4),
        ("paced", [1.6, 1.5, 1.4, 1.3, 1.2, 1.0], 6),
        ("measured", [1.0, 1.5], 2),
    ],
)
def test_paced_runs_are_repeated_until_the_two_fastest_agree(origin: str, seconds: list[float], runs: int) -> None:
    left = iter([*seconds, 0.1])
    step = fastest(lambda: lasting(next(left), origin), lambda step: step, repeat=2)
    assert step.makespan == 1.0
    assert len(list(left)) == len(seconds) + 1 - runs


def test_one_run_is_one_run() -> None:
    assert fastest(lambda: lasting(1.0), lambda step: step, repeat=1).makespan == 1.0
