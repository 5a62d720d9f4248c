"""The closed forms that estimates use, against the simulator playing the very schedules action by action."""

from __future__ import annotations

import pytest

from benchmarks._published import longest_rank
from course_lib.planner import Plan, simulate
from course_lib.planner.bubbles import Work, bubble_seconds, exposed_messages, in_flight
from course_lib.schedules import SCHEDULES, Schedule, peak_in_flight

KINDS = [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4)]
KINDS += [("zb_h1", 1), ("zb_h2", 1), ("zbv", 2), ("dualpipev", 2)]
WORKS = [Work(1.0, 1.0, 1.0), Work(1.0, 1.2, 0.8), Work(1.0, 1.5, 1.0)]


def plan_of(name: str, p: int, v: int, **more: object) -> Plan:
    return Plan(pp=p, schedule=name, virtual_stages=v, **more)  # type: ignore[arg-type]


def schedule_of(name: str, p: int, m: int, v: int) -> Schedule:
    return SCHEDULES[name](p * v, m, v) if name == "interleaved_1f1b" else SCHEDULES[name](p * v, m)


@pytest.mark.parametrize(("name", "v"), KINDS)
@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 32)])
@pytest.mark.parametrize("work", WORKS)
def test_the_bubble_in_closed_form_is_the_simulated_one(name: str, v: int, p: int, m: int, work: Work) -> None:
    each = Work(*(seconds / v for seconds in work))
    step = longest_rank(simulate(schedule_of(name, p, m, v), *each))
    formula = m * work.total + bubble_seconds(plan_of(name, p, v), m, work, (p - 1) * work.total)
    if name == "dualpipev":  # a pair waits until the inputs of both are there; one after the other they wait for less
        assert step <= formula <= step + (p - 1) * max(each.forward, each.backward)
    else:
        assert formula == pytest.approx(step, rel=0.005)


@pytest.mark.parametrize(("name", "v"), [kind for kind in KINDS if kind[0] != "dualpipev"])
@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 16), (8, 64)])
def test_exposed_messages_are_the_simulated_ones(name: str, v: int, p: int, m: int) -> None:
    """With stages of equal halves, and sends that hold up nobody but the receiver."""
    schedule, transfer = schedule_of(name, p, m, v), 1e-3
    without, with_messages = (longest_rank(simulate(schedule, 1, 1, 1, seconds)) for seconds in (0, transfer))
    plan = plan_of(name, p, v, overlap=("pipeline",))
    assert exposed_messages(plan, m) == pytest.approx((with_messages - without) / transfer, abs=1e-6)


@pytest.mark.parametrize(("name", "v"), KINDS)
@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 32), (8, 16)])
def test_micro_batches_in_flight_are_those_of_the_schedule(name: str, v: int, p: int, m: int) -> None:
    counted = peak_in_flight(schedule_of(name, p, m, v))
    assert [in_flight(plan_of(name, p, v), rank, m) for rank in range(p)] == counted


def test_fewer_micro_batches_than_stages_are_all_in_flight() -> None:
    assert in_flight(plan_of("1f1b", 8, 1), 0, 3) == peak_in_flight(schedule_of("1f1b", 8, 3, 1))[0] == 3
