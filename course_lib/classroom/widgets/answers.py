"""Widgets to answer a question card with: options, a list to put in order, drop-down lists, a box for sentences,
buttons.

Like `Slider`, they are the browser's own elements, with their names, roles and keys. The element in focus carries
`data-lm-suppress-shortcuts`, or JupyterLab would take a typed "d d" for "delete this cell".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

HERE = Path(__file__).parent


class Labelled(anywidget.AnyWidget):
    """A control with a label."""

    _css = HERE / "controls.css"
    label = traitlets.Unicode().tag(sync=True)


class Answer(Labelled):
    """A control whose value a button takes when it is pressed.

    Its value comes as a message: while the kernel is busy, the browser holds back state changes but the last, and a
    click on a button would overtake them.
    """

    disabled = traitlets.Bool().tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.on_msg(lambda _, state, __: self.set_state(state))


class ChoiceList(Answer):
    """Radio buttons, or with `several` check boxes. chosen: the numbers of those chosen."""

    _esm = HERE / "options.js"
    texts = traitlets.List(traitlets.Unicode()).tag(sync=True)
    several = traitlets.Bool().tag(sync=True)
    chosen = traitlets.List(traitlets.Int()).tag(sync=True, echo_update=False)


class OrderList(Answer):
    """A list to put in order, with the mouse or with keys. order: the names; texts: how each is written."""

    _esm = HERE / "order.js"
    texts = traitlets.Dict().tag(sync=True)
    order = traitlets.List(traitlets.Unicode()).tag(sync=True, echo_update=False)


class Fields(Answer):
    """Drop-down lists, one for each name. texts: the values to choose from.  chosen: the present values.

    names: the label of each.  off: the lists that do not matter now.  said: a sentence below them.
    """

    _esm = HERE / "fields.js"
    names = traitlets.Dict().tag(sync=True)
    texts = traitlets.Dict().tag(sync=True)
    chosen = traitlets.Dict().tag(sync=True, echo_update=False)
    off = traitlets.List(traitlets.Unicode()).tag(sync=True)
    said = traitlets.Unicode().tag(sync=True)


class Sentences(Answer):
    """A box for sentences. value: its text, updated within a second of typing."""

    _esm = HERE / "sentences.js"
    value = traitlets.Unicode().tag(sync=True)


class Button(Labelled):
    """A button; without a label it is hidden.

    clicks: how often it was pressed.  enabled: False while its action runs.
    leads_on: whether a key pressed meanwhile counts as a press of the button's next action.
    """

    _esm = HERE / "button.js"
    enabled = traitlets.Bool(True).tag(sync=True)
    clicks = traitlets.Int().tag(sync=True)
    leads_on = traitlets.Bool().tag(sync=True)

    def __init__(self, action: Callable[[], object], label: str = "") -> None:
        super().__init__(label=label)
        self._action = action

    @traitlets.observe("clicks")
    def _press(self, _: object) -> None:
        self.enabled = False
        try:
            self._action()
        finally:
            self.enabled = True
