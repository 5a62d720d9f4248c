"""The instruments of a scenario: a button for each, with its price; what it says, and what all of it has cost so far.

from course_lib.widgets.measuring import Measuring
Measuring(scenarios.load("S02_night_call"))
"""

from __future__ import annotations

import secrets
from html import escape
from typing import Any

import ipywidgets as widgets

from course_lib.figures.axis import counted
from course_lib.questions.markup import inline
from course_lib.ranks import RunError
from course_lib.scenarios.faults import Variant
from course_lib.scenarios.instruments import INSTRUMENTS, Instrument
from course_lib.widgets import answers
from course_lib.widgets.running import Running, interruptible, shown


class Measuring:
    """Shows itself in a notebook; where widgets do not run, as the list of instruments and how to call one."""

    def __init__(self, variant: Variant) -> None:
        self.variant, self._key = variant, f"measuring-{secrets.token_hex(4)}"
        self.running, self.bill, self.found = Running(), widgets.HTML(), widgets.HTML()
        self.buttons = {name: answers.Button(label=_priced(one)) for name, one in INSTRUMENTS.items()}
        for name, button in self.buttons.items():
            button.observe(lambda _, name=name: self._measure(name), "clicks")
        self._box = widgets.VBox([*self.buttons.values(), self.running, self.bill, self.found])
        self._box.add_class("course-live")
        self._say(variant.bill())

    def _measure(self, name: str) -> None:
        self.buttons[name].enabled = False
        try:
            with interruptible():
                self.running.begin("Measuring on real ranks")
                found = self.variant.measure(name)
            self.found.value = found.inline(f"{self._key}-{name}") + self.found.value
            self._say(self.variant.bill())
        except KeyboardInterrupt:
            self._say("Stopped. Press the button to measure again.", "alert")
        except Exception as error:
            reason = error.message if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
            self._say(f"This could not be measured. {reason} Press the button to try again.", "alert")
        finally:
            self.running.end()
            self.buttons[name].enabled = True

    def _say(self, text: str, role: str = "status") -> None:
        self.bill.value = f"<p role='{role}' style='line-height:1.4;margin:4px 0'>{inline(text)}</p>"

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
