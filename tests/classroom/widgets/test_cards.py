"""Question cards, pressed without a browser; tests/browser does it with the mouse and with keys."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from course_lib.classroom import journal, questions
from course_lib.classroom.questions.forms import Choice, FreeText, Number, Option, Ordering, PlanForm
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Question
from course_lib.classroom.questions.units import BYTES
from course_lib.classroom.widgets.cards import AGAIN, DECIDE, HIDE, IN_A_PLAN, OTHER, RUN
from course_lib.planner import Cluster, ModelSpec, Plan
from course_lib.ranks import RunError
from lessons import Card


def stopped() -> Outcome:
    raise RunError("Rank 1 was stopped.")


FORMS: dict[str, Any] = {
    "Q4": Choice(
        (
            Option("one", partial(Outcome, False, "ran one"), "not one"),
            Option("two", partial(Outcome, True, "ran two"), "two it is"),
            Option("three", stopped, "never seen"),
        )
    ),
    "bytes_sent": Number(BYTES, partial(Outcome, None, "It sent 8 MB.", measured=8e6), "because"),
    "Q2": Ordering({"x": "first x", "y": "then y"}, lambda order: Outcome(order == ("y", "x"), "ran it"), "y is first"),
    "same_plan": PlanForm(
        ModelSpec(layers=24, hidden=2048, heads=16, sequence=2048, vocab=51200),
        Cluster(),
        64,
        lambda one: Outcome(one.plan.tp == 2, f"{one.plan.devices} devices"),
        "two tensor ranks",
        Plan(dp=8),
    ),
    "Q1": FreeText(lambda: Outcome(None, "ran it"), "This is it.", ("a cause", "a remedy")),
}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Answers in a file for this test alone, and questions whose experiments take no time."""
    monkeypatch.setenv("COURSE_STATE", str(tmp_path))
    monkeypatch.delenv("COURSE_POLL", raising=False)
    monkeypatch.setattr(
        questions, "load", lambda name, seed=0: Question(name, seed, f"Case {seed}?", FORMS[name], name != "Q1")
    )
    return tmp_path


def press(button: Any) -> None:
    """Press a button as the browser does."""
    assert button.enabled
    assert button.label
    button.clicks += 1


def whats() -> list[str]:
    return [note.what for note in journal.notes()]


def test_a_choice_is_decided_then_run_then_tried_again() -> None:
    card = Card("Q4")
    assert card.field is not None
    card.field.widget.chosen = [0]
    press(card.main)
    assert (card.main.label, card.field.widget.disabled, card.feedback.value) == (RUN, True, "")
    assert whats() == ["committed"]
    press(card.main)
    assert card.main.label == AGAIN
    assert "Not this one." in card.feedback.value
    assert "ran one" in card.feedback.value
    assert "not one" in card.feedback.value
    press(card.main)
    assert (card.main.label, card.field.widget.disabled, card.feedback.value) == (DECIDE, False, "")
    card.field.widget.chosen = [1]
    press(card.main)
    press(card.main)
    assert "Right." in card.feedback.value
    assert [note.right for note in journal.notes()] == [None, False, None, True]


def test_a_key_that_comes_early_counts_only_after_a_decision() -> None:
    """A result would vanish if one more press meant to try another answer."""
    card = Card("Q4")
    card.field.widget.chosen = [1]
    steps = {}
    for _ in range(3):
        steps[card.main.label] = card.main.leads_on
        press(card.main)
    assert steps == {DECIDE: True, RUN: False, AGAIN: False}


def test_a_change_made_before_the_click_but_heard_of_after_it_is_what_was_decided() -> None:
    card = Card("Q4")
    card.field.widget.chosen = [1]
    press(card.main)
    card.field.widget.chosen = [2]  # as the browser sends it after holding it back
    assert "decided: c" in card.status.value
    press(card.main)
    assert journal.latest("Q4", 0).answer == "c"

    card = Card("bytes_sent")
    card.field.widget.value = "8 MB"
    press(card.main)
    card.field.widget.value = ""
    assert "Decide on an answer first" in card.status.value
    assert card.main.label == DECIDE
    assert not card.field.widget.disabled


def test_without_an_answer_nothing_is_decided() -> None:
    card = Card("Q4")
    press(card.main)
    assert card.main.label == DECIDE
    assert "role='alert'" in card.status.value
    assert "Decide on an answer first" in card.status.value
    assert whats() == []


def test_a_number_without_its_unit_is_asked_for_again() -> None:
    card = Card("bytes_sent")
    assert card.field is not None
    card.field.widget.value = "8"
    press(card.main)
    assert "has no unit; write for instance" in card.status.value
    assert card.main.label == DECIDE
    card.field.widget.value = "8 MB"
    press(card.main)
    assert card.field.widget.disabled
    press(card.main)
    assert "Right." in card.feedback.value


def test_an_order_is_run_as_it_stands() -> None:
    card = Card("Q2")
    assert card.field is not None
    card.field.widget.order = ["y", "x"]
    press(card.main)
    press(card.main)
    assert "Right." in card.feedback.value
    assert journal.notes()[-1].answer == ["y", "x"]


def choose(card: Card, **chosen: str) -> None:
    """Choose an option as the browser does."""
    card.field.widget.chosen = {**card.field.widget.chosen, **chosen}


def test_a_plan_is_put_together_from_lists_and_judged() -> None:
    card = Card("same_plan")
    assert card.field.answer == journal_form(Plan(dp=8))
    assert card.field.widget.said == "8 devices, 8 micro-batches for each replica."
    press(card.main)
    press(card.main)
    assert "Not this one. You answered: data 8 x tensor 1 x pipeline 1" in card.feedback.value
    press(card.main)
    choose(card, dp="4", tp="2", recompute="full")
    press(card.main)
    press(card.main)
    assert "Right." in card.feedback.value and "two tensor ranks" in card.feedback.value
    assert journal.notes()[-1].answer == "dp=4 tp=2 pp=1 micro_batch=1 recompute=full"


def journal_form(plan: Plan) -> str:
    """A plan in the notation of the lists: all fields, in order."""
    return " ".join(f"{name}={getattr(plan, name)}" for name in IN_A_PLAN)


def test_a_plan_that_cannot_exist_is_told_so_before_and_after_the_click() -> None:
    card = Card("same_plan")
    choose(card, tp="2")
    reason = "dp=8 x tp=2 x pp=1 makes 16, but the cluster has 8 devices; with dp=4 it would"
    assert card.field.widget.said == f"Not possible: {reason}."
    press(card.main)
    assert reason in card.status.value
    assert (card.main.label, whats()) == (DECIDE, [])


def test_stages_on_a_rank_are_asked_for_only_where_a_schedule_interleaves() -> None:
    card = Card("same_plan")
    assert card.field.widget.off == ["virtual_stages"]
    choose(card, dp="1", pp="8", schedule="zbv")
    assert questions.load("same_plan").commit(card.field.answer).endswith("schedule=zbv virtual_stages=2")
    choose(card, schedule="interleaved_1f1b", virtual_stages="3")
    assert card.field.widget.off == []
    assert questions.load("same_plan").commit(card.field.answer).endswith("virtual_stages=3")
    choose(card, schedule="1f1b")
    assert "virtual_stages" not in questions.load("same_plan").commit(card.field.answer)


def test_a_room_gives_a_plan() -> None:
    card = Card("same_plan", poll=True)
    choose(card, dp="4", tp="2")
    press(card.main)
    assert "Right." in card.feedback.value
    assert (card.main.label, whats()) == (HIDE, [])


def test_a_text_is_kept_while_it_is_written_and_compared_at_the_end() -> None:
    card = Card("Q1")
    assert card.field is not None
    card.field.widget.value = "half an ans"
    assert whats() == ["drafted"]
    assert Card("Q1").field.answer == "half an ans"
    press(card.main)
    press(card.main)
    assert "This is it." in card.feedback.value
    assert "a remedy" not in card.feedback.value  # it is only in the checklist
    card.checklist.chosen = [1]
    assert (whats()[-1], journal.notes()[-1].answer) == ("checked", [1])


def test_a_card_opened_anew_shows_what_was_decided() -> None:
    first = Card("Q4")
    first.field.widget.chosen = [1]
    press(first.main)
    second = Card("Q4")
    assert (second.field.answer, second.main.label) == ("b", RUN)
    press(second.main)
    third = Card("Q4")
    assert (third.field.answer, third.main.label) == ("b", DECIDE)
    assert "It was right." in third.status.value


def test_a_kept_answer_that_no_longer_fits_the_question_is_left_alone() -> None:
    journal.record("committed", "Q4", 0, "z")
    card = Card("Q4")
    assert (card.field.answer, card.main.label) == (None, DECIDE)


def test_a_run_that_does_not_end_well_says_so_and_can_be_repeated() -> None:
    card = Card("Q4")
    card.field.widget.chosen = [2]
    press(card.main)
    press(card.main)
    assert "role='alert'" in card.status.value
    assert "Rank 1 was stopped." in card.status.value
    assert (card.main.label, card.main.enabled) == (RUN, True)


def test_a_run_that_is_stopped_can_be_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card("Q4")
    assert card.field is not None
    card.field.widget.chosen = [1]
    press(card.main)
    with monkeypatch.context() as patch:
        patch.setattr(Question, "run", stop)
        press(card.main)
    assert "Stopped. Press the button to run it again." in card.status.value
    assert (card.main.label, card.running.words) == (RUN, "")
    press(card.main)
    assert card.main.label == AGAIN


def stop(question: Question, answer: str) -> Any:
    raise KeyboardInterrupt


def test_while_it_runs_it_says_so_and_the_second_time_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card("Q4")
    assert card.field is not None
    card.field.widget.chosen = [1]
    said: list[tuple[str, float]] = []
    card.running.observe(lambda change: said.append((card.running.words, card.running.seconds)), "words")
    clock = itertools.count(step=3)  # the clock advances by three seconds at each look
    monkeypatch.setattr("course_lib.classroom.widgets.cards.time", SimpleNamespace(monotonic=lambda: next(clock)))
    for _ in range(2):
        for _ in (DECIDE, RUN, AGAIN):
            press(card.main)
    assert [seconds for words, seconds in said if words == "Running it on real ranks"] == [0, 3]
    assert card.running.words == ""


def test_other_numbers_are_asked_for_with_a_button() -> None:
    card = Card("Q4")
    assert card.other.label == OTHER
    press(card.other)
    assert card.question.seed == 1
    assert "Case 1?" in card.text.value
    assert card.main.label == DECIDE
    assert Card("Q1").other.label == ""


def test_a_room_sees_the_question_and_then_every_answer() -> None:
    card = Card("Q1", poll=True)
    assert card.field is None
    card = Card("bytes_sent", poll=True)
    assert (card.main.label, card.feedback.value) == (RUN, "")
    press(card.main)
    assert "It sent 8 MB." in card.feedback.value
    assert "You answered" not in card.feedback.value
    press(card.main)
    assert (card.main.label, card.feedback.value) == (RUN, "")
    assert whats() == []


def test_a_room_gives_an_order() -> None:
    card = Card("Q2", poll=True)
    assert card.field is not None
    card.field.widget.order = ["y", "x"]
    press(card.main)
    assert "Right." in card.feedback.value
    assert card.main.label == HIDE
    assert whats() == []


def test_all_cards_are_for_a_room_if_the_presenter_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_POLL", "1")
    assert Card("Q4").poll
    assert not Card("Q4", poll=False).poll


@pytest.mark.parametrize("name", FORMS)
def test_where_no_widget_runs_there_is_the_question_and_how_to_answer(name: str) -> None:
    bundle = Card(name)._repr_mimebundle_()
    for kind in ("text/plain", "text/html"):
        assert "Case 0?" in bundle[kind]
        assert f'Card("{name}").question.answer("' in bundle[kind].replace("&quot;", '"')
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "<details>" in bundle["text/html"]


def test_what_is_stored_does_not_depend_on_what_was_answered() -> None:
    before = Card("Q4")._repr_mimebundle_()["text/html"]
    questions.load("Q4").answer("a")
    assert Card("Q4")._repr_mimebundle_()["text/html"] == before


def test_a_room_finds_no_explanations_in_what_is_stored() -> None:
    assert "<details>" not in Card("Q4", poll=True)._repr_mimebundle_()["text/html"]


def test_every_control_has_a_name() -> None:
    names = ("Q4", "bytes_sent", "Q2", "same_plan", "Q1")
    choice, number, order, plan, text = (Card(name).field for name in names)
    assert all(plan.widget.names[name] for name in plan.widget.texts)
    assert choice.widget.label
    assert order.widget.label
    assert number.widget.description
    assert text.widget.label
