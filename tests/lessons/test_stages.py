"""Q11 and Q8, on real ranks at the pace of emulated devices."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from course_lib.classroom import questions
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.runs.events import fill_and_drain, name_of, read, run_events, until_stuck
from course_lib.ranks import Deadlock, RankFailed
from course_lib.schedules import Action
from lessons.L05_pipeline_parallelism.questions import Grid, Strategy


def run(name: str, answer: str, seed: int = 0) -> Outcome:
    form: Any = questions.load(name, seed).form
    return form.run(form.read(answer))


def test_what_micro_batches_gain_is_what_the_formula_says() -> None:
    # 8 units, 32 micro-batches: 32 of 32 + 7 turns. A turn is 90 ms / 16; 7 messages of 2 ms each way are added.
    turns, messages = (32 + 7) * 0.09 / 16, 2 * 7 * 0.002
    assert Strategy(pieces=32).run(8).makespan == pytest.approx(turns + messages, rel=1e-9)
    active = 8 * 32 * 0.09 / 16 / (turns + messages)
    assert f"and {active:.2f} with it" in run("Q11", "d").happened
    assert active > 5  # "most units are active most of the time"


@pytest.mark.parametrize(
    "order",
    [
        "F0@0 F1@0 F0@1 F1@1 B1@1 B0@1 B1@0 B0@0",  # all forward passes first
        "F0@0 F1@0 F0@1 B0@1 F1@1 B1@1 B0@0 B1@0",  # one forward, one backward
        "F0@1 B0@1 F1@1 B1@1 F0@0 F1@0 B0@0 B1@0",  # the same; which device stands first does not matter
    ],
)
def test_q8_takes_any_order_that_no_other_one_beats(order: str) -> None:
    outcome = run("Q8", order)
    assert outcome.right
    assert "No order keeps the devices busier" in outcome.happened


def test_q8_shows_how_long_the_devices_of_a_worse_order_are_idle() -> None:
    outcome = run("Q8", "F0@0 F0@1 B0@1 B0@0 F1@0 F1@1 B1@1 B1@0")
    assert outcome.right is False
    assert "idle longer than need be" in outcome.happened
    assert "below it" in outcome.pictures[0].summary


def test_q8_shows_a_deadlock() -> None:
    outcome = run("Q8", "F0@0 B0@0 F1@0 F1@1 F0@1 B0@1 B1@1 B1@0")
    assert outcome.right is False
    assert "stuck for good" in outcome.happened
    assert "waits to receive from" in outcome.happened
    assert "2 ranks" in outcome.pictures[0].summary


def test_q8_refuses_a_backward_pass_without_its_forward_pass() -> None:
    outcome = run("Q8", "B0@0 F0@0 F1@0 F0@1 F1@1 B0@1 B1@1 B1@0")
    assert outcome.right is False
    assert "B0@0 comes before its forward pass" in outcome.happened


def makespan(order: tuple[Action, ...]) -> float:
    """The end of the last event of an order, with F of one and B of two units; infinite if the order gets stuck."""
    ends: dict[Action, float] = {}
    rows = [[event for event in order if event.stage == device] for device in (0, 1)]
    clocks = [0.0, 0.0]
    while any(rows):
        for device, row in enumerate(rows):
            if row and (ready := _ready(row[0], ends)) is not None:
                event = row.pop(0)
                clocks[device] = ends[event] = max(clocks[device], ready) + (1 if event.op == "F" else 2)
                break
        else:
            return float("inf")
    return max(clocks)


def _ready(event: Action, ends: dict[Action, float]) -> float | None:
    needs = [event._replace(op="F")] if event.op == "B" else []
    source = event.stage - 1 if event.op == "F" else event.stage + 1
    needs += [event._replace(stage=source)] if source in (0, 1) else []
    return max((ends[need] for need in needs), default=0.0) if all(need in ends for need in needs) else None


def test_the_next_best_order_of_q8_is_farther_from_the_best_than_its_tolerance() -> None:
    """All orders of two devices and two micro-batches are compared, by calculation."""
    events = fill_and_drain(2, 2)
    own = [[event for event in events if event.stage == device] for device in (0, 1)]
    orders = itertools.product(itertools.permutations(own[0]), itertools.permutations(own[1]))
    spans = {makespan(first + second) for first, second in orders} - {float("inf")}
    idle = sorted(1 - 12 / (2 * span) for span in spans)
    assert idle[0] == pytest.approx(Grid(2, 2).least_idle)
    assert idle[1] - idle[0] > 0.06


def test_what_is_done_before_a_deadlock() -> None:
    order = list(map(read, ["F0@0", "B0@0", "F1@0", "F1@1", "F0@1", "B0@1", "B1@1", "B1@0"]))
    assert list(map(name_of, until_stuck(order, 2))) == ["F0@0"]
    assert sorted(until_stuck(fill_and_drain(3, 2), 3)) == sorted(fill_and_drain(3, 2))


def test_a_program_stops_where_its_order_does() -> None:
    with pytest.raises(Deadlock):
        run_events(list(map(read, ["F0@1", "B0@1", "F1@1", "B1@1", "F0@0"])), 2)
    with pytest.raises(RankFailed, match="it has not done F0@1 yet"):
        run_events([read("B0@1")], 2)
