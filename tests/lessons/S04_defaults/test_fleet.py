"""Defaults on a fleet: a good policy, a naive one, and invalid ones."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest

from course_lib.classroom import journal, progress, questions
from course_lib.classroom.questions import plan_text
from course_lib.planner import Cluster, ModelSpec, Plan, estimate, search
from lessons.S04_defaults import case, fleet
from lessons.S04_defaults.fleet import BUDGET, FAIR, FLEET, hand_in, trial
from tests.lessons.S04_defaults import written_fleet


@pytest.fixture(autouse=True)
def state(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_STATE", str(tmp_path))


def naive(model: ModelSpec, cluster: Cluster, global_batch: int) -> Plan:
    return Plan(dp=cluster.devices)


def good(model: ModelSpec, cluster: Cluster, global_batch: int) -> Plan:
    """The first plan that fits, from the cheapest to the most frugal, as in the hints of the notebook."""
    return case._first_that_fits(model, cluster, global_batch)


def table(model: ModelSpec, cluster: Cluster, global_batch: int) -> Plan:
    """The best plan of each group that is known, and replicas for the others."""
    known = {(pair.model, id(pair.cluster)): pair.best for pair in FLEET.values()}
    return known.get((model, id(cluster)), Plan(dp=cluster.devices))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, fleet.Pair]:
    """The same six pairs each time, drawn once."""
    pairs = dict(fleet._drawn(Random(2)))
    monkeypatch.setattr(fleet, "_drawn", lambda random: pairs.items())
    return pairs


def test_a_naive_policy_runs_for_two_of_twelve_and_a_good_one_for_all() -> None:
    assert len(trial(naive).running) == 2
    best = trial(good)
    assert len(best.running) == len(FLEET) == 12
    assert best.trials[0].times < 1.5


def test_pairs_that_nobody_has_seen_are_others_each_time_and_a_plan_fits_each(drawn: dict[str, fleet.Pair]) -> None:
    assert len(drawn) == 6
    for pair in drawn.values():
        assert estimate(pair.model, pair.cluster, pair.best, pair.batch).fits
        assert all((pair.model, pair.cluster, pair.batch) != known[:3] for known in FLEET.values())


def test_a_rule_passes_where_a_table_of_names_does_not(drawn: dict[str, fleet.Pair]) -> None:
    assert trial(table).trials[0].times == 1
    found = hand_in(good)
    assert found.trials[0].times <= FAIR
    assert hand_in(table).trials[0].times > FAIR
    assert [(note.what, note.question, note.right) for note in journal.notes()] == [
        ("ran", "S4_policy", True),
        ("ran", "S4_policy", False),
    ]
    assert journal.notes()[0].answer == str(found)
    row = next(line for line in progress.table(journal.notes(), Path()).splitlines() if "S4_policy" in line)
    assert row.endswith("right at the first try")


def test_the_score_is_that_of_the_worst() -> None:
    found = trial(naive)
    assert found.score == max(one.times for one in found.running)
    assert f"The worst that runs is {found.score:.2f} times as long" in str(found)


def test_a_search_in_a_policy_is_counted_however_it_is_called() -> None:
    pair = {"one": FLEET["0.35B on 4 RTX 4090"]}
    (found,) = trial(lambda *of: search(*of).best.plan, pair).trials
    assert found.times == inf
    assert re.match(rf"The policy asked for [\d,]+ estimates; {BUDGET} are allowed", found.said)

    def thrifty(model: ModelSpec, cluster: Cluster, global_batch: int) -> Plan:
        for _ in range(BUDGET):
            estimate(model, cluster, Plan(dp=cluster.devices), global_batch)
        return Plan(dp=cluster.devices, zero=1)

    assert trial(thrifty, pair).trials[0].times < inf


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
        (lambda *pair: Plan(dp=7), "There can be no such plan: dp=7 x tp=1 x pp=1 makes 7, but the cluster has"),
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
    assert "4.22 times as long as the best plan: 1.3B on 8 RTX 4090" in said
    assert 1 - 1 / 4.22 > 0.75
