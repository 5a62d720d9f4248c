"""A slider and a switch that say their names and values to everyone.

The sliders of ipywidgets have no name for a screen reader, which also reads the number of an option in place of
the option. These are the browser's own: label, value in words and keys are there without any code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anywidget
import traitlets

_SLIDER = """
function render({ model, el }) {
  const label = document.createElement("label");
  const name = document.createElement("span");
  const slider = document.createElement("input");
  const output = document.createElement("output");
  slider.type = "range";
  // Else the arrow keys would also move the notebook's selected cell.
  slider.dataset.lmSuppressShortcuts = "true";
  const say = () => {
    const text = model.get("texts")[slider.value];
    slider.setAttribute("aria-valuetext", text);
    output.textContent = text;
  };
  const show = () => {
    name.textContent = model.get("label");
    slider.max = model.get("texts").length - 1;
    slider.value = model.get("index");
    say();
  };
  slider.addEventListener("input", say);
  slider.addEventListener("change", () => {
    model.set("index", Number(slider.value));
    model.save_changes();
  });
  for (const trait of ["label", "texts", "index"]) model.on(`change:${trait}`, show);
  show();
  label.append(name, slider, output);
  el.classList.add("course-slider");
  el.append(label);
}
export default { render };
"""

_SWITCH = """
function render({ model, el }) {
  const label = document.createElement("label");
  const name = document.createElement("span");
  const box = document.createElement("input");
  const words = document.createElement("span");
  box.type = "checkbox";
  box.dataset.lmSuppressShortcuts = "true";
  const show = () => {
    name.textContent = model.get("label");
    words.textContent = model.get("text");
    box.checked = model.get("value");
  };
  box.addEventListener("change", () => {
    model.set("value", box.checked);
    model.save_changes();
  });
  for (const trait of ["label", "text", "value"]) model.on(`change:${trait}`, show);
  show();
  label.append(name, box, words);
  el.classList.add("course-slider");
  el.append(label);
}
export default { render };
"""

_STYLE = """
.course-slider label { display: flex; align-items: center; gap: 8px; height: 30px; color: var(--jp-ui-font-color1); }
.course-slider span:first-child { width: 7.2em; white-space: nowrap; }
.course-slider input { accent-color: var(--jp-brand-color1); }
.course-slider input[type=range] { width: 150px; }
"""


class Slider(anywidget.AnyWidget):
    """Chooses one of some options. Dragging changes `value` only once it is let go.

    options: at least one value.  texts: how each is written; by default as `str` has it.

    Raises ValueError for a value that is not an option.
    """

    _esm = _SLIDER
    _css = _STYLE
    label = traitlets.Unicode().tag(sync=True)
    texts = traitlets.List(traitlets.Unicode()).tag(sync=True)
    index = traitlets.Int().tag(sync=True)

    def __init__(self, label: str, options: Sequence[Any], value: Any, texts: Sequence[str] | None = None) -> None:
        self.options = tuple(options)
        if value not in self.options:
            raise ValueError(
                f"value={value!r} is not an option of {label!r}; choose from {', '.join(map(str, options))}"
            )
        written = list(texts) if texts else [str(option) for option in options]
        super().__init__(label=label, texts=written, index=self.options.index(value))

    @property
    def value(self) -> Any:
        return self.options[self.index]

    @value.setter
    def value(self, value: Any) -> None:
        self.index = self.options.index(value)


class Switch(anywidget.AnyWidget):
    """Something that is on or off. text: what it means to be on."""

    _esm = _SWITCH
    _css = _STYLE
    label = traitlets.Unicode().tag(sync=True)
    text = traitlets.Unicode().tag(sync=True)
    value = traitlets.Bool().tag(sync=True)

    def __init__(self, label: str, value: bool, text: str = "") -> None:
        super().__init__(label=label, value=value, text=text)


def in_words(control: Slider | Switch) -> str:
    text = control.texts[control.index] if isinstance(control, Slider) else "on" if control.value else "off"
    return f"{control.label} {text}"
