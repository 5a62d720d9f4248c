"""The instruments of a scenario: a button for each, with its price, the readings, and the cost so far.

from course_lib.classroom.widgets.measuring import Measuring
Measuring(scenarios.load("S02_night_call"))
"""

from __future__ import annotations

import secrets
from functools import partial
from html import escape
from typing import Any

import ipywidgets as widgets

from course_lib.classroom.scenarios.jobs.faults import Incident
from course_lib.classroom.scenarios.jobs.instruments import INSTRUMENTS, Instrument
from course_lib.classroom.widgets.answers import Button
from course_lib.classroom.widgets.running import Running, attempt, explained, said, shown
from course_lib.figures.axis import counted


class Measuring:
    """The instruments as a widget; without widgets, as a list that says how to call one."""

    def __init__(self, variant: Incident) -> None:
        self.variant, self._key = variant, f"measuring-{secrets.token_hex(4)}"
        self.running, self.bill, self.found = Running(), widgets.HTML(said(variant.bill())), widgets.HTML()
        self.buttons = {name: Button(partial(self._try, name), _priced(one)) for name, one in INSTRUMENTS.items()}
        self._box = widgets.VBox([*self.buttons.values(), self.running, self.bill, self.found])
        self._box.add_class("course-live")

    def _try(self, name: str) -> None:
        problem = attempt(lambda: self._measure(name))
        self.running.end()
        if problem:
            self.bill.value = said(explained(problem, "Press the button to measure again."), "alert")

    def _measure(self, name: str) -> None:
        self.running.begin("Measuring on real ranks")
        read = self.variant.measure(name).inline(f"{self._key}-{name}")
        self.found.value = f"<div role='group' aria-label='What it says'>{read}</div>{self.found.value}"
        self.bill.value = said(self.variant.bill())

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        prices = [f"{name}: {_priced(one)}" for name, one in INSTRUMENTS.items()]
        how = 'case.measure("profile")'
        html = "".join(f"<li>{escape(price)}</li>" for price in prices)
        stored = {
            "text/plain": "\n".join([*prices, f"Measure with: {how}"]),
            "text/html": f"<ul>{html}</ul><p><i>Run this cell for buttons, or write <code>{escape(how)}</code></i></p>",
        }
        return shown(self._box._repr_mimebundle_(), stored)


def _priced(one: Instrument) -> str:
    return f"{one.title}, {counted(one.minutes, 'minute')}"
