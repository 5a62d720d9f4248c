"""An explorer of something calculated: controls, a sentence, pictures, and no ranks behind them.

What a move shows depends on the controls alone, so nothing is remembered, and it is drawn at once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import ipywidgets as widgets

from course_lib.figures import Picture
from course_lib.widgets.controls import Slider

WIDTH = 850  # pixels


class View(NamedTuple):
    """All there is to see at one setting of the controls."""

    sentences: str
    pictures: Sequence[Picture]


class Explorer:
    """Shows itself in a notebook, with its controls; where widgets do not run, as the pictures it began with.

    controls: by the name of the argument of `draw` that their value becomes.
    draw: returns always the same number of pictures. What it raises is said in place of the sentences.
    """

    def __init__(self, controls: Mapping[str, Slider], draw: Callable[..., View]) -> None:
        self.controls = dict(controls)
        self._draw = draw
        self._key = f"explorer-{secrets.token_hex(4)}"
        first = draw(**self.setting)
        self.sentences = _html()
        self.pictures = [_html() for _ in first.pictures]
        self._stored = _stored(first, [control.label for control in self.controls.values()])
        self._show(first)
        # In two columns, or in one on a narrow page.
        row = widgets.Layout(flex_flow="row wrap", grid_gap="0 24px")
        self._box = widgets.VBox([widgets.HBox([*self.controls.values()], layout=row), self.sentences, *self.pictures])
        for control in self.controls.values():
            control.observe(lambda _: self.move(), ["index"])

    @property
    def setting(self) -> dict[str, Any]:
        return {name: control.value for name, control in self.controls.items()}

    def move(self) -> None:
        """Draw what the controls say."""
        try:
            self._show(self._draw(**self.setting))
        except Exception as error:
            self._say(f"This cannot be drawn. {type(error).__name__}: {error} Move a control to try again.", "alert")

    def _show(self, view: View) -> None:
        self._say(view.sentences, "status")
        for i, (place, picture) in enumerate(zip(self.pictures, view.pictures, strict=True)):
            # Always the same ids, so that a picture that did not change is not sent again.
            place.value = f"<div style='line-height:1.4'>{picture.inline(key=f'{self._key}-{i}')}</div>"

    def _say(self, text: str, role: str) -> None:
        """role: "status" or "alert", so that screen readers speak up."""
        self.sentences.value = f"<p role='{role}' style='line-height:1.4;margin:8px 0'>{escape(text)}</p>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return {**self._box._repr_mimebundle_(), **self._stored}


def _stored(view: View, names: Sequence[str]) -> dict[str, str]:
    """What stays of the explorer where no widget runs."""
    pictures = "".join(picture._repr_mimebundle_()["text/html"] for picture in view.pictures)
    listed = f"{', '.join(names[:-1])} and {names[-1]}"
    invitation = f"<p><i>Run this cell for the controls: {escape(listed)}.</i></p>"
    html = f"{invitation}<p>{escape(view.sentences)}</p>{pictures}"
    return {"text/plain": view.sentences, "text/html": html}


def _html() -> Any:
    return widgets.HTML(layout=widgets.Layout(width=f"{WIDTH}px", max_width="100%"))
