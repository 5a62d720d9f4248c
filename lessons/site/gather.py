"""Everything that a widget can show, run beforehand.

The emulated clock is exact, so every setting of an explorer and every answer to a question has one outcome. Each is
really run here, once. What a page needs at once is its record; the rest are packs, by name. Pictures that lie beside
each other need different ids, which begin with the widget's key.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from course_lib.classroom.questions import units
from course_lib.classroom.questions.forms import Choice, FreeText, Number, Ordering
from course_lib.classroom.questions.markup import inline, to_html
from course_lib.classroom.questions.outcome import Feedback
from course_lib.classroom.questions.question import Question
from course_lib.classroom.scenarios.jobs.instruments import INSTRUMENTS
from course_lib.classroom.widgets import player
from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import Explorer
from course_lib.classroom.widgets.measuring import Measuring
from course_lib.classroom.widgets.player import Player
from course_lib.figures.palette import STYLES

MOST_ORDERS = 1000  # of eight events there are 40,320, and many of them hang until somebody notices
ANSWER, SLIP = "\ue000", "\ue001"  # places in a feedback that the browser fills

Gathered = tuple[dict[str, Any], dict[str, Any]]


def gather(one: Any, key: str) -> Gathered:
    """The record and the packs of a widget or a question."""
    return next(of_kind(one, key) for kind, of_kind in KINDS.items() if isinstance(one, kind))


def _player(one: Any, key: str) -> Gathered:
    return {"kind": "player"}, {key: {"picture": one.picture, "places": one.places}}


def _explorer(one: Any, key: str) -> Gathered:
    """Its controls, and the views of all settings, in a pack for each value of the first control."""
    first, *rest = [range(len(one.texts)) if isinstance(one, Slider) else range(2) for one in one.controls]
    packs = {f"{key}-{at}": _views(one, key, itertools.product([at], *rest)) for at in first}
    fills = {kind: style.fill for kind, style in STYLES.items()}
    return {"kind": "explorer", "controls": [_control(control) for control in one.controls], "fills": fills}, packs


def _views(one: Any, key: str, places: Iterable[tuple[int, ...]]) -> dict[str, Any]:
    texts: dict[str, int] = {}  # many settings share a picture
    views = {}
    for at in places:
        values = [c.options[i] if isinstance(c, Slider) else bool(i) for c, i in zip(one.controls, at, strict=True)]
        *_, view = one.look(*values)
        views[",".join(map(str, at))] = _view(view, key, lambda text: texts.setdefault(text, len(texts)))
    return {"texts": list(texts), "views": views}


def _control(control: Any) -> dict[str, Any]:
    if isinstance(control, Slider):
        return {"part": "slider", "label": control.label, "texts": control.texts, "index": control.index}
    return {"part": "switch", "label": control.label, "text": control.text, "value": control.value}


def _view(view: Any, key: str, number: Callable[[str], int]) -> dict[str, Any]:
    """A view: numbers of its texts, which picture shows a timeline, how long that is, and what to play."""
    pictures = [number(picture.inline(f"{key}-{place}")) for place, picture in enumerate(view.pictures)]
    found = {"says": number(inline(view.sentences)), "pictures": pictures}
    for place, picture in enumerate(view.pictures):
        if picture.timelines:
            timeline = picture.timelines[0].timeline
            return {**found, "played": place, "seconds": timeline.makespan, "places": player.places(picture)}
    return found


def _measuring(one: Any, key: str) -> Gathered:
    """The instruments with their prices, and what each of them reads."""
    tools = [[name, tool.title, tool.minutes] for name, tool in INSTRUMENTS.items()]
    read = {name: one.variant.measure(name).inline(f"{key}-{name}") for name in INSTRUMENTS}
    return {"kind": "measuring", "tools": tools}, {key: read}


def _card(question: Any, key: str) -> Gathered:
    """The question, and the outcomes of its answers."""
    form = question.form
    asked = {"kind": "card", "question": question.name, "title": question.entry.title, "text": to_html(question.text)}
    if isinstance(form, Choice):
        outcomes = form.reveal()
        told = [Feedback(words, outcome).inline(f"{key}-{n}") for n, (words, outcome) in enumerate(outcomes)]
        return {**asked, "is": "choice", "lines": form.lines, "right": [one.right for _, one in outcomes]}, {key: told}
    if isinstance(form, Number):
        return {**asked, "is": "number", "example": form.example}, {key: _number(form, key)}
    if isinstance(form, FreeText):
        ((_, outcome),) = form.reveal()
        told = [Feedback("", replace(outcome, why=form.compared)).inline(key)]
        return {**asked, "is": "text", "checklist": form.checklist}, {key: told}
    if isinstance(form, Ordering) and math.factorial(len(form.events)) <= MOST_ORDERS:
        return {**asked, "is": "order", "events": form.events}, {key: _orders(form, key)}
    return {"kind": "elsewhere"}, {}


def _number(form: Number, key: str) -> dict[str, Any]:
    """What the browser needs to judge an answer as `units` does, and to say so."""
    ((_, outcome),) = form.reveal()
    right, wrong = replace(outcome, right=True), replace(outcome, right=False, why=f"{SLIP}\n\n{outcome.why}")
    slips = [(slip.factor, slip.text) for slip in (*form.slips, *units.USUAL.get(form.quantity.name, []))]
    told = {"right": Feedback(ANSWER, right).inline(key), "wrong": Feedback(ANSWER, wrong).inline(key)}
    judged = {"measured": outcome.measured, "tolerance": form.tolerance, "slips": slips}
    return {**told, **judged, "units": form.quantity.units, "name": form.quantity.name}


def _orders(form: Ordering, key: str) -> dict[str, Any]:
    """The different outcomes, and for each order, as `permutations` counts them, which of them it has."""
    told: dict[str, int] = {}
    right: list[bool | None] = []
    which = []
    for order in itertools.permutations(form.events):
        outcome = form.run(order)
        which.append(told.setdefault(Feedback(ANSWER, outcome).inline(key), len(told)))
        right += [outcome.right] * (len(told) - len(right))
    return {"told": list(told), "right": right, "which": which}


KINDS: dict[Any, Callable[[Any, str], Gathered]] = {
    Player: _player,
    Explorer: _explorer,
    Measuring: _measuring,
    Question: _card,
}
