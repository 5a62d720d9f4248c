"""Real ranks on emulated clocks and the simulator, two independent ways, give the same times.

Links here have a latency and unlimited bandwidth, like the simulator's `transfer`.
"""

from __future__ import annotations

import pytest

from course_lib import Link, Pace, Span, Timeline
from course_lib.classroom.runs import pipeline_step
from course_lib.planner import simulate
from course_lib.schedules import SCHEDULES, Schedule

SECONDS = {"forward": 0.03, "backward": 0.05, "weight_grad": 0.02}
LATENCY = 0.007
SIZES = [(2, 2), (2, 5), (4, 4), (4, 8), (8, 8)]  # ranks, micro-batches; for some names twice as many stages
TWO_STAGES = ("interleaved_1f1b", "zbv", "dualpipev")
CASES = [(name, ranks, m) for name in SCHEDULES for ranks, m in SIZES]


def schedule_of(name: str, ranks: int, micro_batches: int) -> Schedule:
    if name == "interleaved_1f1b":  # takes multiples of the number of ranks
        micro_batches = -(-micro_batches // ranks) * ranks
    if name == "dualpipev":
        micro_batches = max(micro_batches, 2 * ranks)
    return SCHEDULES[name](ranks * (2 if name in TWO_STAGES else 1), micro_batches)


def actions(timeline: Timeline, rank: int) -> dict[tuple, Span]:
    return {(span.kind, span.stage, span.micro_batch): span for span in timeline.of(rank) if span.stage is not None}


def agree(schedule: Schedule, layers: list[int], latency: float) -> None:
    """Check that each action begins and ends when the simulator says, and that all totals are the same."""
    emulated = pipeline_step(schedule, Pace(SECONDS, Link(latency)), layers)
    forward, backward, weight_grad = ([seconds * n for n in layers] for seconds in SECONDS.values())
    simulated = simulate(schedule, forward, backward, weight_grad, latency)
    for rank in range(schedule.n_ranks):
        ours, theirs = actions(emulated, rank), actions(simulated, rank)
        assert list(ours) == list(theirs)
        moments = [moment for spans in (ours, theirs) for span in spans.values() for moment in (span.start, span.end)]
        half = len(moments) // 2
        assert moments[:half] == pytest.approx(moments[half:], abs=1e-9)
        assert emulated.waiting(rank) + emulated.transferring(rank) == pytest.approx(
            simulated.waiting(rank) + simulated.transferring(rank), abs=1e-9
        )
    assert emulated.makespan == pytest.approx(simulated.makespan, abs=1e-9)
    assert emulated.idle_fraction() == pytest.approx(simulated.idle_fraction(), abs=1e-9)


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), CASES)
def test_equal_stages_take_what_the_simulator_says(name: str, ranks: int, micro_batches: int) -> None:
    schedule = schedule_of(name, ranks, micro_batches)
    agree(schedule, [1] * schedule.n_stages, 0.0)


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), CASES)
def test_unequal_stages_and_slow_links_take_what_the_simulator_says(name: str, ranks: int, micro_batches: int) -> None:
    schedule = schedule_of(name, ranks, micro_batches)
    agree(schedule, [1 + 7 * stage % 3 for stage in range(schedule.n_stages)], LATENCY)


@pytest.mark.parametrize("m", [1, 4, 8, 16])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_an_emulated_pipeline_has_the_textbook_bubble(p: int, m: int) -> None:
    """Huang et al. 2019, "GPipe": (p - 1) / (m + p - 1) of the time, if a forward pass is as long as any other."""
    step = pipeline_step(SCHEDULES["gpipe"](p, m), Pace({"forward": 0.5, "backward": 0.25, "weight_grad": 0.25}))
    assert step.idle_fraction() == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


def test_a_description_of_512_bytes_goes_ahead_of_a_stages_first_message() -> None:
    """Two stages, one micro-batch: over a link of 512 bytes per second, the last stage waits a second for it."""
    step = pipeline_step(SCHEDULES["gpipe"](2, 1), Pace(1.0, Link(bandwidth=512)))
    activation = 8 * 4 / 512  # one sample of eight numbers, there and its gradient back
    assert step.makespan == pytest.approx(1 + (1 + activation) + 2 + activation + 1, abs=1e-12)
