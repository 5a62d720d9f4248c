"""The memo: its text is kept while it is typed, its eight numbers are compared, and its pages need no other files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.classroom import journal, questions
from course_lib.classroom.questions import plan_text
from course_lib.classroom.questions.prose import items, read
from course_lib.planner import Estimate, Plan, estimate, search
from course_lib.planner.memory import memory_of
from course_lib.planner.spec import PLANNED, PRECISIONS, RECOMPUTE
from lessons import Card
from lessons.S05_memo import memo
from lessons.S05_memo.memo import BRIEFS, PARTS, PLAN, RULES, SECTIONS, brief, demands, export

ROOT = Path(__file__).parents[3]
MEMOS = read(*(ROOT / "lessons" / "instructors" / "memos").glob("*.md"))
CASE = brief()
GOOD = plan_text.parse(MEMOS["model"].sections[PLAN].text)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COURSE_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("COURSE_POLL", raising=False)
    return tmp_path / "state"


@pytest.fixture(scope="module")
def good() -> Estimate:
    return estimate(CASE.model, CASE.cluster, GOOD, CASE.batch)


def write(name: str) -> dict[str, Any]:
    """Write, commit and run all parts of an instructor's memo; return the outcome of each."""
    return {part: questions.load(part).answer(MEMOS[name].sections[part].text).right for part in PARTS}


# The case


def test_one_gpu_cannot_hold_the_model_and_one_node_can() -> None:
    assert 16 * CASE.model.parameters > CASE.cluster.spec.memory
    assert memo.one_node(CASE).fit == "may fit"


@pytest.mark.parametrize(
    ("plan", "is_met"),
    [
        (GOOD, [True, True, True]),
        (Plan(4, 2, 4, 2, "zb_h1", zero=1, sequence_parallel=True, recompute="selective"), [True, True, True]),
        (Plan(32), [False, False, True]),
        (Plan(32, zero=3), [True, False, True]),
        (Plan(1, 16, 2), [True, False, False]),
        (Plan(4, 2, 4, zero=1, schedule="naive"), [True, False, True]),
    ],
)
def test_a_plan_is_judged_by_memory_scaling_and_links(plan: Plan, is_met: list[bool]) -> None:
    found = estimate(CASE.model, CASE.cluster, plan, CASE.batch)
    said = [met for met, _ in demands(CASE, found)]
    if plan == Plan(32):  # it would be fast, but does not fit
        said[1] = False
    assert said == is_met
    feedback = questions.load(PLAN).answer(plan)
    assert feedback.right is all(met for met, _ in demands(CASE, found))
    assert feedback.right or "cannot tell it from yours" not in str(feedback)


def test_what_the_debrief_says_of_wrong_turns() -> None:
    """Replicas with ZeRO-3 are slower than one node; tensor ranks over two nodes are slower still."""
    turns = [estimate(CASE.model, CASE.cluster, plan, CASE.batch) for plan in (Plan(32, zero=3), Plan(1, 16, 2))]
    assert all(turn.fits for turn in turns)
    assert memo.one_node(CASE).step_time.total < turns[0].step_time.total < turns[1].step_time.total


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    sizes = st.sampled_from([1, 2, 3, 4, 5, 8, 10, 16, 32, 64])
    return {
        **{axis: draw(sizes) for axis in ("dp", "tp", "pp", "micro_batch")},
        "schedule": draw(st.sampled_from(PLANNED)),
        "virtual_stages": draw(st.sampled_from([1, 1, 2, 5])),
        "zero": draw(st.integers(0, 3)),
        "recompute": draw(st.sampled_from(RECOMPUTE)),
        "sequence_parallel": draw(st.booleans()),
        "precision": draw(st.sampled_from(PRECISIONS)),
        "cp": draw(st.sampled_from([1, 1, 1, 2])),
    }


@settings(max_examples=100)
@given(plans(), st.booleans())
def test_no_plan_crashes_a_check_and_none_that_does_not_fit_passes(fields: dict[str, Any], is_completed: bool) -> None:
    if is_completed:  # the replicas fill 32 devices, so doubling tp is possible
        fields["dp"] = max(1, 32 // (fields["tp"] * fields["pp"] * fields["cp"]))
    form: Any = questions.load(PLAN).form
    try:
        answer = form.read(" ".join(f"{name}={value}" for name, value in fields.items()))
    except ValueError as error:
        assert len(str(error)) > 20
        return
    plan = plan_text.parse(answer)
    ranks = memory_of(range(plan.pp), CASE.model, plan, plan.micro_batches(CASE.batch))
    fits = all(one.total <= CASE.cluster.spec.memory for one in ranks)
    assert form.run(answer).right in (False, fits)


# Eight numbers


def by_hand(plan: Estimate) -> dict[str, str]:
    """The numbers of the model memo, from the planner's parts and by formulas written here."""
    alone, step = memo.one_node(CASE).step_time.total, plan.step_time.total
    embedding = CASE.model.vocab * CASE.model.hidden
    wide = estimate(CASE.model, CASE.cluster, Plan(4, 2, 4, 2, zero=1, sequence_parallel=True, precision="fp32"), 256)
    return {
        "S5_state": f"{16 * CASE.model.parameters / 1e9:.1f} GB",
        "S5_need": f"{sum(plan.memory.parts.values()) / 2**30:.2f} GiB",
        # a ring of 4 on half of ten layers and the embedding, whose gradients the last stage has, too
        "S5_sent": f"{2 * ((10 * 12 * 5120**2 + embedding) / 2 * 2 * 3 / 4 + embedding / 2) / 1e9:.2f} GB",
        "S5_speed_up": f"{alone / step:.2f} times",
        "S5_bubble": f"{100 * plan.step_time.bubble / step:.2f} per cent",
        "S5_naive": "75 %",
        "S5_wide": f"{wide.memory.activations / 1e9:.2f} GB",
        "S5_lost": f"{step - alone / 4:.3f} sec",
    }


def test_eight_numbers_are_right_with_any_unit_and_wrong_beside_it(good: Estimate) -> None:
    questions.load(PLAN).answer(GOOD)
    for name, text in by_hand(good).items():
        number, unit = text.split(" ", 1)
        assert questions.load(name).answer(text).right, text
        assert questions.load(name).answer(f"{1.04 * float(number):.4f} {unit}").right is False, text
    assert len(by_hand(good)) == 8


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("S5_need", "28.0 GB", "powers of 1024"),
        ("S5_sent", "43.3 GB", "factor of 8"),
        ("S5_lost", "1.59 ms", "factor of a thousand"),
        ("S5_bubble", "7.6", "factor of a hundred"),
    ],
)
def test_a_known_slip_of_a_unit_is_named(name: str, text: str, said: str) -> None:
    questions.load(PLAN).answer(GOOD)
    assert said in questions.load(name).answer(text).outcome.why


@pytest.mark.parametrize("text", ["3,43 GB", "25 Gbit/s", "5.4 GB to the moon", "about 5 GB", "5.4", "GB"])
def test_what_cannot_be_read_gets_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"write (for instance '12 MB'|3\.43 with a point)"):
        questions.load("S5_sent").commit(text)


def test_nothing_is_compared_without_a_plan() -> None:
    for name in PARTS[1:]:
        feedback = questions.load(name).answer(MEMOS["model"].sections[name].text)
        assert feedback.right is None
        assert "Decide on a plan first" in feedback.outcome.happened


def test_a_plan_belongs_to_its_brief_and_the_last_one_counts() -> None:
    questions.load(PLAN).answer(Plan(32, zero=3))
    questions.load(PLAN, 1).answer(Plan(32, zero=3))
    questions.load(PLAN).commit(GOOD)
    assert questions.load("S5_naive").answer("75%").right
    plan = memo.decided(brief(1))
    assert plan and plan.plan == Plan(32, zero=3)
    assert memo.decided(brief(2)) is None


def test_numbers_are_asked_for_and_another_plan_says_what_it_makes_stale() -> None:
    assert "`state`: The weights" in memo.numbers(state="").outcome.happened
    questions.load(PLAN).answer(GOOD)
    assert "28.0 GB, not right." in str(memo.numbers(state="206 GB", need="28.0 GB"))
    assert "28.0 GiB, right." in str(memo.numbers(need="28.0 GiB"))
    questions.load("S5_memory").answer("It takes 5.4 GB to the moon.")
    assert memo.stale(CASE) == []
    other = questions.load(PLAN).answer(Plan(32, zero=3))
    assert memo.stale(CASE) == ["Out of memory", "What the fullest device needs"]
    assert "look again at these:\n\n- Out of memory" in str(other)
    found = memo.numbers().outcome.happened
    assert "28.0 GiB, right for an earlier plan, and not for this one." in found and "206 GB, right." in found
    questions.load(PLAN).answer(GOOD)
    assert memo.stale(CASE) == []
    typed = memo.numbers(state="206 GB", need="12,5 GiB").outcome.happened
    assert "206 GB, right." in typed and "`need`: '12,5 GiB' has a comma among its digits; write 12.5" in typed
    with pytest.raises(ValueError, match="'memory' is no number of the memo"):
        memo.numbers(memory="3 GB")


def test_a_section_of_prose_is_left_to_its_levels() -> None:
    questions.load(PLAN).answer(GOOD)
    feedback = questions.load("S5_memory").answer("It takes 5.4 GB to the moon.")
    assert feedback.right is None
    assert "Only you can judge the text." in feedback.outcome.happened and "3 of 3" in str(feedback)


# What is right depends on the brief


@pytest.mark.parametrize("seed", range(len(BRIEFS)))
def test_a_brief_has_plans_that_meet_its_demands(seed: int) -> None:
    case = brief(seed)
    assert case.seed == seed
    assert sum(all(met for met, _ in demands(case, one)) for one in search(case.model, case.cluster, case.batch)) >= 5


def test_bottleneck_and_mitigation_vary_over_the_briefs() -> None:
    found: dict[str, set[str]] = {"S5_bottleneck": set(), "S5_mitigation": set()}
    for seed, case in enumerate(map(brief, range(len(BRIEFS)))):
        questions.load(PLAN, seed).commit(search(case.model, case.cluster, case.batch).best.plan)
        for name in found:
            right = "".join(words[0] for words, out in questions.load(name, seed).form.reveal() if out.right)
            assert right, f"{name}, seed {seed}"
            found[name].add(right)
    assert all(len(rights) >= 3 for rights in found.values()), found
    assert {"d", "e"} <= set("".join(found["S5_mitigation"]))  # a network, and a larger minibatch, are right for some


def test_a_change_that_the_brief_does_not_allow_is_not_right() -> None:
    questions.load(PLAN).commit(GOOD)
    assert "network" not in RULES[CASE.rule][1]
    assert "the brief does not allow it" in questions.load("S5_mitigation").answer("d").outcome.happened


# The instructor's memos


@pytest.mark.parametrize("name", MEMOS)
def test_memos_are_judged_as_marked(name: str) -> None:
    found = write(name)
    fields = [part for part in PARTS if part not in (PLAN, *SECTIONS, "S5_bottleneck", "S5_mitigation")]
    wrong = [part for part in fields if not found[part]]
    assert (wrong or ["none"]) == items(MEMOS[name].sections["flagged"].text)
    right = {"model": (True, True, True), "wrong_numbers": (False, True, False), "wrong_ideas": (False, False, False)}
    assert tuple(found[part] for part in (PLAN, "S5_bottleneck", "S5_mitigation")) == right[name]
    assert all(found[part] is None for part in SECTIONS)


@pytest.mark.parametrize("name", MEMOS)
def test_memos_quote_the_planners_figures_to_the_digit(name: str) -> None:
    write(name)
    plan = memo.decided(CASE)
    assert plan
    time, alone = plan.step_time, memo.one_node(CASE).step_time.total
    faster, waiting = alone / time.total, time.data / time.total
    quotes = {
        "model": (
            f"{time.pipeline:.2f} s in a step of {time.total:.1f} s",
            f"a step takes {alone:.1f} s, so all 32 GPUs are {faster:.2f} times as fast, {faster / 4:.0%} of the ideal",
            f"the step waits {time.data:.2f} s for that",
            f"the planner has {time.bubble / time.total:.1%} for the bubble",
            f"The fullest device needs {plan.memory.total / 2**30:.1f} GiB",
            f"passes. It fits, it is {faster:.2f} times as fast",
            f"it takes {time.total - alone / 4:.2f} s more",
        ),
        "wrong_numbers": (
            f"The step waits {time.data:.1f} s for the gradients, {waiting:.0%} of it.",
            f"Thus the speed-up is {faster:.1f} times, and not 4 times.",
            f"A device sends {plan.flows['data'].bytes / 1e9:.1f} GB for it.",
            f"It fits, but is {faster:.2f} times as fast as one node",
        ),
        "wrong_ideas": (
            f"A device sends {plan.flows['data'].bytes / 1e9:.0f} GB in a step.",
            f"The speed-up is {faster:.1f} times.",
            f"The fullest device needs {plan.memory.total / 2**30:.1f} GiB",
        ),
    }
    text = " ".join(" ".join(section.text for section in MEMOS[name].sections.values()).split())
    assert [quote for quote in quotes[name] if quote not in text] == []


def test_every_part_of_every_memo_has_its_marks() -> None:
    for page in MEMOS.values():
        assert set(page.sections) == {"", *PARTS, "marks", "flagged"}
        assert all(part in page.sections["marks"].text for part in PARTS)


# Kept as it is typed


def test_what_is_typed_is_there_after_a_restart() -> None:
    card = Card("S5_memory")
    for text in ("It does not fit", "It does not fit, since", "It does not fit, since 16 bytes "):
        card.field.widget.value = text
    program = "from course_lib.classroom import journal; print(journal.latest('S5_memory', 0).answer)"
    again = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert again.stdout == "It does not fit, since 16 bytes \n"
    assert Card("S5_memory").field.answer == "It does not fit, since 16 bytes"
    assert [note.what for note in journal.notes()] == ["drafted"] * 3


def test_two_pages_lose_nothing() -> None:
    first, second = Card("S5_memory"), Card("S5_memory")
    first.field.widget.value = "From the first page."
    second.field.widget.value = "From the second page."
    assert [note.answer for note in journal.notes()] == ["From the first page.", "From the second page."]


# The pages to hand in

OUTSIDE = re.compile(r"(?:src|href|xlink:href|data|action)\s*=|url\((?!#)|@import|<script|<link|<iframe", re.IGNORECASE)


def exported(folder: Path, author: str = "") -> tuple[str, str]:
    """The memo and the sheet."""
    page, sheet = (file.read_text(encoding="utf-8") for file in export(folder, author))
    return page, sheet


def test_the_pages_load_nothing_from_outside_and_have_everything_in_them(tmp_path: Path) -> None:
    write("model")
    questions.load("S5_memory").keep("drafted", "Less than <b>this</b> & more: 29.7 GiB on the fullest device.")
    page, sheet = exported(tmp_path / "out", author="A & B")
    for text in (page, sheet):
        assert OUTSIDE.findall(text) == []
        assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}
        assert "by A &amp; B" in text
        assert all(questions.load(part).entry.title in text for part in PARTS)
    assert "Less than &lt;b&gt;this&lt;/b&gt; &amp; more" in page
    assert page.count("<svg") == 2
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_the_memo_has_no_marks_and_the_sheet_has_all_of_them(tmp_path: Path) -> None:
    write("wrong_numbers")
    page, sheet = exported(tmp_path)
    assert "not right" not in page and "of 3" not in page and "☐" not in page
    rows = dict(re.findall(r"<tr><td>([^<]+)</td><td>[^<]*</td><td>([^<]+)</td></tr>", sheet))
    wrong = {questions.load(part).entry.title for part in items(MEMOS["wrong_numbers"].sections["flagged"].text)}
    chosen = {questions.load(part).entry.title for part in (PLAN, "S5_mitigation")}
    assert {title for title, verdict in rows.items() if verdict == "not right"} == wrong | chosen
    assert sheet.count("___ of 3") == len(SECTIONS)


def test_an_unfinished_memo_can_be_exported(tmp_path: Path) -> None:
    assert [file.name for file in export(tmp_path)] == ["S05_memo.html", "S05_sheet.html"]
    questions.load("S5_memory").keep("drafted", "A beginning, 206 GB.")
    page, _ = exported(tmp_path)
    assert "A beginning, 206 GB." in page
    assert page.count(memo.UNWRITTEN) == len(SECTIONS)  # the plan, and all other sections
