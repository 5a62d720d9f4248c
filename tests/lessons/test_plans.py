"""The cases that ask for a plan: any plan that reaches the targets is right, and a missed target is named.

Targets are computed here from `estimate` alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from course_lib.classroom import journal, questions
from course_lib.classroom.questions import plan_text
from course_lib.classroom.questions.forms import PlanForm
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.scenarios.plans import PlanCase, Planning
from course_lib.classroom.scenarios.targets import PlanTask
from course_lib.planner import Cluster, Estimate, Plan, estimate
from course_lib.planner.search import ALIKE
from course_lib.planner.spec import OVERLAPS, PLANNED, PRECISIONS, RECOMPUTE
from tests.lessons import cases, written_variants

CASES = {"S1": "S01_single_node", "S3": "S03_fit_then_fast", "S9": "S09_refresh", "S10": "S10_memory_bound"}
HELPS_MOST = {"S1": "cut each matrix", "S3": "eight B200", "S9": "keep activations", "S10": "compute activations again"}
SEEDS = (0, 1)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_STATE", str(tmp_path))


def case(name: str) -> Planning:
    return cases.CASES[CASES[name]]


def variants(*seeds: int) -> list[Any]:
    """All variants, or the variants with these seeds."""
    every = [(name, seed) for name in CASES for seed in range(len(case(name).tasks)) if not seeds or seed in seeds]
    return [pytest.param(case(name).variant(seed), id=f"{name}-{seed}") for name, seed in every]


def steps(variant: PlanCase) -> dict[str, PlanTask]:
    return {f"{variant.case.name}_plan": variant.first, f"{variant.case.name}_better": variant.then}


def answer(name: str, seed: int, plan: Plan | str) -> Outcome:
    return questions.load(name, seed).answer(plan).outcome


def reached(task: PlanTask, one: Estimate) -> dict[str, bool]:
    """Whether each target is reached, by the target's first word."""
    seconds = one.step_time.total
    waits = {link: sum(flow.exposed for flow in one.flows.values() if flow.link == link) for link in task.waiting}
    return {
        "memory": one.memory.high <= task.within * one.cluster.spec.memory,
        "tokens": task.batch * task.model.sequence / seconds >= task.tokens,
        **({"bubble": one.step_time.bubble / seconds <= task.bubble} if task.bubble < 1 else {}),
        **{f"waiting for {link}": waits[link] / seconds <= share for link, share in task.waiting.items()},
    }


@pytest.mark.parametrize("variant", variants())
def test_the_best_of_a_search_is_right_and_so_is_what_cannot_be_told_apart_from_it(variant: PlanCase) -> None:
    for task in (variant.first, variant.then):
        fitting = [one for one in task.found if one.memory.high <= task.room]
        able = [one for one in fitting if all(ok for what, ok in reached(task, one).items() if what != "tokens")]
        able.sort(key=lambda one: one.step_time.total)
        near = [one for one in able if one.step_time.total <= ALIKE * able[0].step_time.total]
        assert all(not task.missed(one) for one in near)
        assert len(task.reaching.tied) >= 5  # there is more than one right plan
        assert len(able) < len(task.found)


@pytest.mark.parametrize("variant", variants(*SEEDS))
def test_a_right_plan_passes_and_is_ranked(variant: PlanCase) -> None:
    for name, task in steps(variant).items():
        best, last = task.reaching[0], task.reaching[-1]
        for one in (best, last):
            outcome = answer(name, variant.seed, one.plan)
            assert outcome.right
            assert "missed" not in outcome.happened
            is_near = one.step_time.total <= ALIKE * best.step_time.total
            assert ("cannot tell it from the best" in outcome.why) == is_near
            assert ("A search finds" in outcome.why) != is_near
            assert len(outcome.pictures) == 3
        assert any(note.right for note in journal.notes() if note.question == name)


@pytest.mark.parametrize("variant", variants(*SEEDS))
def test_a_plan_that_misses_a_target_is_told_which_one_and_not_told_what_is_best(variant: PlanCase) -> None:
    for name, task in steps(variant).items():
        best, some = task.reaching.best.plan, task.found.estimates[::7]
        for what in reached(task, task.found[0]):
            missing = [one for one in some if not reached(task, one)[what]]
            assert missing, f"{name}: no plan misses {what}"
            alone = min(missing, key=lambda one: sum(not ok for ok in reached(task, one).values()))
            outcome = answer(name, variant.seed, alone.plan)
            assert not outcome.right
            lines = [line for line in outcome.happened.splitlines() if line.endswith(": missed")]
            assert len(lines) == sum(not ok for ok in reached(task, alone).values())
            assert any(line.startswith(f"- {what}") for line in lines)
            assert outcome.why
            said = str(outcome) + "".join(picture.summary for picture in outcome.pictures)
            assert plan_text.write(best) not in said
            assert "best of a search" not in said


def test_what_would_loosen_a_missed_target_is_said() -> None:
    def why(name: str, plan: str) -> str:
        return answer(name, 0, plan).why

    assert "It does not fit: each device needs 485.2 GiB, 417.5 GiB to 547.8 GiB by the software, and 80.0" in why(
        "S1_better", "dp=8"
    )
    assert "use a smaller tp, or keep it inside a node" in why("S1_better", "tp=8")
    assert "recompute less, if memory allows" in why("S1_better", "pp=8 recompute=full")
    bubble = "Too much of it is the pipeline's bubble: give each pipeline more micro-batches"
    assert bubble in why("S3_better", "tp=4 pp=2 sequence_parallel=true recompute=selective")
    gradients = "waiting for gradients to be summed over the replicas"
    assert gradients in why("S9_better", "dp=16 pp=2 micro_batch=2 zero=1 recompute=selective")


@pytest.mark.parametrize("name", [f"{name}_{step}" for name in CASES for step in ("plan", "better")])
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_plans_are_judged_without_a_crash_and_none_is_right_that_does_not_fit(
    name: str, data: st.DataObject
) -> None:
    form = questions.load(name).form
    assert isinstance(form, PlanForm)
    tp = data.draw(st.sampled_from([1, 2, 4, 8, 8, 16]))
    pp = data.draw(st.sampled_from([1, 2, 4, 8]))
    dp = data.draw(st.one_of(st.just(max(1, form.cluster.devices // (tp * pp))), st.integers(0, 64)))
    said = {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "micro_batch": data.draw(st.sampled_from([1, 1, 2, 4, 3, 512])),
        "schedule": data.draw(st.sampled_from(PLANNED)),
        "virtual_stages": data.draw(st.sampled_from([1, 1, 2, 5])),
        "zero": data.draw(st.integers(0, 4)),
        "sequence_parallel": data.draw(st.booleans()),
        "recompute": data.draw(st.sampled_from(RECOMPUTE)),
        "recomputed": data.draw(st.sampled_from([1.0, 0.5, 0.0])),
        "precision": data.draw(st.sampled_from(PRECISIONS)),
        "cp": data.draw(st.sampled_from([1, 1, 2])),
        "fp32_gradients": data.draw(st.booleans()),
        "overlap": f"({','.join(data.draw(st.lists(st.sampled_from(OVERLAPS), unique=True)))})",
    }
    try:
        kept = form.read(" ".join(f"{field}={value}" for field, value in said.items()))
    except ValueError as refused:
        assert len(str(refused)) < 300
        assert "\n" not in str(refused)
        return
    one = estimate(form.model, form.cluster, plan_text.parse(kept), form.global_batch)
    outcome = form.run(kept)
    assert outcome.right == all(reached(task_of(name), one).values())
    assert not (outcome.right and one.fit == "does not fit")


def task_of(name: str) -> PlanTask:
    return steps(case(name.partition("_")[0]).variant())[name]


@pytest.mark.parametrize("variant", variants())
def test_one_change_helps_most_and_by_more_than_chance(variant: PlanCase) -> None:
    name = variant.case.name
    form = questions.load(f"{name}_limit", variant.seed).form
    (right,) = [words for words, outcome in form.reveal() if outcome.right]
    assert right[3:].startswith(HELPS_MOST[name])
    *_, second, best = sorted(map(variant.first.estimate, variant.first.changes.values()), key=speed)
    assert best.fits and (not second.fits or best.tokens_per_second > ALIKE * second.tokens_per_second)


def speed(one: Estimate) -> tuple[bool, float]:
    return one.fits, one.tokens_per_second


@pytest.mark.parametrize("variant", variants())
def test_the_plan_as_it_stands_misses_both_tasks_and_can_be_begun_with(variant: PlanCase) -> None:
    for name, task in steps(variant).items():
        form = questions.load(name, variant.seed).form
        assert task.missed(task.estimate())
        assert form.read(form.example) == plan_text.write(task.estimate().plan)


@pytest.mark.parametrize("variant", variants(*SEEDS))
def test_a_plan_is_defended_beside_the_usual_choices(variant: PlanCase) -> None:
    name = variant.case.name
    before = questions.load(f"{name}_defend", variant.seed).answer("Because it fits.").outcome
    assert "You have not decided on a plan yet." in before.happened
    plan = variant.then.reaching[-1].plan
    questions.load(f"{name}_better", variant.seed).commit(plan)
    questions.load(f"{name}_better", variant.seed + 1).commit(
        variant.case.variant(variant.seed + 1).then.estimate().plan
    )
    after = questions.load(f"{name}_defend", variant.seed).answer("Because it fits.").outcome
    one = estimate(variant.then.model, variant.then.cluster, plan, variant.then.batch)
    assert "your plan: " in after.happened and f"{one.tokens_per_second:,.0f} tokens a second" in after.happened
    assert one.interval in after.happened
    assert all(f"- {turn}: " in after.happened for turn in variant.then.turns)


@pytest.mark.parametrize("variant", variants(*SEEDS))
def test_the_debrief_waits_for_a_plan_that_reaches_all_targets(variant: PlanCase) -> None:
    name = f"{variant.case.name}_better"
    answer(name, variant.seed, variant.then.estimate().plan)
    assert "There is no debrief yet." in str(variant.debrief())
    answer(name, variant.seed, variant.then.reaching.best.plan)
    said = str(variant.debrief())
    for turn, change in variant.then.turns.items():
        one = variant.then.estimate(change)
        missed = [what for what, ok in reached(variant.then, one).items() if not ok]
        (line,) = (line for line in said.splitlines() if line.startswith(f"- {turn}: "))
        assert f"{one.tokens_per_second:,.0f} tokens a second" in line
        assert all(what in line.partition("misses")[2] for what in missed)
        assert line.endswith("misses nothing") == (not missed)
    assert "It has happened like this." in said


@pytest.mark.parametrize("variant", variants(*SEEDS))
def test_the_evidence_shows_the_job_and_does_not_say_what_to_do(variant: PlanCase) -> None:
    shown = variant.evidence()
    now = variant.first.estimate()
    assert f"{now.tokens_per_second:,.0f} tokens a second" in str(shown)
    assert "modelled" in str(shown)
    assert now.why not in str(shown) and "would" not in str(shown)
    assert len(shown.outcome.pictures) == (2 if variant.first.old else 1)
    loaded: Any = cases.load(CASES[variant.case.name], variant.seed)
    assert loaded.first is variant.first


def test_mechanisms_together_make_more_room_than_full_recomputation_alone() -> None:
    task = case("S10").variant().first
    together = task.estimate("precision=bf16 zero=1 sequence_parallel=true recompute=selective")
    for precision in ("fp32", "bf16"):
        assert together.memory.total < task.estimate(f"precision={precision} recompute=full").memory.total


def test_eight_bits_need_more_memory_than_sixteen() -> None:
    task = case("S3").variant().first
    change = task.changes["h200"]
    assert isinstance(change, tuple)
    plan, cluster = change
    assert task.estimate((f"{plan} precision=fp8", cluster)).memory.total > task.estimate((plan, cluster)).memory.total


@pytest.mark.parametrize("variant", variants())
def test_instructors_have_a_best_plan_of_every_variant(variant: PlanCase) -> None:
    assert written_variants.row(variant) in written_variants.PAGE.read_text(encoding="utf-8").splitlines()


def test_the_numbers_of_the_pages_are_those_of_the_planner() -> None:
    h100, h200 = Cluster("H100-80GB"), Cluster("H200-141GB")
    assert [round(n * h200.spec.memory / 1e9) for n in (1, 8)] == [151, 1211]
    assert h100.spec.memory / 2**30 == 80
    state = 16 * case("S3").variant().first.model.parameters
    assert 0.9 < state / (8 * h200.spec.memory) < 1 < 8 * Cluster("B200-180GB").spec.memory / state
    sixth = replace(case("S9").variant().first.cluster, device="V100-32GB").spec
    assert 7.5 < h100.spec.peak["bf16"] / sixth.peak["fp16"] < 8.5  # eight times the peak
    assert h100.spec.memory > 2 * sixth.memory  # more than twice as much
    assert math.isclose(ALIKE, 1 + 1 / 8, abs_tol=0.01)  # an eighth
