"""Q2, on real ranks: an order is right if and only if every event comes after those that it needs."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest

from course_lib.classroom import questions
from course_lib.classroom.questions.outcome import Outcome
from lessons.L02_data_parallelism.step_order import SOLUTION

RIGHT = [
    "split forward backward all_reduce update clear",
    "clear split forward backward all_reduce update",
    "split clear forward backward all_reduce update",
    "split forward clear backward all_reduce update",
]


@functools.cache
def run(order: str, seed: int = 0) -> Outcome:
    """The outcome of an order, which is run once for all tests."""
    form: Any = questions.load("Q2", seed).form
    return form.run(form.read(order))


def respects_happens_before(order: tuple[str, ...]) -> bool:
    """Whether each event of the chain comes after the one before it, with no clearing between gradient and update."""
    chain = [order.index(event) for event in ("split", "forward", "backward", "all_reduce", "update")]
    return chain == sorted(chain) and not chain[2] < order.index("clear") < chain[4]


def test_the_page_names_the_events_of_the_program() -> None:
    form: Any = questions.load("Q2").form
    assert sorted(form.events) == sorted(SOLUTION)


def test_four_orders_respect_happens_before() -> None:
    assert {" ".join(order) for order in itertools.permutations(SOLUTION) if respects_happens_before(order)} == set(
        RIGHT
    )


@pytest.mark.parametrize("order", RIGHT)
def test_every_order_that_respects_happens_before_is_right(order: str) -> None:
    assert run(order).right


def test_a_right_order_is_right_on_any_number_of_workers() -> None:
    assert [run(RIGHT[0], seed).right for seed in (1, 2)] == [True, True]


def test_no_other_order_is_right() -> None:
    """Try two of the orders that can be run; the ranks refuse the others, as a test below shows."""
    runnable = [
        order
        for order in itertools.permutations(SOLUTION)
        if order.index("split") < order.index("forward") < order.index("backward")
    ]
    for order in random.Random(1).sample(runnable, 2):
        assert run(" ".join(order)).right is respects_happens_before(order), order


@pytest.mark.parametrize(
    ("order", "happened", "why"),
    [
        (
            "split forward backward update all_reduce clear",
            "drift apart",
            "its own step, before the mean is there",
        ),
        ("split forward all_reduce backward update clear", "drift apart", "no new gradient to average yet"),
        ("split forward backward all_reduce clear update", "nobody learns", "had just been cleared"),
        ("split forward backward clear all_reduce update", "nobody learns", "had just been cleared"),
        ("update clear split forward backward all_reduce", "one step behind", "begun in the middle"),
        ("all_reduce update clear split forward backward", "one step behind", "begun in the middle"),
        ("forward split backward all_reduce update clear", "no share has been taken yet", "what does it work on"),
        ("split backward forward all_reduce update clear", "no forward pass yet", "what does it work on"),
    ],
)
def test_a_wrong_order_shows_what_it_leads_to(order: str, happened: str, why: str) -> None:
    outcome = run(order)
    assert outcome.right is False
    assert happened in outcome.happened
    assert why in outcome.why


def test_drift_is_measured_and_drawn() -> None:
    outcome = run("split forward backward update all_reduce clear")
    assert "How far they are apart: 0." in outcome.happened
    assert "4 ranks" in outcome.pictures[0].summary
    assert "emulated" in outcome.pictures[0].summary
