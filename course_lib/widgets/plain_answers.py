"""The controls of `answers` made of nothing but ipywidgets, for places where anywidget is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as widgets
import traitlets


class Options(widgets.VBox):
    """A check box for each option; choosing one without `several` lets go of the others."""

    chosen = traitlets.List(traitlets.Int())
    locked = traitlets.Bool()

    def __init__(self, label: str, texts: Sequence[str], several: bool = False) -> None:
        self.several = several
        self.boxes = [widgets.Checkbox(description=text, indent=False, layout=_WIDE) for text in texts]
        super().__init__([widgets.Label(label), *self.boxes])
        for number, box in enumerate(self.boxes):
            box.observe(lambda change, number=number: self._changed(number, change["new"]), "value")

    def _changed(self, number: int, is_chosen: bool) -> None:
        others = [other for other in self.chosen if other != number]
        if is_chosen:
            self.chosen = [*others, number] if self.several else [number]
        else:
            self.chosen = others

    @traitlets.observe("chosen", "locked")
    def _show(self, _: Any) -> None:
        for number, box in enumerate(self.boxes):
            box.value, box.disabled = number in self.chosen, self.locked


class OrderList(widgets.VBox):
    """The events, each with a button to move it up and one to move it down."""

    order = traitlets.List(traitlets.Unicode())
    locked = traitlets.Bool()

    def __init__(self, label: str, texts: Mapping[str, str]) -> None:
        self.label, self.rows = widgets.Label(label), {name: self._row(name, text) for name, text in texts.items()}
        super().__init__(order=list(texts))

    def _row(self, name: str, text: str) -> Any:
        up, down = (widgets.Button(description=f"{words} {name}") for words in ("Up:", "Down:"))
        up.on_click(lambda _: self._move(name, -1))
        down.on_click(lambda _: self._move(name, 1))
        return widgets.HBox([up, down, widgets.Label(text)])

    def _move(self, name: str, step: int) -> None:
        place = self.order.index(name)
        if 0 <= place + step < len(self.order):
            others = [other for other in self.order if other != name]
            self.order = [*others[: place + step], name, *others[place + step :]]

    @traitlets.observe("order", "locked")
    def _show(self, _: Any) -> None:
        self.children = [self.label, *(self.rows[name] for name in self.order)]
        for row in self.rows.values():
            for button in row.children[:2]:
                button.disabled = self.locked


class Button(widgets.Button):
    """A button with the names of `answers.Button`."""

    label = traitlets.Unicode()
    enabled = traitlets.Bool(True)
    clicks = traitlets.Int()

    def __init__(self, label: str = "") -> None:
        super().__init__(layout=widgets.Layout(width="auto"))
        self.label = label
        self.on_click(lambda _: setattr(self, "clicks", self.clicks + 1))

    @traitlets.observe("label", "enabled")
    def _show(self, _: Any) -> None:
        self.description, self.disabled = self.label, not self.enabled
        self.layout.display = None if self.label else "none"


class Running(widgets.Label):
    """Words without a button: no click gets through while something runs."""

    def begin(self, words: str, seconds: float) -> None:
        self.value = f"{words}. To stop, choose Interrupt Kernel in the Kernel menu."

    def end(self) -> None:
        self.value = ""


_WIDE = widgets.Layout(width="100%")
