"""Simulated schedules against closed forms from papers, which share no code with the simulator."""

from __future__ import annotations

import pytest

from course_lib.planner import simulate
from course_lib.schedules import SCHEDULES, Action, Schedule, ScheduleError

SIZES = [(1, 3), (2, 2), (4, 8), (4, 32), (8, 16)]


def pipeline(name: str, p: int, m: int, v: int = 1) -> Schedule:
    return SCHEDULES[name](p * v, m, v) if name == "interleaved_1f1b" else SCHEDULES[name](p * v, m)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_idle_share_of_gpipe_and_1f1b_is_the_textbook_bubble(name: str, p: int, m: int) -> None:
    timeline = simulate(pipeline(name, p, m), forward=1.0, backward=2.0)
    assert timeline.idle_fraction() == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 32), (8, 16)])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(p: int, m: int, v: int) -> None:
    timeline = simulate(pipeline("interleaved_1f1b", p, m, v), 1 / v, 2 / v)
    ideal = 3 * m
    assert timeline.makespan / ideal - 1 == pytest.approx((p - 1) / (m * v))


def test_naive_layer_splitting_keeps_one_rank_busy_at_a_time() -> None:
    assert simulate(pipeline("naive", 4, 3), 1.0, 2.0).idle_fraction() == pytest.approx(3 / 4)


@pytest.mark.parametrize(("f", "b", "w"), [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.2, 1.0, 0.6)])
@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 32)])
def test_zb_h1_has_the_bubble_of_its_paper(p: int, m: int, f: float, b: float, w: float) -> None:
    timeline = simulate(pipeline("zb_h1", p, m), f, b, w)
    assert timeline.makespan - m * (f + b + w) == pytest.approx((p - 1) * (f + b - w))


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 64), (16, 64)])
def test_messages_cost_1f1b_what_the_zero_bubble_paper_says(p: int, m: int) -> None:
    f, b, w, transfer = 11.3, 11.2, 8.1, 0.4
    timeline = simulate(pipeline("1f1b", p, m), f, b, w, transfer)
    expected = (m + p - 1) * (f + b + w) + (2 * (p - 1) * (m / p + 1) - 2) * transfer
    assert timeline.makespan == pytest.approx(expected)


def test_the_slowest_stage_sets_the_pace() -> None:
    forward, backward = [1.0, 2.0, 1.0, 3.0], [2.0, 4.0, 2.0, 6.0]
    timeline = simulate(pipeline("1f1b", 4, 10), forward, backward)
    assert timeline.makespan == pytest.approx(sum(forward) + sum(backward) + 9 * (3.0 + 6.0))


def test_two_ranks_and_one_micro_batch_by_hand() -> None:
    spans = simulate(pipeline("gpipe", 2, 1), [1.0, 2.0], [4.0, 8.0], 0.5, transfer=[0.25, 99.0]).spans
    by_rank = [[(s.kind, s.name, s.start, s.end, s.micro_batch, s.stage) for s in spans if s.rank == r] for r in (0, 1)]
    assert by_rank[0] == [
        ("forward", "F", 0.0, 1.0, 0, 0),
        ("wait", "recv", 1.0, 11.75, None, None),
        ("transfer", "recv", 11.75, 12.0, None, None),
        ("backward", "B", 12.0, 16.5, 0, 0),
    ]
    assert by_rank[1] == [
        ("wait", "recv", 0.0, 1.0, None, None),
        ("transfer", "recv", 1.0, 1.25, None, None),
        ("forward", "F", 1.25, 3.25, 0, 1),
        ("backward", "B", 3.25, 11.75, 0, 1),
    ]


def test_everything_in_the_schedule_is_there_once_and_modelled() -> None:
    schedule = pipeline("zbv", 4, 9, 2)
    timeline = simulate(schedule, 1.0, 1.0, 1.0, 0.1)
    computed = sorted((s.rank, s.name, s.stage, s.micro_batch) for s in timeline.spans if s.stage is not None)
    assert computed == sorted((rank, *action) for rank, row in enumerate(schedule.actions) for action in row)
    assert timeline.origin == "modelled"
    assert all(span.peer is not None for span in timeline.spans if span.kind in ("wait", "transfer"))


def test_a_schedule_that_gets_stuck_says_who_waits_for_what() -> None:
    stuck = Schedule([[Action("B", 0, 0), Action("F", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)]])
    with pytest.raises(ScheduleError, match="rank 0"):
        simulate(stuck, 1.0, 2.0)
