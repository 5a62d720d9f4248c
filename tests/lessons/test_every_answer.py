"""All answers to the lessons' questions, run: one option is right, and each run shows its explanation."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from course_lib.classroom import questions
from course_lib.classroom.questions.forms import Choice, FreeText
from course_lib.classroom.questions.outcome import Outcome
from course_lib.ranks.parent import run as ranks_run
from lessons.L02_data_parallelism.questions import Machines
from lessons.L08_combining_mechanisms.questions import ACROSS
from lessons.L08_combining_mechanisms.runs import HybridExperiment
from tests.lessons.asked import ASKED
from tests.lessons.L02_data_parallelism.test_scaling import calculated
from tests.lessons.test_every_number import NAMES, RANKS

IDEA = "I do not know yet."
# The right option, and the numbers with which all of them are run: 0 are the lesson's, others have other ranks.
RIGHT: dict[str, tuple[str, tuple[int, ...]]] = {
    "Q5": ("c", (0, 1)),
    "Q4": ("b", (0, 2)),
    "Q1": ("a", (0, 1)),
    "Q3": ("b", (0, 2, 4)),
    "enough_stage": ("c", (0,)),
    "stage_3_sends": ("a", (0, 1)),
    "Q6": ("b", (0, 1)),
    "Q7": ("a", (0,)),
    "Q11": ("d", (1,)),
    "Q10": ("d", (0, 3)),
    "which_cut": ("c", (0, 1)),
    "one_overflow": ("b", (0,)),
    "Q9": ("d", (0,)),
    "which_axis_across": ("a", (0,)),
    "more_replicas": ("d", (0,)),
    "which_offer": ("b", (0,)),
}
# The text that a run must give with the lesson's numbers, for each option, or for an open case.
SAID = {
    "Q4": ["whose piece is not the whole model", "every sample once", "every sample 8 times", "not the whole model"],
    "Q1": ["same training, up to rounding", "are different from each other", "another training", "another training"],
    "Q3": ["speed-up gets worse", "most of what was lost comes back", "little changes", "the same, and it fitted"],
    "enough_stage": [
        "3.08 MiB",
        "1.83 MiB",
        "1.06 MiB just before the update: it fits.",
        "fits, but ZeRO-2 is enough.",
    ],
    "Q6": ["still holds 1.6 MB", "1.6 MB on each of 4", "6.4 MB on each of 4", "3.2 MB on each of 4"],
    # 4 turns of 30 and 60 ms, and 3 messages of 2 ms each way.
    "Q7": [f"idle for {1 - 90 / (4 * 90 + 12):.0%}", f"saves {12 / (4 * 90 + 12):.0%}", "800 kB", "90, 90, 90, 90."],
    "Q10": [f"MB4. What you said, it does {when}." for when in ("later", "earlier", "earlier", "just then", "later")],
    "which_cut": [f"sends {sent} bytes, and the numbers are" for sent in ("110,592", "92,160", "24,576", "92,160")],
    "one_overflow": ["others.", "the same, up to rounding.", "others, and some of them are NaN.", "others."],
    "which_axis_across": [
        "tp 8: the slow link makes a step much",
        "hardly costs",
        "hardly costs",
        "it makes a difference",
    ],
    "find_the_flaw": [
        "all gradients are equal to the last bit. With one more line that takes a share, they are different"
    ],
    "choose_strategy": ["64 replicas: does not fit"],
    "evaluate_strategy": ["the slowest is dp 1 x pp 1 x tp 8"],
}


@functools.cache
def answered(name: str, answer: str, seed: int) -> tuple[Outcome, set[int]]:
    """The outcome of an answer, and the numbers of ranks it was run on. (`test_scaling` says how Q3 is run.)"""
    run_on, ran = ranks_run.run_on, set()

    def watched(purpose: str, fn: Any, world_size: int, *how: Any) -> Any:
        ran.add(world_size)
        return run_on(purpose, fn, world_size, *how)

    form: Any = questions.load(name, seed).form
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks_run, "run_on", watched)
        patch.setattr(Machines, "step", calculated)
        return form.run(form.read(answer)), ran


@pytest.fixture(autouse=True, scope="module")
def nothing_has_run() -> None:
    """Forget the meshes that other tests have run, so that all runs of an answer are seen."""
    HybridExperiment.run.cache_clear()


def letters(name: str) -> str:
    """The letters of a question's options, from its page: loading all questions takes seconds."""
    return "abcdefgh"[: sum(heading.startswith("option: ") for heading in ASKED[name].sections)]


OPEN = [name for name in NAMES if "checklist" in ASKED[name].sections]


def test_every_question_with_options_is_looked_at() -> None:
    forms = {name: questions.load(name).form for name in NAMES}
    assert set(RIGHT) == {name for name, form in forms.items() if isinstance(form, Choice)}
    assert [name for name, form in forms.items() if isinstance(form, FreeText)] == OPEN
    assert {name: letters(name) for name in RIGHT} == {name: forms[name].letters for name in RIGHT}


@pytest.mark.parametrize(
    ("name", "seed", "letter"),
    [(name, seed, letter) for name, (_, seeds) in RIGHT.items() for seed in seeds for letter in letters(name)],
)
def test_one_option_is_right_and_every_run_shows_what_its_explanation_says(name: str, seed: int, letter: str) -> None:
    outcome, _ = answered(name, letter, seed)
    assert (outcome.right, outcome.shown) == (letter == RIGHT[name][0], True)
    if seed == 0 and name in SAID:
        assert SAID[name][letters(name).index(letter)] in outcome.happened


@pytest.mark.parametrize("name", OPEN)
def test_an_open_case_is_run_and_left_to_the_student_to_judge(name: str) -> None:
    outcome, _ = answered(name, IDEA, 0)
    assert (outcome.right, outcome.shown) == (None, True)
    assert "A good answer:" in outcome.why
    assert SAID.get(name, [""])[0] in outcome.happened != ""


@pytest.mark.parametrize(
    "name", [name for name in NAMES if any(RANKS.search(text) for _, text in ASKED[name].found.values())]
)
def test_a_report_says_on_how_many_ranks_it_was_run(name: str) -> None:
    """All its answers together run on what their reports say, as a mesh that two of them need is run once."""
    on: set[int] = set()
    said: set[int] = set()
    for answer in letters(name) or [IDEA if name in OPEN else questions.load(name).form.example]:
        outcome, ran = answered(name, answer, 0)
        numbers = {*map(int, re.findall(r"\d+", RANKS.findall(outcome.happened)[0]))}
        assert ran <= {1, *numbers}  # one process may run beside them
        on, said = on | ran, said | numbers
    assert on | {1} == said | {1}


def test_an_axis_reaches_across_on_real_ranks() -> None:
    for letter, (axis, sizes) in zip("abc", ACROSS.items(), strict=True):
        assert len(answered("which_axis_across", letter, 0)[0].pictures) == 2
        assert len({rank // 4 for rank in HybridExperiment(sizes).group(0, axis)}) == 2
