"""Defaults on a fleet: a good policy, a naive one, and invalid ones."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from course_lib.classroom import journal, progress, questions
from course_lib.classroom.questions import plan_text
from course_lib.planner import Cluster, ModelSpec, Plan, estimate
from lessons.S04_defaults.fleet import FLEET, trial
from tests.lessons.S04_defaults import written_fleet


@pytest.fixture(autouse=True)
def state(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_STATE", str(tmp_path))


def naive(model: ModelSpec, cluster: Cluster, global_batch: int) -> Plan:
    return Plan(dp=cluster.devices)


def good(model: ModelSpec, cluster: Cluster, global_batch: int) -> Plan:
    """The first plan that fits, from the cheapest to the most frugal, as in the hints of the notebook."""
    precision = "bf16" if "bf16" in cluster.spec.peak else "fp16"
    cp = max(1, model.sequence // 16_384)
    for tp, pp in ((1, 1), (2, 1), (2, 2), (4, 2), (2, 4), (4, 4)):
        dp, schedule = cluster.devices // (tp * pp * cp), "zb_h1" if pp > 1 else "1f1b"
        for recompute in ("none", "selective"):
            for micro_batch in (4, 2, 1):
                plan = Plan(dp, tp, pp, micro_batch, schedule, 1, 1, tp > 1, recompute, precision, cp)
                try:
                    if estimate(model, cluster, plan, global_batch).fits:
                        return plan
                except ValueError:
                    continue
    raise ValueError("nothing fits")


def test_a_naive_policy_runs_for_two_of_twelve_and_a_good_one_for_all() -> None:
    assert len(trial(naive).running) == 2
    best = trial(good)
    assert len(best.running) == len(FLEET) == 12
    assert best.trials[0].times < 1.5
    assert best.typical < 1.15


def test_what_became_of_a_policy_is_kept_as_an_answer_is() -> None:
    for policy in (naive, good):
        trial(policy)
    kept = journal.notes()
    assert [(note.what, note.question, bool(note.right)) for note in kept] == [
        ("ran", "S4_policy", False),
        ("ran", "S4_policy", True),
    ]
    assert kept[0].answer == str(trial(naive))


def row() -> str:
    return next(line for line in progress.table(journal.notes(), Path()).splitlines() if "S4_policy" in line)


def test_progress_shows_what_became_of_a_policy() -> None:
    assert row().endswith(" -")
    trial(naive)
    assert "not right yet; last answer: It runs on 2 of 12." in row()
    trial(good)
    assert row().endswith("right at try 2")
    assert "S04_defaults: 1 of 4 done" in progress.table(journal.notes(), Path())


def test_the_worst_comes_first_and_says_why() -> None:
    found = trial(naive)
    times = [one.times for one in found.trials]
    assert times == sorted(times, reverse=True)
    assert "It may fit" in found.trials[0].said
    assert any("does not fit" in one.said for one in found.trials)
    shown = found._repr_mimebundle_()
    assert shown["text/plain"].splitlines()[0] == str(found)
    assert shown["text/html"].count("<tr>") == 13


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (lambda *pair: 1 / 0, "The policy raised ZeroDivisionError: division by zero"),
        (lambda: Plan(), "The policy raised TypeError"),
        (lambda *pair: None, "A Plan is asked for, and this is of type NoneType."),
        (lambda *pair: "dp=8", "A Plan is asked for, and this is of type str."),
        (lambda *pair: Plan(dp=7), "There can be no such plan: dp=7 x tp=1 x pp=1 makes 7 devices"),
        (lambda *pair: Plan(dp="8"), "The policy raised TypeError"),  # type: ignore[arg-type]
        (lambda *pair: replace(Plan(), dp=0.5), "The policy raised ValueError"),  # type: ignore[arg-type]
        (lambda model, *pair: model.layer, "The policy raised AttributeError"),
    ],
)
def test_what_is_no_policy_gets_a_sentence(policy: Any, said: str) -> None:
    found = trial(policy)
    assert {one.times for one in found.trials} == {inf}
    assert all(one.said.startswith(said.split(":")[0]) for one in found.trials)
    assert any(said in one.said for one in found.trials)
    assert str(found) == "It runs on 0 of 12."


def test_the_fleet_has_what_a_default_is_wrong_for() -> None:
    """Devices without bf16, long samples, a slow bus, a slow network, more than one node."""
    clusters = [pair.cluster for pair in FLEET.values()]
    assert any("bf16" not in cluster.spec.peak for cluster in clusters)
    assert any(pair.best.cp > 1 for pair in FLEET.values())
    assert any("PCIe" in cluster.inside_link.name for cluster in clusters)
    assert any(cluster.between == "Ethernet 25" for cluster in clusters)
    assert all(estimate(pair.model, pair.cluster, pair.best, pair.batch).fits for pair in FLEET.values())


@pytest.mark.parametrize("name", FLEET)
def test_the_best_plans_are_those_that_a_search_finds(name: str) -> None:
    assert plan_text.write(FLEET[name].best) == written_fleet.best(name)


@pytest.mark.parametrize(("name", "right"), [("S4_unfit", "d"), ("S4_costly", "a")])
def test_each_answer_is_run_on_the_fleet_and_one_is_right(name: str, right: str) -> None:
    for letter in "abcd":
        feedback = questions.load(name).answer(letter)
        assert feedback.right is (letter == right)
        assert feedback.outcome.shown


def test_what_the_debrief_says_of_a_node_full_of_tensor_ranks() -> None:
    """Tensor ranks cost a small model on a slow bus three quarters of its time."""
    said = questions.load("S4_costly").answer("a").outcome.happened
    assert "4.22 times as long: 1.3B on 8 RTX 4090" in said
    assert 1 - 1 / 4.22 > 0.75
