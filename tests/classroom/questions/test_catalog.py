"""Every question of the course, for the numbers of the lesson and for others."""

from __future__ import annotations

import importlib

import pytest

from course_lib.classroom import questions, rooms
from course_lib.classroom.questions.forms import Choice, FreeText, Ordering
from course_lib.classroom.questions.question import Seeded
from tests.lessons.asked import ASKED

SEEDS = range(1, 8)


def family(name: str) -> Seeded | None:
    """A question before it has any numbers, as some search for a plan when they get them.

    None for a step of a scenario, whose other numbers come with those of all its steps.
    """
    found = importlib.import_module(rooms.module_of(ASKED[name].file)).QUESTIONS[name]
    return found if isinstance(found, Seeded) else None


WITH_NUMBERS = [name for name in ASKED if (one := family(name)) and one.others]
WITHOUT_NUMBERS = [name for name in ASKED if (one := family(name)) and not one.others]


@pytest.mark.parametrize("name", ASKED)
def test_a_question_has_a_text_and_explains_its_answers(name: str) -> None:
    question = questions.load(name)
    assert question.text.endswith(("?", ".", "```"))
    own = [option.why for option in question.form.options] if isinstance(question.form, Choice) else [question.form.why]
    assert all(own)
    assert all(why in question.form.why for why in own)
    assert question.form.read(question.form.example)


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_a_seed_makes_other_numbers_and_always_the_same(name: str) -> None:
    first = questions.load(name)
    shown = {(question.text, tuple(question.form.lines)) for question in (questions.load(name, s) for s in SEEDS)}
    assert shown - {(first.text, tuple(first.form.lines))}
    assert questions.load(name, 3).text == questions.load(name, 3).text


@pytest.mark.parametrize("name", ASKED)
def test_options_and_events_differ_from_each_other(name: str) -> None:
    for seed in (0, *(SEEDS if questions.load(name).varies else ())):
        form = questions.load(name, seed).form
        if isinstance(form, Choice):
            assert 4 <= len(form.options) <= 8
        if isinstance(form, (Choice, Ordering)):
            assert len(set(form.lines)) == len(form.lines)
        if isinstance(form, FreeText):
            assert len(form.checklist) >= 3


def test_what_is_not_in_the_catalog_is_refused() -> None:
    with pytest.raises(ValueError, match="name='Q99' is not a question; choose one of Q5, one_machine, Q4"):
        questions.load("Q99")


def test_a_question_without_other_numbers_says_so() -> None:
    for name in WITHOUT_NUMBERS:
        with pytest.raises(ValueError, match=f"seed=1: {name} has no other numbers"):
            questions.load(name, 1)
