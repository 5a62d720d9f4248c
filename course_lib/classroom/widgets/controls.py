"""A slider with a name and values that screen readers can read.

The sliders of ipywidgets have no name for a screen reader, which also reads the number of an option instead of the
option. These are the browser's own: label, value in words and keys work without code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import traitlets

from course_lib.classroom.widgets.answers import HERE, Labelled


class Slider(Labelled):
    """A slider over some options. Dragging changes `value` only at its release.

    options: at least one value.  texts: how each is written; by default `str`.
    last: its state after the last move, and when it was `moved`, in milliseconds on the browser's clock. The move
        may still be on its way: while the kernel is busy, the browser holds it back, but neither a message nor a click.

    Raises ValueError for a value that is not an option.
    """

    _esm = HERE / "slider.js"
    texts = traitlets.List(traitlets.Unicode()).tag(sync=True)
    index = traitlets.Int().tag(sync=True)

    def __init__(self, label: str, options: Sequence[Any], value: Any, texts: Sequence[str] | None = None) -> None:
        self.options = tuple(options)
        written = list(texts) if texts else [str(option) for option in options]
        super().__init__(label=label, texts=written, index=self.options.index(value))
        self.last: dict[str, Any] = {}
        self.on_msg(lambda _, state, __: setattr(self, "last", state))

    @property
    def value(self) -> Any:
        return self.options[self.index]

    @value.setter
    def value(self, value: Any) -> None:
        self.index = self.options.index(value)


def in_words(slider: Slider) -> str:
    return f"{slider.label} {slider.texts[slider.index]}"
