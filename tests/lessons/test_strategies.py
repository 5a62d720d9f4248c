"""Strategies: on real ranks, judged on steps whose times are calculated; and with the planner, which has no clock."""

from __future__ import annotations

from typing import Any

import pytest

from course_lib.classroom import questions
from course_lib.classroom.questions.outcome import Outcome
from lessons.L08_combining_mechanisms.questions import ACROSS
from lessons.L08_combining_mechanisms.runs import HybridExperiment
from tests.lessons.L08_combining_mechanisms.test_explorer import as_predicted


@pytest.fixture
def textbook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HybridExperiment, "run", as_predicted)


def run(name: str, answer: str) -> Outcome:
    form: Any = questions.load(name).form
    return form.run(form.read(answer))


@pytest.mark.parametrize(
    ("answer", "right", "happened"),
    [
        ("a", False, "dp 1 x pp 2 x tp 4: the slow link hardly costs a thing"),
        ("b", False, "dp 2 x pp 1 x tp 4: the slow link hardly costs a thing"),
        ("c", True, "dp 1 x pp 1 x tp 8: the slow link makes a step much longer"),
        ("d", False, "with each axis in turn across: it makes a difference"),
    ],
)
def test_tensor_ranks_must_not_reach_across(textbook: None, answer: str, right: bool, happened: str) -> None:
    outcome = run("which_axis_across", answer)
    assert (outcome.right, outcome.shown) == (right, True)
    assert happened in outcome.happened


def test_an_axis_reaches_across_on_real_ranks() -> None:
    outcome = run("which_axis_across", "a")
    assert "Run on 8 ranks" in outcome.happened
    assert len(outcome.pictures) == 2
    assert all(
        len({rank // 4 for rank in HybridExperiment(sizes).group(0, axis)}) == 2 for axis, sizes in ACROSS.items()
    )


def test_a_strategy_is_evaluated_as_the_model_answer_says(textbook: None) -> None:
    outcome = run("evaluate_strategy", "I do not know yet.")
    assert outcome.shown
    assert "all arrangements update the weights as one process does, and the slowest is dp 1 x pp 1 x tp 8" in (
        outcome.happened
    )
    assert outcome.happened.count("each rank holds") == 4


@pytest.mark.parametrize(
    ("name", "rights"),
    [("more_replicas", [False, False, True, False]), ("which_offer", [False, True, False, False])],
)
def test_the_planner_judges_each_option(name: str, rights: list[bool]) -> None:
    outcomes = [run(name, letter) for letter in "abcd"]
    assert [outcome.right for outcome in outcomes] == rights
    assert all(outcome.shown for outcome in outcomes)
    assert len({outcome.happened for outcome in outcomes}) == 4


@pytest.mark.parametrize(
    ("answer", "right", "why"),
    [("2.4", True, "Less than the peak"), ("3.17 x", False, "ratio of the peaks"), ("1.64", False, "memory alone")],
)
def test_the_same_plan_gains_less_than_the_peak(answer: str, right: bool, why: str) -> None:
    outcome = run("same_plan", answer)
    assert outcome.right == right
    assert why in outcome.why


@pytest.mark.parametrize("name", ["optimize_efficiency", "infrastructure"])
def test_the_planner_says_what_the_model_answer_says(name: str) -> None:
    outcome = run(name, "I do not know yet.")
    assert outcome.right is None
    assert outcome.shown
    assert outcome.happened.startswith("The planner says (modelled): ")
