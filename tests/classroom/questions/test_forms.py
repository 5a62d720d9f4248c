"""The four forms, with experiments that only echo the answer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from course_lib.classroom.questions import markup
from course_lib.classroom.questions.forms import Choice, FreeText, Number, Option, Ordering
from course_lib.classroom.questions.outcome import UNSHOWN, Feedback, Outcome
from course_lib.classroom.questions.units import BYTES, Slip


def says(text: str, right: bool) -> Any:
    return partial(Outcome, right, text)


CHOICE = Choice((Option("one", says("ran one", False), "not one"), Option("two", says("ran two", True), "two it is")))
NUMBER = Number(
    BYTES, partial(Outcome, None, "It sent 8 MB.", measured=8e6), "because of this", (Slip(4, "for all four ranks"),)
)
TEXT = FreeText(lambda: Outcome(True, "ran it"), "This is it.", ("names the cause", "names a remedy"))


def test_each_option_runs_its_own_experiment() -> None:
    assert (CHOICE.run("a").happened, CHOICE.run("a").why, CHOICE.run("a").right) == ("ran one", "not one", False)
    assert (CHOICE.run("b").happened, CHOICE.run("b").why, CHOICE.run("b").right) == ("ran two", "two it is", True)
    assert CHOICE.words("b") == "b, two"
    assert CHOICE.read(" B ") == "b"


@pytest.mark.parametrize("given", ["c", "", "ab", None, 1])
def test_what_is_no_option_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="is not an option; choose one of a, b"):
        CHOICE.read(given)


def test_a_number_is_compared_with_what_was_measured() -> None:
    assert NUMBER.run("8 MB").right
    assert NUMBER.run("8.05 MB").right
    assert NUMBER.run("8.2 MB").right is False
    assert NUMBER.run("32 MB").why.startswith("for all four ranks")
    assert NUMBER.run("64 MB").why.startswith("You are off by a factor of 8")
    assert NUMBER.run("3 MB").why == "because of this"
    with pytest.raises(ValueError, match="has no unit"):
        NUMBER.read(8)


def test_an_order_names_every_event_once() -> None:
    ordering = Ordering({"x": "first", "y": "second"}, lambda order: Outcome(order == ("x", "y"), "ran"), "why")
    assert ordering.read("y x") == ordering.read(("y", "x")) == ["y", "x"]
    assert ordering.run(["x", "y"]).right
    assert not ordering.run(["y", "x"]).right
    for given in ("x", "x y y", "x z"):
        with pytest.raises(ValueError, match="has to name each of these once: x y"):
            ordering.read(given)


def test_a_text_is_for_the_student_to_compare() -> None:
    outcome = TEXT.run("my answer")
    assert outcome.right is None
    assert outcome.happened == "ran it"
    assert "This is it." in outcome.why
    assert "- names a remedy" in outcome.why
    with pytest.raises(ValueError, match="answer is empty"):
        TEXT.read("  ")


def test_a_room_sees_every_option_and_no_judgement_of_an_answer() -> None:
    assert [words for words, _ in CHOICE.reveal()] == ["a, one", "b, two"]
    ((words, outcome),) = NUMBER.reveal()
    assert (words, outcome.right, outcome.happened) == ("", None, "It sent 8 MB.")


def test_feedback_says_in_words_what_its_color_says() -> None:
    right, wrong = Feedback("b", Outcome(True, "ran")), Feedback("a", Outcome(False, "ran"))
    assert str(right).startswith("Right. You answered: b")
    assert str(wrong).startswith("Not this one. You answered: a")
    for feedback in (right, wrong):
        assert feedback.headline.split(".")[0] in feedback._repr_mimebundle_()["text/html"]


def test_feedback_says_what_happened_and_why() -> None:
    feedback = Feedback("a", Outcome(False, "ran `it`", "why"))
    assert str(feedback) == "Not this one. You answered: a\n\nran it\n\nwhy"
    bundle = feedback._repr_mimebundle_()
    assert bundle["text/plain"] == str(feedback)
    assert "<code>it</code>" in bundle["text/html"]


def test_feedback_admits_that_a_run_did_not_show_what_is_claimed() -> None:
    assert UNSHOWN in str(Feedback("a", Outcome(False, "ran", shown=False)))
    assert UNSHOWN not in str(Feedback("a", Outcome(False, "ran")))


def test_an_answer_cannot_smuggle_in_html() -> None:
    html = Feedback("<script>alert(1)</script>", Outcome(None, "ran"))._repr_mimebundle_()["text/html"]
    assert "<script>" not in html


def test_the_markup_has_paragraphs_lists_and_code() -> None:
    text = "One `x < y`.\n\n- first\n- second\n\n```\na < b\n\nc\n```\n\nEnd."
    assert markup.to_html(text) == (
        "<p>One <code>x &lt; y</code>.</p><ul><li>first</li><li>second</li></ul>"
        "<pre style='margin:4px 0;padding:8px;overflow-x:auto'>a &lt; b\n\nc</pre><p>End.</p>"
    )
    assert markup.to_text(text).startswith("One x < y.\n\n- first")
