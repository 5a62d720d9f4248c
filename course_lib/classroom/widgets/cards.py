"""A question with buttons: decide, run the answer, look, try another answer, ask for other numbers.

    from course_lib.classroom.widgets.cards import Card
    Card("Q4")
    Card("Q4", poll=True)     for a room: no answer is kept; one button runs every answer

    What does each worker get?
    ( ) a  all 512 samples, and an eighth of the model
    (o) b  64 samples, and the whole model               decide  ->  run it  ->  the outcome, in words and pictures
    [Commit to this answer]                                 ^                          |
                                                            |____ try another answer __|

The decision is in the student's file before it is run, and shown again when the notebook is opened again.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from html import escape
from typing import Any, NamedTuple

import ipywidgets as widgets

from course_lib.classroom import questions
from course_lib.classroom.questions import plan_text
from course_lib.classroom.questions.forms import Choice, FreeText, Number, Ordering, PlanForm
from course_lib.classroom.questions.markup import inline, to_html, to_text
from course_lib.classroom.questions.outcome import VERDICTS, Feedback
from course_lib.classroom.questions.question import Question, is_for_a_room
from course_lib.classroom.widgets import answers
from course_lib.classroom.widgets.running import Running, attempt, beside_this, explained, said, shown
from course_lib.figures.axis import counted
from course_lib.planner.spec import V_SHAPED

WIDE = widgets.Layout(width="100%", max_width="52em")
BELOW = widgets.Layout(width="100%", max_width="52em", order="1")
DECIDE, RUN, AGAIN = "Commit to this answer", "Run it", "Try another answer"
HIDE, OTHER = "Hide the answer", "Other numbers"

IN_A_PLAN: dict[str, str] = json.loads(beside_this("plan.json"))  # labels of the fields to decide


class Field(NamedTuple):
    """An input for an answer. holds: the widget's trait with the answer, in the widget's form.

    read, write: convert it to an answer (None before there is one), and back.
    """

    widget: Any
    holds: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]

    @property
    def answer(self) -> Any:
        return self.read(getattr(self.widget, self.holds))

    def show(self, answer: Any) -> None:
        setattr(self.widget, self.holds, self.write(answer))


def choice_field(form: Choice) -> Field:
    options = answers.ChoiceList(label="Choose one:", texts=form.lines)
    letter_of, number_of = form.letters.__getitem__, form.letters.index
    return Field(options, "chosen", lambda chosen: letter_of(*chosen) if chosen else None, lambda one: [number_of(one)])


def order_field(form: Ordering) -> Field:
    label, names = "Events, the first at the top", list(form.events)
    return Field(answers.OrderList(label=label, texts=form.events, order=names), "order", list, list)


def plan_field(form: PlanForm) -> Field:
    """A drop-down list for each field to decide."""
    lists = answers.Fields(label="Your plan:", names=IN_A_PLAN, texts=form.choices)
    lists.observe(lambda change: _describe_plan(form, change.owner), "chosen")
    field = Field(lists, "chosen", _plan_written, _plan_in_lists)
    field.show(plan_text.write(form.start))
    return field


def _plan_written(chosen: dict[str, str]) -> str:
    stages = {"interleaved_1f1b": chosen["virtual_stages"], **dict.fromkeys(V_SHAPED, "2")}
    chosen = {**chosen, "virtual_stages": stages.get(chosen["schedule"], "1")}
    return " ".join(f"{name}={value}" for name, value in chosen.items())


def _plan_in_lists(answer: str) -> dict[str, str]:
    plan = plan_text.parse(answer)
    return {name: str(getattr(plan, name)) for name in IN_A_PLAN}


def _describe_plan(form: PlanForm, lists: answers.Fields) -> None:
    """Say whether such a plan is possible, but not its cost."""
    lists.off = ["virtual_stages"] * (lists.chosen["schedule"] != "interleaved_1f1b")
    try:
        plan = plan_text.parse(form.read(_plan_written(lists.chosen)))
        n = plan.micro_batches(form.global_batch)
        lists.said = f"{counted(plan.devices, 'device')}, {counted(n, 'micro-batch')} for each replica."
    except ValueError as error:
        lists.said = f"Not possible: {error}."


def number_field(form: Number) -> Field:
    """An input for a number with its unit."""
    hint = f"with its unit, for instance {form.quantity.example}"
    line = widgets.Text(description="Your answer:", placeholder=hint, continuous_update=False)
    line.layout, line.style.description_width = {"width": "30em", "max_width": "100%"}, "initial"
    return Field(line, "value", _text, str)


def _text(typed: str) -> str | None:
    return typed.strip() or None


FIELDS: dict[Any, Callable[[Any], Field]] = {
    Choice: choice_field,
    Ordering: order_field,
    PlanForm: plan_field,
    Number: number_field,
    FreeText: lambda form: Field(answers.Sentences(label="Your answer:"), "value", _text, str),
}
FOR_A_ROOM = Ordering, PlanForm  # the name of an answer before anything can be run


class Card:
    """A question as a widget, with its controls; without widgets, as text that says how to answer.

    name, seed: as for `questions.load`.
    poll: for a room that discusses the question; by default, whether the environment variable COURSE_POLL is set.

    Raises ValueError for a name that is not in the catalog.
    """

    def __init__(self, name: str, seed: int = 0, poll: bool | None = None) -> None:
        self.poll = is_for_a_room() if poll is None else poll
        self._key = f"card-{secrets.token_hex(4)}"
        self.main = answers.Button(lambda: self._try(self._press))
        self.other = answers.Button(lambda: self._try(self._ask_other_numbers))
        self.running, self._seconds = Running(), 0.0
        self.text, self.status, self.feedback = (widgets.HTML(layout=WIDE) for _ in range(3))
        self.feedback.layout = widgets.Layout(width="auto", order="1")
        self.running.layout.order = "1"
        self.checklist: Any = None
        self._box, self._buttons = widgets.VBox(), widgets.HBox([self.main, self.other], layout={"order": "1"})
        self._box.add_class("course-live")
        self._ask(questions.load(name, seed))

    def _ask(self, question: Question) -> None:
        self.question = question
        has_field = not self.poll or isinstance(question.form, FOR_A_ROOM)
        self.field: Any = FIELDS[type(question.form)](question.form) if has_field else None
        self.text.value = _wrap(_heading(question) + to_html(question.text) + ("" if self.field else _listed(question)))
        self._say("")
        self._reopen()
        if not self.poll:
            self._recall()
        if self.field:
            self.field.widget.observe(lambda _: self._changed(), self.field.holds)

    def _recall(self) -> None:
        """Show the answer that is in the student's journal."""
        note = self.question.latest()
        if note is None or self.field is None:
            return
        try:
            self.field.show(self.question.form.read(note.answer))
        except ValueError:  # an answer of an older edition of the course
            return
        if note.what == "committed":
            self._committed(note.answer)
        elif note.what == "ran":
            words = {True: "It was right.", False: "It was not the one.", None: ""}[note.right]
            self._say(f"Your answer of {note.when[:10]}. {words}")

    # Actions of the buttons

    def _press(self) -> None:
        actions = {DECIDE: self._commit, RUN: self._reveal if self.poll else self._run}
        actions.get(self._step, self._reopen)()

    def _commit(self) -> None:
        if self.field.answer is None:
            self._say("Decide on an answer first, even if it is a guess.", "alert")
            return
        self._committed(self.question.commit(self.field.answer))

    def _changed(self) -> None:
        """Keep a growing text. A change made before a click that arrives after it belongs to that click.

        While the kernel is busy, the browser holds back typed text, but not the click that follows.
        """
        if isinstance(self.question.form, FreeText):
            self.question.keep("drafted", self.field.widget.value)
        if self._step == RUN and not self.poll:
            self._reopen()
            self._try(self._commit)

    def _committed(self, answer: Any) -> None:
        self._answer = answer
        self.field.widget.disabled = True
        words = self.question.form.words(answer)
        self._say(f"You have decided: {words}. Now run it, and see what comes of it.")
        self._go(RUN)

    def _run(self) -> None:
        (found,) = self._timed(lambda: [self.question.run(self._answer)])
        if isinstance(self.question.form, FreeText):  # its points have check boxes
            found = replace(found, outcome=replace(found.outcome, why=self.question.form.compared))
            self._offer_checklist(self.question.form)
        self._show([found])
        self._go(AGAIN)

    def _reveal(self) -> None:
        """Run, for a room, everything that needs no answer, or the order or plan that the room has found."""
        self._show(self._timed(self.question.reveal if self.field is None else self._run_the_room_s_answer))
        self._go(HIDE)

    def _run_the_room_s_answer(self) -> list[Feedback]:
        form: Any = self.question.form
        answer = form.read(self.field.answer)
        outcome = form.run(answer)
        return [Feedback("", outcome, title=f"{VERDICTS[outcome.right]} {form.words(answer)}")]

    def _timed(self, run: Callable[[], list[Feedback]]) -> list[Feedback]:
        """Show that a run is in progress and, if it has run before, how much longer it takes."""
        self._say("")
        where = "Calculating it" if isinstance(self.question.form, PlanForm) else "Running it on real ranks"
        start = time.monotonic()
        try:
            self.running.begin(where, self._seconds)
            found = run()
        finally:
            self.running.end()
        self._seconds = time.monotonic() - start
        return found

    def _reopen(self) -> None:
        self.feedback.value, self.checklist = "", None
        if self.field:
            self.field.widget.disabled = False
        self._go(RUN if self.poll else DECIDE)

    def _ask_other_numbers(self) -> None:
        self._ask(questions.load(self.question.name, self.question.seed + 1))

    def _go(self, step: str) -> None:
        """Take the present step of the main button."""
        self._step = self.main.label = step
        self.main.leads_on = step == DECIDE  # a result must not vanish because a key was pressed twice
        self.other.label = OTHER if self.question.varies and step in (DECIDE, AGAIN) else ""
        field = self.field.widget if self.field else None
        parts = [self.text, field, self._buttons, self.running, self.status, self.feedback, self.checklist]
        self._box.children = [part for part in parts if part is not None]

    # Display

    def _show(self, found: list[Feedback]) -> None:
        parts = (feedback.inline(f"{self._key}-{number}") for number, feedback in enumerate(found))
        self.feedback.value = "".join(f"<div role='group' aria-label='What came of it'>{part}</div>" for part in parts)

    def _offer_checklist(self, form: FreeText) -> None:
        self.checklist = answers.ChoiceList(label="Tick what your answer says:", texts=form.checklist, several=True)
        self.checklist.layout.order = "1"
        self.checklist.observe(lambda change: self.question.keep("checked", change["new"]), "chosen")

    def _say(self, text: str, role: str = "status") -> None:
        self.status.value = said(text, role)
        self.status.layout = WIDE if role == "alert" else BELOW  # an error stands at the field

    def _try(self, action: Callable[[], None]) -> None:
        """Run an action; show its error in the card, whose buttons go on working."""
        problem = attempt(action)
        if isinstance(problem, ValueError):
            self._say(str(problem), "alert")
        elif problem:
            self._say(explained(problem, "Press the button to run it again."), "alert")

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return shown(self._box._repr_mimebundle_(), stored(self.question, self.poll))


def stored(question: Question, poll: bool) -> dict[str, str]:
    """The card without widgets: the question, how to answer it, and, folded, the explanations."""
    numbers = f", {question.seed}" if question.seed else ""
    how = f'Card("{question.name}"{numbers}).question.answer("{question.form.example}")'
    text = [
        question.entry.title,
        to_text(question.text),
        "\n".join(question.form.lines),
        f"Answer with: {how}",
    ]
    html = f"{_heading(question)}{to_html(question.text)}{_listed(question)}"
    html += f"<p><i>Run this cell to answer with buttons, or write <code>{escape(how)}</code></i></p>"
    if not poll:
        html += f"<details><summary>What the answers lead to</summary>{to_html(question.form.why)}</details>"
    return {"text/plain": "\n\n".join(filter(None, text)), "text/html": _wrap(html)}


def _heading(question: Question) -> str:
    return f"<p><b>{escape(question.entry.title)}</b></p>"


def _listed(question: Question) -> str:
    """Options or events as a list, if no control shows them."""
    items = "".join(f"<li>{inline(line)}</li>" for line in question.form.lines)
    return f"<ul style='list-style:none;padding-left:1em'>{items}</ul>" if items else ""


def _wrap(html: str) -> str:
    return f"<div style='line-height:1.4;max-width:46em'>{html}</div>"
