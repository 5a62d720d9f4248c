"""The memo: its text is kept while it is typed, its numbers are compared, and its page needs no other files."""

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
from course_lib.planner import Estimate, Plan, estimate
from course_lib.planner.memory import memory_of
from course_lib.planner.spec import PLANNED, PRECISIONS, RECOMPUTE
from lessons import Card
from lessons.S05_memo import memo
from lessons.S05_memo.memo import CASE, PARTS, PLAN, SECTIONS, check, demands, export
from lessons.S05_memo.numbers import AGREES, DIFFERS, NOT_CHECKED

ROOT = Path(__file__).parents[3]
MEMOS = read(*(ROOT / "lessons" / "instructors" / "memos").glob("*.md"))
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
    found = {part: questions.load(part).answer(MEMOS[name].sections[part].text) for part in PARTS}
    return {part: feedback.right for part, feedback in found.items()}


def verdicts(text: str, plan: Estimate) -> list[str]:
    return [remark.verdict for remark in check(text, plan)]


# The case


def test_one_gpu_cannot_hold_the_model_and_one_node_can() -> None:
    assert 16 * CASE.model.parameters > CASE.cluster.spec.memory
    assert memo.one_node().fit == "may fit"


@pytest.mark.parametrize(
    ("plan", "is_met"),
    [
        (GOOD, [True, True, True]),
        (Plan(4, 2, 4, 1, "zb_h1", zero=1, sequence_parallel=True, recompute="selective"), [True, True, True]),
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
    assert memo.one_node().step_time.total < turns[0].step_time.total < turns[1].step_time.total


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


@settings(max_examples=300)
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
    found = estimate(CASE.model, CASE.cluster, plan, CASE.batch)
    ranks = memory_of(range(plan.pp), CASE.model, plan, plan.micro_batches(CASE.batch))
    fits = all(one.total <= CASE.cluster.spec.memory for one in ranks)
    assert form.run(answer).right in (False, fits)
    assert check("A step takes 9 s, and 3.2 GiB of weights are 50% of it, 8 times.", found)


# Numbers in prose


@pytest.mark.parametrize(
    "text",
    [
        "The fullest device needs 28.0 GiB.",
        "The fullest device needs 30.1 GB.",
        "Weights take 3.2 GiB, gradients 3.2 GiB, and Adam's state 4.8 GiB.",
        "A step takes 8.8 s.",
        "A step takes about 8,800 ms.",
        "The bubble is 7.6%; by the formula it is 8.6%.",
        "It is 3.6 times as fast as one node, 89% of the ideal.",
        "Its speed-up is 3.57x.",
        "NVLink has 300 GB/s, and the network 25 Gbit/s, which are 3.1 GB/s.",
        "Each of the 13 billion parameters takes 16 bytes, 206 GB in all.",
        "Without ZeRO the optimizer's state would take 19 GiB.",
        "Without ZeRO it would not fit. The optimizer's state takes 19 GiB then.",
        "12 GiB are left on it.",
        "We have dp 4 x tp 2 x pp 4 and 32 micro-batches of 2.",
    ],
)
def test_right_numbers_are_not_flagged(text: str, good: Estimate) -> None:
    assert set(verdicts(text, good)) == {AGREES}


def test_any_figure_of_the_plan_can_be_quoted_and_is_called_by_its_name(good: Estimate) -> None:
    time, links, message = good.step_time, good.cluster, good.flows["pipeline"]
    times = links.inside_link.bandwidth / links.between_link.bandwidth
    quotes = {
        f"A link inside a node carries {times:.0f} times as much.": "how much faster the links inside a node are",
        "We need 80% of it.": "what is expected",
        "All nodes have to be 3.2 times as fast.": "what is expected",
        f"Our speed-up is {memo.one_node().step_time.total / time.total:.2f}x.": "the speed-up from one node",
        f"On one node a step takes {memo.one_node().step_time.total:.1f} s.": "a step on one node",
        f"Messages between stages take {time.pipeline:.2f} s of it.": "messages between stages, in a step",
        f"The MFU is {good.mfu:.1%}.": "the MFU",
        f"Thus {good.memory.total / good.capacity:.0%} of its memory are in use.": "the share of the memory in use",
        "Between two stages, a micro-batch is 41.9 MB.": "what a micro-batch is between two stages",
        "Naive splitting leaves devices idle for 75% of a step.": "idle with naive splitting",
        "With naive splitting each of them works 25% of the time.": "busy with naive splitting",
        "Naive splitting would be slower, by 3.7 times.": "pipelining against naive splitting",
        f"Stages send for {message.seconds:.2f} s.": "sending, hidden or not, messages between stages",
    }
    assert {text: [(one.verdict, one.text) for one in check(text, good)] for text in quotes} == {
        text: [(AGREES, name)] for text, name in quotes.items()
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("The fullest device needs 28.0 GB.", "GiB in powers of 1024"),
        ("The fullest device needs 28.0 MiB.", "factor of a thousand"),
        ("Gradients take 6.4 GiB.", "factor of 2"),
        ("The optimizer's state takes 19.2 GiB of it.", "factor of 4"),
        ("The network carries 25 GB/s.", "factor of 8"),
        ("A step takes 8.8 ms.", "factor of a thousand"),
        ("A step takes 88 s.", "factor of ten"),
        ("The bubble is 3.8%.", "factor of 2"),
        ("The MFU is 98%.", "factor of 2"),
        ("Gradients take 102 GiB.", "factor of 32"),
        ("Activations take 4.8 GiB.", "this for the optimizer state"),
    ],
)
def test_a_wrong_unit_factor_or_quantity_is_flagged(text: str, said: str, good: Estimate) -> None:
    (remark,) = check(text, good)
    assert remark.verdict == DIFFERS
    assert said in remark.text


@pytest.mark.parametrize(
    "text",
    [
        "We had 17 meetings about it.",
        "The kitchen is 6.7% larger.",
        "Activations take 17 GiB.",
        "Somebody has 47 GB of photographs.",
        "If the network were faster, a step would take 4.5 s.",
        "Naive splitting keeps gradients of 6.4 TB.",
        "With 4 times the GPUs it should have been faster.",
        "It is 4 times as fast as one node.",
    ],
)
def test_what_fits_no_quantity_is_not_blamed(text: str, good: Estimate) -> None:
    assert verdicts(text, good) == [NOT_CHECKED]


@pytest.mark.parametrize("text", ["ZeRO-1 with 1F1B and GPT-3 in 16-bit.", "No number at all.", "", "..., ;; % GB 1e"])
def test_what_is_no_number_is_left_alone(text: str, good: Estimate) -> None:
    assert check(text, good) == []


@settings(max_examples=200)
@given(st.text(alphabet="0123456789., GiBMs%x×-/\nbubbleoptimizer", max_size=60))
def test_no_text_crashes_the_comparison(text: str) -> None:
    check(text, estimate(CASE.model, CASE.cluster, GOOD, CASE.batch))


def test_a_section_without_a_plan_asks_for_one() -> None:
    feedback = questions.load("S5_memory").answer("It takes 206 GB.")
    assert "Decide on a plan first" in feedback.outcome.happened
    assert questions.load("S5_bottleneck").answer("a").right is None


def test_a_section_is_compared_with_the_plan_decided_on_last() -> None:
    questions.load(PLAN).answer(Plan(32, zero=3))
    questions.load(PLAN).commit(GOOD)
    feedback = questions.load("S5_memory").answer("Gradients take 6.4 GiB. We had 17 meetings.")
    assert "6.4 GiB: For the gradients on the fullest device the planner has 3.19 GiB." in feedback.outcome.happened
    assert "Not checked: 17." in feedback.outcome.happened
    assert "3 of 3" in str(feedback)


# The instructor's memos


@pytest.mark.parametrize("name", MEMOS)
def test_flawed_memos_are_flagged_where_they_are_flawed(name: str) -> None:
    write(name)
    plan = memo.decided()
    assert plan
    flagged = [
        f"{part}: {remark.number}"
        for part in SECTIONS
        for remark in check(MEMOS[name].sections[part].text, plan)
        if remark.verdict == DIFFERS
    ]
    assert (flagged or ["none"]) == items(MEMOS[name].sections["flagged"].text)


@pytest.mark.parametrize("name", MEMOS)
def test_memos_quote_the_planners_figures_to_the_digit(name: str) -> None:
    write(name)
    plan = memo.decided()
    assert plan
    time, alone = plan.step_time, memo.one_node().step_time.total
    faster, waiting = alone / time.total, time.data / time.total
    quotes = {
        "model": (
            f"{time.pipeline:.2f} s in a step of {time.total:.1f} s",
            f"a step takes {alone:.1f} s, so all 32 GPUs are {faster:.2f} times as fast, {faster / 4:.0%} of the ideal",
            f"the step waits {time.data:.2f} s for that",
            f"the planner has {time.bubble / time.total:.1%} for the bubble",
            f"The fullest device needs {plan.memory.total / 2**30:.1f} GiB",
            f"passes. It fits, it is {faster:.2f} times as fast",
        ),
        "wrong_numbers": (
            f"The step waits {time.data:.1f} s for the gradients, {waiting:.0%} of it.",
            f"Thus the speed-up is {faster:.1f} times, and not 4 times.",
            f"A device sends {plan.flows['data'].bytes / 1e9:.1f} GB for it.",
            f"It fits, but is {faster:.2f} times as fast as one node",
            f"A step takes {time.total:.1f} ms",
        ),
        "wrong_ideas": (
            f"A device sends {plan.flows['data'].bytes / 1e9:.0f} GB in a step.",
            f"The speed-up is {faster:.1f} times.",
            f"The fullest device needs {plan.memory.total / 2**30:.1f} GiB",
        ),
    }
    text = " ".join(" ".join(section.text for section in MEMOS[name].sections.values()).split())
    assert [quote for quote in quotes[name] if quote not in text] == []


@pytest.mark.parametrize(
    ("name", "right"),
    [("model", (True, True, True)), ("wrong_numbers", (False, True, False)), ("wrong_ideas", (False, False, False))],
)
def test_plan_bottleneck_and_mitigation_are_judged_as_marked(name: str, right: tuple[bool, ...]) -> None:
    found = write(name)
    assert tuple(found[part] for part in (PLAN, *PARTS[-2:])) == right
    assert all(found[part] is None for part in SECTIONS)


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


def test_two_pages_lose_nothing_and_tell_of_each_other() -> None:
    first, second = Card("S5_memory"), Card("S5_memory")
    first.field.widget.value = "From the first page."
    second.field.widget.value = "From the second page."
    assert "Another page has written this meanwhile" in second.status.value
    assert "From the first page." in second.status.value
    first.field.widget.value = "From the first page, and more."
    assert "From the second page." in first.status.value
    first.field.widget.value = "From both."
    assert Card("S5_memory").field.widget.value == "From both."
    assert len({note.answer for note in journal.notes()}) == 4


# The page to hand in

OUTSIDE = re.compile(r"(?:src|href|xlink:href|data|action)\s*=|url\((?!#)|@import|<script|<link|<iframe", re.IGNORECASE)


def test_the_page_loads_nothing_from_outside_and_has_everything_in_it(tmp_path: Path) -> None:
    write("model")
    questions.load("S5_memory").keep("drafted", "Less than <b>this</b> & more: 29.7 GiB on the fullest device.")
    files = {file.name: file.read_text(encoding="utf-8") for file in export(tmp_path / "out", author="A & B")}
    page, text = files["S05_memo.html"], files["S05_memo.md"]
    assert OUTSIDE.findall(page) == []
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert "by A &amp; B" in page
    assert "Less than &lt;b&gt;this&lt;/b&gt; &amp; more" in page
    assert "Less than <b>this</b> & more" in text
    assert page.count("<svg") == 3
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert [name for name in files if f"]({name})" in text] == [name for name in files if name.endswith(".svg")]
    for part in PARTS:
        assert questions.load(part).entry.title in page
        assert questions.load(part).entry.title in text


def test_an_unfinished_memo_can_be_exported(tmp_path: Path) -> None:
    assert [file.name for file in export(tmp_path)] == ["S05_memo.md", "S05_memo.html"]
    questions.load("S5_memory").keep("drafted", "A beginning, 206 GB.")
    text = export(tmp_path)[0].read_text(encoding="utf-8")
    assert "A beginning, 206 GB." in text
    assert text.count(memo.UNWRITTEN) == len(PARTS) - 1
