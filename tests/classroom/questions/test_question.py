"""A question's way from an answer to its feedback, and into the file."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from course_lib.classroom import journal
from course_lib.classroom.questions.forms import Choice, Option
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Question
from course_lib.ranks import RunError


def outcome(right: bool) -> Outcome:
    assert [note.what for note in journal.notes()][-1] == "committed"
    return Outcome(right, "ran")


FORM = Choice((Option("one", partial(outcome, False), "not one"), Option("two", partial(outcome, True), "two it is")))
QUESTION = Question("Q4", 3, "Which one?", FORM)


def fail() -> Outcome:
    raise RunError("Stopped.")


def kept() -> list[tuple[str, str, int, object, bool | None]]:
    return [note[1:] for note in journal.notes()]


def test_an_answer_is_kept_before_it_is_run_and_then_with_what_came_of_it() -> None:
    assert QUESTION.answer("A").right is False
    assert QUESTION.answer("b").right is True
    assert kept() == [
        ("committed", "Q4", 3, "a", None),
        ("ran", "Q4", 3, "a", False),
        ("committed", "Q4", 3, "b", None),
        ("ran", "Q4", 3, "b", True),
    ]


def test_what_is_no_answer_is_not_kept() -> None:
    with pytest.raises(ValueError, match="is not an option"):
        QUESTION.answer("z")
    assert kept() == []


def test_an_answer_whose_run_was_stopped_is_still_kept() -> None:
    question = Question("Q4", 0, "Which one?", Choice((Option("one", fail, ""), Option("two", fail, ""))))
    with pytest.raises(RunError):
        question.answer("a")
    assert kept() == [("committed", "Q4", 0, "a", None)]


def test_an_answer_that_cannot_be_kept_is_run_all_the_same(state: Path) -> None:
    state.write_text("a file where the folder should be", encoding="utf-8")
    question = Question("Q4", 0, "?", Choice((Option("one", partial(Outcome, True, "ran"), "why"),)))
    feedback = question.answer("a")
    assert feedback.right
    assert question.latest() is None


def test_the_latest_answer_is_found_again_with_its_numbers() -> None:
    QUESTION.answer("a")
    note = QUESTION.latest()
    assert note is not None
    assert (note.answer, note.right) == ("a", False)
    assert Question("Q4", 0, "?", FORM).latest() is None


def test_a_room_leaves_no_trace() -> None:
    question = Question("Q4", 0, "?", Choice((Option("one", partial(Outcome, True, "ran"), "why"),)))
    assert [feedback.answer for feedback in question.reveal()] == ["a, one"]
    assert kept() == []
