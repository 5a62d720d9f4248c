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

from course_lib.classroom.questions.outcome import Feedback
from course_lib.classroom.scenarios.jobs.culprits import ACTS
from course_lib.classroom.scenarios.jobs.faults import REHEARSAL, Incident
from course_lib.classroom.scenarios.jobs.instruments import INSTRUMENTS, Instrument, checkpoints
from course_lib.classroom.widgets.answers import Button, Fields
from course_lib.classroom.widgets.running import Running, attempt, explained, said, shown
from course_lib.figures.axis import counted

HOW = ('case.measure("profile")', 'case.rehearse("link")', 'case.act("node", 2, resume=80)')


class Measuring:
    """The desk as a widget; without widgets, as a list that says how to call everything."""

    def __init__(self, variant: Incident) -> None:
        self.variant, self._key = variant, f"measuring-{secrets.token_hex(4)}"
        self.running, self.bill, self.found = Running(), widgets.HTML(), widgets.HTML()
        self.buttons = {
            name: Button(partial(self._try, partial(variant.measure, name)), _priced(one))
            for name, one in INSTRUMENTS.items()
        }
        suspects = list(variant.case.culprits)
        self.suspect = Fields(
            label="Rehearse a suspect",
            names={"suspect": "suspect"},
            texts={"suspect": suspects},
            chosen={"suspect": suspects[0]},
        )
        self.deed = Fields(label="Do something", names={"what": "what", "place": "where", "resume": "from checkpoint"})
        rehearse = Button(partial(self._try, self._rehearse), f"Rehearse it, {counted(REHEARSAL, 'minute')}")
        act = Button(partial(self._try, self._act), "Do it")
        self.deed.observe(lambda _: self._offer(), "chosen")
        self._offer()
        below = (self.suspect, rehearse, self.deed, act, self.running, self.bill, self.found)
        self._box = widgets.VBox([*self.buttons.values(), *below])
        self._box.add_class("course-live")

    def _offer(self) -> None:
        """Offer the places of what is chosen, and the checkpoints that there are."""
        scene, chosen = self.variant.scene, self.deed.chosen
        what = chosen.get("what", "wait")
        places = [str(place) for place in ACTS[what].places(scene.job)]
        saved = [str(one) for one in reversed(checkpoints(scene))]
        texts = {"what": list(ACTS), "place": places, "resume": saved}
        kept = {name: chosen[name] if chosen.get(name) in texts[name] else texts[name][0] for name in texts}
        if texts != self.deed.texts:
            self.deed.texts = texts
        if kept != chosen:
            self.deed.chosen = kept
        self.deed.said = f"The job stands still for {counted(ACTS[what].minutes, 'minute')}."
        self.bill.value = said(self.variant.bill())

    def _rehearse(self) -> Feedback:
        return self.variant.rehearse(self.suspect.chosen["suspect"])

    def _act(self) -> Feedback:
        chosen = self.deed.chosen
        return self.variant.act(
            chosen["what"], chosen["place"], None if chosen["what"] == "wait" else int(chosen["resume"])
        )

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
        prices = [f"{name}: {_priced(one)}" for name, one in INSTRUMENTS.items()]
        html = "".join(f"<li>{escape(price)}</li>" for price in prices)
        how = " or ".join(f"<code>{escape(one)}</code>" for one in HOW)
        stored = {
            "text/plain": "\n".join([*prices, f"Write {' or '.join(HOW)}"]),
            "text/html": f"<ul>{html}</ul><p><i>Run this cell for buttons, or write {how}</i></p>",
        }
        return shown(self._box._repr_mimebundle_(), stored)


def _priced(one: Instrument) -> str:
    return f"{one.title}, {counted(one.minutes, 'minute')}"
