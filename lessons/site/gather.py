"""Everything that a widget can show, run beforehand.

The emulated clock is exact, so every setting of an explorer and every answer to a question has one outcome. Each is
really run here, once. What a page needs at once is its record; the rest are packs, by name. Pictures that lie beside
each other need different ids, which begin with the widget's key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from course_lib.classroom.questions import units
from course_lib.classroom.questions.forms import Choice, FreeText, Number, Ordering
from course_lib.classroom.questions.markup import inline, to_html
from course_lib.classroom.questions.outcome import Feedback, Outcome
from course_lib.classroom.questions.question import Question
from course_lib.classroom.scenarios.jobs.instruments import INSTRUMENTS
from course_lib.classroom.widgets import player
from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import Explorer
from course_lib.classroom.widgets.measuring import Measuring
from course_lib.classroom.widgets.player import Player
from course_lib.figures.palette import STYLES

UNPAID = "What it reads when somebody calls you. What it costs, and what you do about it, is only in the notebook."
ANSWER = "\ue000"  # a place in a feedback that the browser fills

Gathered = tuple[dict[str, Any], dict[str, Any]]


def gather(one: Any, key: str) -> Gathered:
    """The record and the packs of a widget or a question."""
    return next(of_kind(one, key) for kind, of_kind in KINDS.items() if isinstance(one, kind))


def _player(one: Any, key: str) -> Gathered:
    return {"kind": "player"}, {key: {"picture": one.still.inline(key), "places": one.places}}


def _explorer(one: Any, key: str) -> Gathered:
    """Its controls, and the views of all settings, in a pack for each value of the first control."""
    first, *rest = [range(len(control.texts)) for control in one.controls]
    packs = {f"{key}-{at}": _views(one, key, itertools.product([at], *rest)) for at in first}
    fills = {kind: style.fill for kind, style in STYLES.items()}
    return {"kind": "explorer", "controls": [_control(control) for control in one.controls], "fills": fills}, packs


def _views(one: Any, key: str, places: Iterable[tuple[int, ...]]) -> dict[str, Any]:
    texts: dict[str, int] = {}  # many settings share a picture
    views = {}
    for at in places:
        *_, view = one.look(*(control.options[i] for control, i in zip(one.controls, at, strict=True)))
        views[",".join(map(str, at))] = _view(view, key, lambda text: texts.setdefault(text, len(texts)))
    return {"texts": list(texts), "views": views}


def _control(control: Slider) -> dict[str, Any]:
    return {"part": "slider", "label": control.label, "texts": control.texts, "index": control.index}


def _view(view: Any, key: str, number: Callable[[str], int]) -> dict[str, Any]:
    """A view: numbers of its texts, and what to play: a timeline, with its picture and its seconds, or a clock."""
    pictures = [number(picture.inline(f"{key}-{place}")) for place, picture in enumerate(view.pictures)]
    found = {"says": number(inline(view.sentences)), "pictures": pictures}
    for place, picture in enumerate(view.pictures):
        if picture.timelines:
            seconds = picture.timelines[0].timeline.makespan
            return {**found, "played": place, "seconds": seconds, "places": player.places(picture)}
    clocked = [player.places(picture) for picture in view.pictures if picture.clock]
    return {**found, "places": clocked[0]} if clocked else found


def _measuring(one: Any, key: str) -> Gathered:
    """An explorer of its instruments: what each of them reads at first."""
    texts = [f"{name}: {tool.minutes} min" for name, tool in INSTRUMENTS.items()]
    read, view = [one.variant.measure(name).inline(key) for name in INSTRUMENTS], {"says": 0, "pictures": [1]}
    packs = {f"{key}-{n}": {"texts": [UNPAID, text], "views": {n: view}} for n, text in enumerate(read)}
    control = {"part": "slider", "label": "instrument", "texts": texts, "index": 0}
    return {"kind": "explorer", "controls": [control]}, packs


def _card(question: Any, key: str) -> Gathered:
    """The question with the field to answer it, and what is told for each answer, by the answer's short name."""
    if not (ask := next((ask for form, ask in FIELDS.items() if isinstance(question.form, form)), None)):
        return {"kind": "elsewhere"}, {}
    field, outcomes, judged = ask(question.form)
    told: dict[tuple[str, bool | None], int] = {}  # many orders have the same outcome
    which = {
        name: told.setdefault((Feedback(words, outcome).inline(key), outcome.right), len(told))
        for name, (words, outcome) in outcomes.items()
    }
    about = {"question": question.name, "title": question.entry.title, "text": to_html(question.text)}
    return {"kind": "card", **about, **field}, {key: {**judged, "told": list(told), "which": which}}


Asked = tuple[dict[str, Any], dict[Any, tuple[str, Outcome]], dict[str, Any]]


def _choice(form: Choice) -> Asked:
    state = {"label": "Choose one:", "texts": form.lines, "chosen": []}
    return {"is": "choice", "part": "options", "state": state}, dict(enumerate(form.reveal())), {}


def _number(form: Number) -> Asked:
    """The outcomes of the right number, of each slip and of any other number, with what tells them apart."""
    ((_, outcome),) = form.reveal()
    slips = [*form.slips, *units.USUAL.get(form.quantity.name, [])]
    whys = [outcome.why, *(f"{slip.text}\n\n{outcome.why}" for slip in slips), outcome.why]
    outcomes = {n: (ANSWER, replace(outcome, right=n == 0, why=why)) for n, why in enumerate(whys)}
    factors = [1, *(slip.factor for slip in slips)]
    judged = {"factors": factors, "measured": outcome.measured, "tolerance": form.tolerance}
    state = {"label": f"Your answer, with its unit, for instance {form.example}:", "value": ""}
    return {"is": "number", "part": "sentences", "state": state}, outcomes, {**judged, "units": form.quantity.units}


def _text(form: FreeText) -> Asked:
    state = {"label": "Your answer:", "value": ""}
    return {"is": "text", "part": "sentences", "state": state}, dict(enumerate(form.reveal())), {}


def _order(form: Ordering) -> Asked:
    """The outcomes of all programs: of orders that differ only in who stands first, each worker does the same."""
    workers = [[name for name in form.events if form.worker(name) == one] for one in {*map(form.worker, form.events)}]
    programs = itertools.product(*map(itertools.permutations, workers))
    orders = [list(itertools.chain(*program)) for program in programs]
    state = {"label": "Events, the first at the top", "texts": form.events, "order": list(form.events)}
    field = {"is": "order", "part": "order", "state": state, "workers": workers}
    return field, {" ".join(order): (ANSWER, form.run(order)) for order in orders}, {}


FIELDS: dict[Any, Callable[[Any], Asked]] = {Choice: _choice, Number: _number, FreeText: _text, Ordering: _order}
KINDS: dict[Any, Callable[[Any, str], Gathered]]
KINDS = {Player: _player, Explorer: _explorer, Measuring: _measuring, Question: _card}
