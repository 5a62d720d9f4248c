"""What a question card is answered with: options to choose from, a list to put in order, lists to drop down, a box for
sentences, buttons.

Like `Slider`, they are the browser's own elements, with their names, roles and keys. The element that has the focus
carries `data-lm-suppress-shortcuts`, or JupyterLab would take a typed "d d" for "delete this cell".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

HERE = Path(__file__).parent


class Labelled(anywidget.AnyWidget):
    """Something to use that says what it is."""

    _css = HERE / "controls.css"
    label = traitlets.Unicode().tag(sync=True)


class Answer(Labelled):
    """Something that a button takes as it is then.

    What is chosen comes as a message. Of states the browser sends the first, and while the kernel is busy keeps all but
    the last to itself: a click on a button would overtake them.
    """

    disabled = traitlets.Bool().tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.on_msg(lambda _, state, __: self.set_state(state))


class Options(Answer):
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
    """Drop-down lists, one for each name. texts: what to choose from.  chosen: what stands there.

    names: how each is called where one reads it.  off: those that do not matter now.  said: what there is to say.
    """

    _esm = HERE / "fields.js"
    names = traitlets.Dict().tag(sync=True)
    texts = traitlets.Dict().tag(sync=True)
    chosen = traitlets.Dict().tag(sync=True, echo_update=False)
    off = traitlets.List(traitlets.Unicode()).tag(sync=True)
    said = traitlets.Unicode().tag(sync=True)


class Sentences(Answer):
    """A box for sentences. value: what stands in it, a second after it was typed at the latest."""

    _esm = HERE / "sentences.js"
    value = traitlets.Unicode().tag(sync=True)


class Button(Labelled):
    """Does something when it is pressed; without a label it is hidden.

    clicks: how often it was pressed.  enabled: not while what it does is being done.
    leads_on: whether a key that is pressed while that is done counts, for what the button stands for afterwards.
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
