"""The desk of whoever is on call: a button for each instrument, a suspect to rehearse, and what can be done.

from course_lib.classroom.widgets.measuring import Measuring
Measuring(case)
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from html import escape
from typing import Any

import ipywidgets as widgets
from IPython import get_ipython

from course_lib.classroom.questions.outcome import Feedback
from course_lib.classroom.scenarios.jobs.culprits import ACTS
from course_lib.classroom.scenarios.jobs.faults import REHEARSAL, Incident, called, listed, placed
from course_lib.classroom.scenarios.jobs.instruments import INSTRUMENTS, checkpoints
from course_lib.classroom.widgets.answers import Button, Fields
from course_lib.classroom.widgets.running import Running, attempt, explained, said, shown
from course_lib.figures.axis import counted

HOW = ('case.measure("profile")', 'case.rehearse("link")', 'case.act("node", 2, resume=80)')


class Measuring:
    """The desk as a widget; without widgets, as a list that says how to call everything."""

    def __init__(self, variant: Incident) -> None:
        self.variant, self._key = variant, f"measuring-{secrets.token_hex(4)}"
        self.running, self.bill, self.found = Running(), widgets.HTML(), widgets.HTML()
        self.measure = {name: Button(partial(self._try, partial(variant.measure, name))) for name in INSTRUMENTS}
        self.rehearse, act = (Button(partial(self._try, do)) for do in (self._rehearse, self._act))
        act.label = "Do it"
        self._suspects = {called(name): name for name in variant.culprits}
        self._acts = {words: name for name, words in listed("acts").items()}
        self.suspect = Fields(label="Rehearse a suspect", names={"suspect": "suspect"})
        self.suspect.texts = {"suspect": list(self._suspects)}
        self.suspect.chosen = {"suspect": next(iter(self._suspects))}
        self.deed = Fields(label="Do something", names={"what": "what", "place": "where", "resume": "from checkpoint"})
        for fields in (self.suspect, self.deed):
            fields.observe(lambda _: self._offer(), "chosen")
        self._offer()
        instruments = widgets.Box(list(self.measure.values()), layout=widgets.Layout(flex_flow="row wrap"))
        parts = instruments, self.suspect, self.rehearse, self.deed, act, self.running, self.bill, self.found
        self._box = widgets.VBox(parts).add_class("course-live")
        if shell := get_ipython():  # other cells measure and act, too
            shell.events.register("post_run_cell", lambda _: self._offer())

    def _places(self, what: str) -> dict[str, Any]:
        return {placed(what, place): place for place in ACTS[what].places(self.variant.story.scene.job)}

    def _offer(self) -> None:
        """Offer the places of what is chosen, and the checkpoints that there are."""
        chosen = self.deed.chosen
        what = self._acts[chosen["what"]] if chosen else "wait"
        saved = [str(one) for one in reversed(checkpoints(self.variant.story.scene))]
        texts = {"what": list(self._acts), "place": list(self._places(what)), "resume": saved}
        kept = {name: chosen[name] if chosen.get(name) in texts[name] else texts[name][0] for name in texts}
        if texts != self.deed.texts:
            self.deed.texts = texts
        if kept != chosen:
            self.deed.chosen = kept
        self.deed.off = [*["place"] * (len(texts["place"]) == 1), *["resume"] * (what == "wait")]
        self.deed.said = f"The job stands still for {counted(ACTS[what].minutes, 'minute')}."
        self._bill()

    def _bill(self) -> None:
        """Say what is paid since the last act, and what the night has cost so far."""
        used = self.variant.story.used
        for name, button in self.measure.items():
            button.label = _priced(INSTRUMENTS[name].title, INSTRUMENTS[name].minutes, name in used)
        suspect = self._suspects[self.suspect.chosen["suspect"]]
        self.rehearse.label = _priced("Rehearse it", REHEARSAL, f"rehearse {suspect}" in used)
        self.bill.value = said(self.variant.bill())

    def _rehearse(self) -> Feedback:
        return self.variant.rehearse(self._suspects[self.suspect.chosen["suspect"]])

    def _act(self) -> Feedback:
        chosen = self.deed.chosen
        what = self._acts[chosen["what"]]
        resume = None if what == "wait" else int(chosen["resume"])
        return self.variant.act(what, self._places(what)[chosen["place"]], resume)

    def _try(self, do: Callable[[], Feedback]) -> None:
        problem = attempt(lambda: self._show(do))
        self.running.end()
        if problem:
            self.bill.value = said(explained(problem, "Press the button to try again."), "alert")

    def _show(self, do: Callable[[], Feedback]) -> None:
        self.running.begin("Running the job on real ranks")
        read = do().inline(f"{self._key}-{secrets.token_hex(2)}")
        self.found.value = f"<div role='group' aria-label='What it says'>{read}</div>{self.found.value}"
        self._offer()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        prices = [f"{name}: {_priced(one.title, one.minutes)}" for name, one in INSTRUMENTS.items()]
        html = "".join(f"<li>{escape(price)}</li>" for price in prices)
        how = " or ".join(f"<code>{escape(one)}</code>" for one in HOW)
        stored = {
            "text/plain": "\n".join([*prices, f"Write {' or '.join(HOW)}"]),
            "text/html": f"<ul>{html}</ul><p><i>Run this cell for buttons, or write {how}</i></p>",
        }
        return shown(self._box._repr_mimebundle_(), stored)


def _priced(what: str, minutes: int, is_paid: bool = False) -> str:
    return f"{what}, {'paid' if is_paid else counted(minutes, 'minute')}"
