"""Strategies: on real ranks, judged on steps whose times are calculated; and with the planner, which has no clock."""

from __future__ import annotations

from typing import Any

import pytest

from course_lib.classroom import questions
from course_lib.classroom.questions.outcome import Outcome
from lessons.L08_combining_mechanisms.questions import ACROSS
from lessons.L08_combining_mechanisms.runs import HybridExperiment
from lessons.L09_planning import questions as plans
from lessons.L09_planning.questions import LARGER, MODEL
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


def test_the_figures_of_model_answers_are_those_of_the_planner() -> None:
    ((_, answer),) = questions.load("optimize_efficiency").form.explanations()
    happened = run("optimize_efficiency", "?").happened
    for figure in ("179 s", "28% MFU", "129 s", "96.5 s", "92.3 s", "81.6 s", "62% MFU"):
        assert figure in happened
        assert figure in answer or figure == "28% MFU"
    ((_, answer),) = questions.load("infrastructure").form.explanations()
    assert f"{16 * LARGER.parameters / 1e12:.1f} TB" in answer
    assert 70e9 < MODEL.parameters < 71e9 < 405e9 < LARGER.parameters < 406e9
    for site, gigabytes in (("64 H100, fast network", 80), ("32 B200, fast network", 180)):
        assert plans.SITES[site].devices * gigabytes * 1e9 < 16 * LARGER.parameters


def test_what_is_said_of_the_offers_is_what_the_planner_says() -> None:
    offers = {name: cluster for name, (_, cluster) in plans.OFFERS.items()}
    peaks = {name: one.devices * one.spec.peak["bf16"] for name, one in offers.items()}
    assert max(peaks, key=lambda name: peaks[name]) == "b200"
    assert offers["b200"].spec.matmul < 0.5
    assert "by published steps of 1 stack" in plans.best(offers["b200"]).interval
    twice, before = plans.best(offers["a100"]), plans.best(plans.NODES)
    assert 1.9 < before.step_time.total / twice.step_time.total < 2.1
    assert twice.plan.dp > before.plan.dp and twice.plan.pp < before.plan.pp
    assert offers["h100"].spec.peak["bf16"] > 3 * offers["a100"].spec.peak["bf16"]
