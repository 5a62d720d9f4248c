"""The closed forms of estimates, against simulations of the same schedules, action by action."""

from __future__ import annotations

from collections.abc import Iterator

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
    if name == "dualpipev":  # a pair waits for the inputs of both; separate actions would wait for less
        assert step <= formula <= step + (p - 1) * max(each.forward, each.backward)
    else:
        assert formula == pytest.approx(step, rel=0.005)


@pytest.mark.parametrize(("name", "v"), [kind for kind in KINDS if kind[0] != "dualpipev"])
@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 16), (8, 64)])
def test_exposed_messages_are_the_simulated_ones(name: str, v: int, p: int, m: int) -> None:
    """Forward, and the halves of backward, take equal times on all stages; sends block only the receiver."""
    schedule, transfer = schedule_of(name, p, m, v), 1e-3
    without, with_messages = (longest_rank(simulate(schedule, 1, 1, 1, seconds)) for seconds in (0, transfer))
    plan = plan_of(name, p, v, overlap=("pipeline",))
    assert exposed_messages(plan, m) == pytest.approx((with_messages - without) / transfer, abs=1e-6)


@pytest.mark.parametrize("lead", [0.0, 0.4, 1.0, 3.0])
@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 16), (8, 16), (16, 64)])
def test_messages_of_1f1b_hide_where_the_last_rank_takes_longer(p: int, m: int, lead: float) -> None:
    """Everybody waits for the last rank's logits, and the other ranks' messages travel meanwhile."""
    transfer = 1e-3
    seconds = [1.0] * (p - 1) + [1.0 + lead * transfer]
    without, with_messages = (simulate(SCHEDULES["1f1b"](p, m), seconds, 2, 0, each).makespan for each in (0, transfer))
    found = exposed_messages(plan_of("1f1b", p, 1, overlap=("pipeline",)), m, lead)
    assert found == pytest.approx((with_messages - without) / transfer, abs=1e-6)


@pytest.mark.parametrize("lead", [0.0, 0.4, 1.0, 20.0])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 16), (3, 2), (4, 3), (4, 16), (8, 33)])
def test_messages_that_hold_up_their_senders_cost_what_ranks_that_meet_for_each_would_wait(
    p: int, m: int, lead: float
) -> None:
    transfer = 0.05
    computing = [3.0] * (p - 1) + [3.0 + lead * transfer]
    waited = meeting(p, m, computing, transfer) - m * computing[-1] - 3.0 * (p - 1)
    assert exposed_messages(plan_of("1f1b", p, 1), m, lead) == pytest.approx(waited / transfer, abs=1e-6)


def meeting(p: int, m: int, computing: list[float], transfer: float) -> float:
    """Seconds of 1f1b as in Megatron-LM: sender and receiver meet, and both are blocked for a transfer.

    Messages to a neighbor and from it travel at the same time. A program has seconds to compute,
    and lists of (forward or backward, boundary, sends).
    """
    met: dict[tuple[str, int, int, int], float] = {}  # when each side of a meeting got there
    now, at, moved = [0.0] * p, [0] * p, True
    programs = [list(program(rank, p, m, computing[rank])) for rank in range(p)]
    while moved:
        moved = False
        for rank, steps in enumerate(programs):
            while at[rank] < len(steps):
                step = steps[at[rank]]
                if isinstance(step, float):
                    now[rank] += step
                else:
                    for what in step:
                        met.setdefault((*what, rank), now[rank])
                    others = [met.get((*what, rank + (1 if what[1] == rank else -1))) for what in step]
                    if None in others:
                        break
                    now[rank] = max(now[rank], *(other for other in others if other is not None)) + transfer
                at[rank] += 1
                moved = True
    assert at == [len(steps) for steps in programs]
    return max(now)


def program(rank: int, p: int, m: int, seconds: float) -> Iterator[float | list[tuple[str, int, int]]]:
    """Forward takes a third of the seconds. A meeting is (kind, boundary between rank and rank + 1, micro-batch)."""
    warm_up = min(p - rank - 1, m)

    def down(i: int) -> list[tuple[str, int, int]]:
        return [("F", rank, i)] if rank < p - 1 else []

    def from_above(i: int) -> list[tuple[str, int, int]]:
        return [("F", rank - 1, i)] if rank else []

    def from_below(i: int) -> list[tuple[str, int, int]]:
        return [("B", rank, i)] if rank < p - 1 else []

    def up(i: int) -> list[tuple[str, int, int]]:
        return [("B", rank - 1, i)] if rank else []

    steps: list[float | list[tuple[str, int, int]]] = []
    for i in range(warm_up):
        steps += [from_above(i), seconds / 3, down(i)]
    steps += [from_above(warm_up)] if m > warm_up else []
    for i in range(warm_up, m):
        done, is_last = i - warm_up, i == m - 1
        steps += [seconds / 3, down(i) + from_below(done), seconds * 2 / 3]
        steps += [up(done) + ([] if is_last else from_above(i + 1))]
    for i in range(m - warm_up, m):
        steps += [from_below(i), seconds * 2 / 3, up(i)]
    return (step for step in steps if step)


@pytest.mark.parametrize(("name", "v"), KINDS)
@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 32), (8, 16)])
def test_micro_batches_in_flight_are_those_of_the_schedule(name: str, v: int, p: int, m: int) -> None:
    counted = peak_in_flight(schedule_of(name, p, m, v))
    assert [in_flight(plan_of(name, p, v), rank, m) for rank in range(p)] == counted


def test_fewer_micro_batches_than_stages_are_all_in_flight() -> None:
    assert in_flight(plan_of("1f1b", 8, 1), 0, 3) == peak_in_flight(schedule_of("1f1b", 8, 3, 1))[0] == 3
