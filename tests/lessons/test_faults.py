"""Cases with a fault: each culprit has its symptoms, can be told from the others, and is mended by its repair."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import course
from course_lib.classroom import journal, questions
from course_lib.classroom.questions.catalog import case_of
from course_lib.classroom.questions.prose import items
from course_lib.classroom.scenarios.jobs.faults import SYMPTOMS, Incident
from course_lib.classroom.scenarios.jobs.instruments import INSTRUMENTS
from course_lib.classroom.scenarios.jobs.job import Job
from course_lib.classroom.scenarios.jobs.training import STEPS
from tests.lessons import cases as scenarios
from tests.lessons.asked import ASKED

WELL = SYMPTOMS["neither"]
SEEDS = {name: range(2 * len(scenarios.load(name).case.culprits)) for name in scenarios.FAULTS}  # each culprit twice
VARIANTS = [(name, seed) for name in scenarios.FAULTS for seed in SEEDS[name]]
CASES = {scenarios.load(name).case.name: name for name in scenarios.FAULTS}
STEPS_OF_A_CASE = ("symptom", "suspect", "measure", "change")
# The repair of each culprit, as in the debriefs; below, other repairs that work.
REPAIRS = {"one_bucket": "buckets", "small_buckets": "buckets", "apart": "together", "uneven": "even"}
AS_WELL = {"sums": {"dynamic", "smaller"}, "few": {"sixteen"}}


@pytest.fixture(autouse=True)
def own_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_STATE", str(tmp_path))
    monkeypatch.delenv("COURSE_POLL", raising=False)


def facts(job: Job, name: str) -> list[str]:
    return list(INSTRUMENTS[name].read(job).facts.values())


def number(text: str) -> float:
    (found,) = re.findall(r"[\d.]+", text)
    return float(found)


def diagnose(variant: Incident) -> str:
    """The culprit, found only from measurements, by the rules in the debriefs."""
    slower, learns = variant.symptoms(variant.job)
    if not slower:
        return of_numbers(variant.job, learns)
    return of_time(variant.job, variant.case.healthy, set(variant.case.culprits))


def of_time(job: Job, healthy: Job, known: set[str]) -> str:
    ranks, seconds = facts(job, "placement"), list(map(number, facts(job, "devices")))
    if ranks != facts(healthy, "placement"):
        return "in_turn"
    if max(seconds) > min(seconds):
        return "device"
    if facts(job, "links") != facts(healthy, "links"):
        return "link"
    step, *shares = map(number, facts(job, "profile"))
    if max(shares) - min(shares) > 5:
        return "uneven"
    if step < number(facts(healthy, "profile")[0]):
        return "batch"
    return next(name for name in ("few", "one_bucket", "small_buckets") if name in known)


def of_numbers(job: Job, learns: str) -> str:
    if learns == "broken":
        return "kept"
    if set(facts(job, "replicas")) != {"+0.0000"}:
        return "apart"
    overflows = [int(fact.split(" in ")[1].split(" of ")[0]) for fact in facts(job, "gradients")]
    if max(overflows) > 10:
        return "data"
    skipped, of = facts(job, "scale")[-1].split(" of ")
    return "sums" if skipped == of else "rate"


@pytest.mark.parametrize(("name", "seed"), VARIANTS)
def test_the_evidence_tells_what_it_is(name: str, seed: int) -> None:
    variant = scenarios.load(name, seed)
    assert variant.symptoms(variant.job) != WELL
    assert diagnose(variant) == variant.culprit


@pytest.mark.parametrize("name", scenarios.FAULTS)
def test_every_culprit_comes_as_seeds_go_on(name: str) -> None:
    case = scenarios.load(name).case
    assert len(case.culprits) >= 3
    for first in (0, len(case.culprits)):
        drawn = {case.variant(first + number).culprit for number in range(len(case.culprits))}
        assert drawn == set(case.culprits)


@pytest.mark.parametrize("name", scenarios.FAULTS)
def test_what_repairs_it_is_right_and_nothing_else_is(name: str) -> None:
    for variant in map(scenarios.load(name).case.variant, SEEDS[name]):
        mends = {repair for repair in variant.case.repairs if variant.symptoms(variant.repaired(repair)) == WELL}
        assert mends == {REPAIRS.get(variant.culprit, variant.culprit), *AS_WELL.get(variant.culprit, ())}


@pytest.mark.parametrize("name", scenarios.FAULTS)
def test_evidence_has_the_same_form_for_every_culprit(name: str) -> None:
    forms = set()
    for seed in range(len(scenarios.load(name).case.culprits)):
        variant = scenarios.load(name, seed)
        said = variant.evidence().outcome.happened
        readings = tuple(tuple(INSTRUMENTS[one].read(variant.job).facts) for one in INSTRUMENTS)
        charts = tuple(picture.summary.partition(":")[0] for picture in variant.evidence().outcome.pictures)
        forms.add((said.count("\n- "), re.sub(r"(?s)\n- .*?(?=\n\n|$)", "", said), charts, readings))
    assert len(forms) == 1


def test_memory_and_throughput_show_what_a_culprit_does_to_them() -> None:
    lost, slow = scenarios.load("S06_postmortem").case, scenarios.load("S07_regression").case
    kept, few, uneven = (
        next(v for v in map(case.variant, range(9)) if v.culprit == culprit)
        for case, culprit in ((lost, "kept"), (slow, "few"), (slow, "uneven"))
    )
    assert all(now < before for now, before in zip(kept.job.memory, lost.healthy.memory, strict=True))
    assert all(now > before for now, before in zip(few.job.memory, slow.healthy.memory, strict=True))
    assert max(uneven.job.memory) > max(slow.healthy.memory)
    assert sum(kept.job.memory) > sum(lost.healthy.memory) / 2  # activations are as large as before
    for variant in (kept, few):
        shown, _ = variant.evidence().outcome.pictures
        assert shown.summary.startswith("Samples a second: last week, ")
        assert f"over {STEPS} steps; now, " in shown.summary
    *before, _, now, _ = map(float, re.findall(r"\d+", shown.summary))
    assert now < 0.97 * before[0]


def test_a_reading_can_be_held_against_last_week_s() -> None:
    for name in scenarios.FAULTS:
        healthy = scenarios.load(name).case.healthy
        *_, across = map(number, facts(healthy, "links"))
        assert 0.85 < across / (healthy.between.bandwidth / 1e6) <= 1
        assert any(
            f"inside a machine, {healthy.between.bandwidth / 1e6:.0f} between" in line for line in healthy.configuration
        )
        (moved,) = map(number, facts(healthy, "updates"))
        assert f"{moved:.1f}" == "0.3"  # as the pages of S2, S6 and S8 say


def test_a_sum_of_weights_tells_nothing_where_all_replicas_agree() -> None:
    lost = scenarios.load("S06_postmortem", 1)
    assert lost.culprit == "sums"
    assert facts(lost.job, "replicas") == facts(lost.case.healthy, "replicas") == ["+0.0000"] * 3
    (letter,) = (line[0] for line in questions.load("S6_measure", 1).form.lines if "each replica's weights" in line)
    assert not questions.load("S6_measure", 1).form.run(letter).right


def test_the_evidence_says_where_each_figure_comes_from() -> None:
    shown = str(scenarios.load("S02_night_call").evidence())
    assert shown.startswith("What everybody sees\n\nThe job's reports:")
    assert all(f"({origin})" in shown for origin in ("emulated", "measured", "modelled"))


@pytest.mark.parametrize("name", [name for name in ASKED if name[:2] in CASES])
def test_right_answers_and_wrong_ones_are_told_apart_by_runs(name: str) -> None:
    culprits = len(scenarios.load(CASES[name[:2]]).case.culprits)
    for seed in range(culprits if name.rpartition("_")[2] in STEPS_OF_A_CASE else 1):
        question = questions.load(name, seed)
        found = [question.form.run(letter) for letter in question.form.letters]
        assert 0 < sum(outcome.right is True for outcome in found) < len(found)
        assert all(outcome.happened for outcome in found)
        assert len({outcome.why for outcome in found} - {""}) == len(found)  # each explains itself


def test_measurements_are_paid_for_once_and_changes_each_time() -> None:
    variant = scenarios.load("S07_regression", 1)
    assert variant.bill().startswith("0 minutes")
    for name in ("placement", "links", "placement"):
        variant.measure(name)
    assert variant.bill() == "11 minutes of the cluster, for 2 measurements and 0 changes."
    question = questions.load("S7_change", 1)
    for letter in "aa":
        question.answer(letter)
    assert variant.bill() == "71 minutes of the cluster, for 2 measurements and 2 changes."
    assert scenarios.load("S07_regression", 2).bill().startswith("0 minutes")


def test_there_is_no_debrief_before_a_change_has_helped() -> None:
    variant = scenarios.load("S07_regression")
    question = questions.load("S7_change")
    repair = REPAIRS.get(variant.culprit, variant.culprit)
    names = [heading.removeprefix("option: ") for heading in ASKED["S7_change"].sections if "option" in heading]
    question.answer(question.form.letters[names.index("buckets")])
    assert "no debrief yet" in str(variant.debrief())
    question.answer(question.form.letters[names.index(repair)])
    said = str(variant.debrief())
    assert variant.called(variant.culprit) in said
    assert "60 minutes of the cluster" in said
    assert said.count("samples a second") == len(variant.case.repairs)
    assert "What each change leads to, for 30 minutes:" in said


def test_a_room_sees_the_debrief_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_POLL", "1")
    assert "It was one slow device." in str(scenarios.load("S07_regression").debrief())


def test_a_changed_setting_is_one_of_three_and_the_configuration_is_the_healthy_one() -> None:
    for seed in range(len(scenarios.load("S07_regression").case.culprits)):
        variant = scenarios.load("S07_regression", seed)
        said = str(variant.evidence())
        assert "- layers on the stages: 8, 8;" in said
        assert "- -" not in said
        own = case_of("S7_measure").sections.get(f"setting: {variant.culprit}")
        assert own is None or own.text in said


def test_the_setting_that_matters_is_written_as_the_others_are() -> None:
    sections = [section for name in CASES for section in case_of(f"{name}_measure").sections.items()]
    settings = [line for heading, section in sections if heading.startswith("setting") for line in items(section.text)]
    assert len(settings) > 30
    assert not any("`" in line for line in settings)  # code among plain words would reveal the answer


@pytest.mark.parametrize("name", scenarios.FAULTS)
def test_every_culprit_has_its_words(name: str) -> None:
    case = scenarios.load(name).case
    sections = case_of(f"{case.name}_change").sections
    assert {heading.removeprefix("culprit: ") for heading in sections if heading.startswith("culprit: ")} == set(
        case.culprits
    )
    assert {h.removeprefix("setting: ") for h in sections if h.startswith("setting: ")} <= set(case.culprits)
    if suspects := ASKED.get(f"{case.name}_suspect"):
        assert {h.removeprefix("option: ") for h in suspects.sections if h} == set(case.culprits)


@pytest.mark.parametrize(("room", "needed"), [("S01_single_node", False), ("S02_night_call", True)])
def test_ranks_are_got_ready_while_a_case_with_a_fault_is_loaded(room: str, needed: bool) -> None:
    program = (
        "from course_lib import ranks; got = []; ranks.warm_up = lambda: got.append(1); "
        f"import lessons.{room}.case; assert bool(got) is {needed}"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_what_does_not_exist_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="no instrument; choose one of placement"):
        scenarios.load("S02_night_call").measure("thermometer")
    assert journal.notes() == []


def test_instructors_have_the_answers_and_students_do_not() -> None:
    page = (Path(__file__).parents[2] / "lessons" / "instructors" / "variants.md").read_text(encoding="utf-8")
    for seed in range(12):
        variants = [scenarios.load(name, seed) for name in scenarios.FAULTS]
        causes = [variant.called(variant.culprit) for variant in variants]
        assert f"| {seed} | {' | '.join(causes)} |" in page
    assert "instructors" in course.FOR_AUTHORS
