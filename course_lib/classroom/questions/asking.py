"""Forms, each made of a page of prose and the runs behind it.

    choice(experiments)        an experiment for each option of the page, by its name
    number(quantity, measure)  a number that is measured
    ordering(execute)          an order of the page's events, which is executed
    plan(judge)                a plan for the case's model, cluster and batch, which is judged
    open_case(experiment)      words, and an experiment to compare them with

A run is called with the case, the numbers of the question, or with nothing if there are none. The page says the
result, in `## found` (`## found: NAME` for one option, or one outcome of an order). The fields there are those of
`found`, in the words of `fields`: {idle:percent}, {sent:data_size}, {fits:it fits|it does not fit}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from course_lib.classroom.questions.fields import EXPRESSIONS
from course_lib.classroom.questions.forms import Choice, Form, FreeText, Number, Option, Ordering, PlanForm
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.prose import Page, items
from course_lib.classroom.questions.units import Quantity, Slip
from course_lib.planner import Plan

MakeForm = Callable[[Page, Any], Form]


def choice(experiments: Mapping[str, Callable[..., Outcome]]) -> MakeForm:
    """Make a choice. experiments: the experiment of each option, by name; the page has their order."""

    def make(page: Page, case: Any) -> Choice:
        runs = {f"option: {name}": _told(page, name, _with(case, run)) for name, run in experiments.items()}
        texts = {heading: text.partition("\n\n") for heading, text in page.only(*runs).items()}
        return Choice(tuple(Option(text, runs[heading], why) for heading, (text, _, why) in texts.items()))

    return make


def each(run: Callable[..., Outcome], names: Iterable[str]) -> dict[str, Callable[..., Outcome]]:
    """One experiment for all of these options, called with the option's name before the case."""
    return {name: partial(run, name) for name in names}


def number(
    quantity: Quantity,
    measure: Callable[..., Outcome],
    slips: Callable[..., dict[str, float]] = lambda *case: {},
    tolerance: float = 0.01,
) -> MakeForm:
    """Make a number. slips: factors by which an answer may be off, by name.  tolerance: as in `Number`."""

    def make(page: Page, case: Any) -> Number:
        factors = {f"slip: {name}": factor for name, factor in _with(case, slips)().items()}
        texts = page.only("why", *factors)
        own = tuple(Slip(factor, texts[heading]) for heading, factor in factors.items())
        return Number(quantity, _told(page, "", _with(case, measure)), texts["why"], own, tolerance)

    return make


def ordering(execute: Callable[..., Outcome], worker: Callable[[str], int] = lambda event: 0) -> MakeForm:
    """Make an order. worker: who does an event; what workers do at a time may stand in any order."""

    def make(page: Page, case: Any) -> Ordering:
        texts = page.only("events", "why")
        events = {event.partition(":")[0]: event for event in items(texts["events"])}
        return Ordering(events, _told(page, "", _with(case, execute)), texts["why"], worker)

    return make


def plan(judge: Callable[..., Outcome], start: Callable[..., Plan] | None = None) -> MakeForm:
    """Make a plan. judge: called with the case (a model, a cluster and a batch) and with the estimate of a plan.

    start: the first plan shown; by default replicas alone.
    """

    def make(page: Page, case: Any) -> PlanForm:
        why = page.only("why")["why"]
        first = start(case) if start else Plan(dp=case.cluster.devices)
        return PlanForm(case.model, case.cluster, case.batch, _with(case, judge), why, first)

    return make


def open_case(experiment: Callable[..., Outcome]) -> MakeForm:
    """Make an open case, which is answered in words."""

    def make(page: Page, case: Any) -> FreeText:
        texts = page.only("answer", "checklist")
        return FreeText(_told(page, "", _with(case, experiment)), texts["answer"], tuple(items(texts["checklist"])))

    return make


def _with(case: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    return run if case is None else partial(run, case)


def _told(page: Page, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A run that reports in the page's words. name: of an option; an order's outcome is named by its why."""

    def told(*answer: Any) -> Any:
        one = run(*answer)
        own = page.found.get(f"found: {name or one.why}", page.found.get("found"))
        if one.happened or own is None:
            return one
        return replace(one, happened=EXPRESSIONS.vformat(own.text, (), {**page.names, **one.found}))

    return told
