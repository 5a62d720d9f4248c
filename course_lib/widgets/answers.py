"""What a question card is answered with: options to choose from, a list to put in order, lists to drop down, a box for
sentences, buttons.

Like `Slider`, they are the browser's own elements, with their names, roles and keys. The element that has the focus
carries `data-lm-suppress-shortcuts`, or JupyterLab would take a typed "d d" for "delete this cell".
"""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets

HERE = Path(__file__).parent


class Options(anywidget.AnyWidget):
    """Radio buttons, or with `several` check boxes. chosen: the numbers of those chosen."""

    _esm = HERE / "options.js"
    _css = HERE / "answers.css"
    label = traitlets.Unicode().tag(sync=True)
    texts = traitlets.List(traitlets.Unicode()).tag(sync=True)
    several = traitlets.Bool().tag(sync=True)
    chosen = traitlets.List(traitlets.Int()).tag(sync=True)
    disabled = traitlets.Bool().tag(sync=True)


class OrderList(anywidget.AnyWidget):
    """A list to put in order, with the mouse or with keys. order: the names; texts: how each is written."""

    _esm = HERE / "order.js"
    _css = HERE / "answers.css"
    label = traitlets.Unicode().tag(sync=True)
    texts = traitlets.Dict().tag(sync=True)
    order = traitlets.List(traitlets.Unicode()).tag(sync=True)
    disabled = traitlets.Bool().tag(sync=True)


class Fields(anywidget.AnyWidget):
    """Drop-down lists, one for each name. texts: what to choose from.  chosen: what stands there.

    names: how each is called where one reads it.  off: those that do not matter now.  said: what there is to say.
    """

    _esm = HERE / "fields.js"
    _css = HERE / "answers.css"
    label = traitlets.Unicode().tag(sync=True)
    names = traitlets.Dict().tag(sync=True)
    texts = traitlets.Dict().tag(sync=True)
    chosen = traitlets.Dict().tag(sync=True)
    off = traitlets.List(traitlets.Unicode()).tag(sync=True)
    said = traitlets.Unicode().tag(sync=True)
    disabled = traitlets.Bool().tag(sync=True)


class Sentences(anywidget.AnyWidget):
    """A box for sentences. value: what stands in it, a second after it was typed at the latest."""

    _esm = HERE / "sentences.js"
    _css = HERE / "answers.css"
    label = traitlets.Unicode().tag(sync=True)
    value = traitlets.Unicode().tag(sync=True)
    disabled = traitlets.Bool().tag(sync=True)


class Button(anywidget.AnyWidget):
    """A button; without a label it is hidden.

    clicks: how often it was pressed.  enabled: not while what it does is being done; whoever does it says when again.
    """

    _esm = HERE / "button.js"
    _css = HERE / "answers.css"
    label = traitlets.Unicode().tag(sync=True)
    enabled = traitlets.Bool(True).tag(sync=True)
    clicks = traitlets.Int().tag(sync=True)
