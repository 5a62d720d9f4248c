"""What a question card is answered with: options to choose from, a list to put in order, buttons.

Like `Slider`, they are the browser's own elements, with their names, roles and keys. The element that has the focus
carries `data-lm-suppress-shortcuts`, or JupyterLab would take a typed "d d" for "delete this cell".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anywidget
import traitlets

from course_lib.widgets.running import Running

__all__ = ["Button", "Options", "OrderList", "Running"]

_OPTIONS = """
function render({ model, el }) {
  const group = document.createElement("fieldset");
  const name = `options-${Math.random().toString(36).slice(2)}`;
  const show = () => {
    const legend = document.createElement("legend");
    legend.textContent = model.get("label");
    group.replaceChildren(legend, ...model.get("texts").map((text, index) => {
      const label = document.createElement("label");
      const input = document.createElement("input");
      const words = document.createElement("span");
      input.type = model.get("several") ? "checkbox" : "radio";
      input.name = name;
      input.value = index;
      input.dataset.lmSuppressShortcuts = "true";
      words.textContent = text;
      label.append(input, words);
      return label;
    }));
    mark();
  };
  const inputs = () => [...group.querySelectorAll("input")];
  const mark = () => {
    for (const input of inputs()) {
      input.checked = model.get("chosen").includes(Number(input.value));
      input.disabled = model.get("locked");
    }
  };
  group.addEventListener("change", () => {
    model.set("chosen", inputs().filter(input => input.checked).map(input => Number(input.value)));
    model.save_changes();
  });
  for (const trait of ["label", "texts"]) model.on(`change:${trait}`, show);
  for (const trait of ["chosen", "locked"]) model.on(`change:${trait}`, mark);
  show();
  el.classList.add("course-answer");
  el.append(group);
}
export default { render };
"""

_ORDER = """
function render({ model, el }) {
  const list = document.createElement("ol");
  const said = document.createElement("p");
  const hint = document.createElement("p");
  const buttons = document.createElement("div");
  list.setAttribute("role", "listbox");
  said.setAttribute("aria-live", "assertive");
  said.className = "course-unseen";
  hint.textContent = "Drag an event with the mouse. With the keyboard: arrows choose, Alt and arrows move.";
  let current = 0;

  const rows = () => [...list.children];
  const select = (index, focus = true) => {
    current = Math.max(0, Math.min(index, rows().length - 1));
    rows().forEach((row, place) => {
      row.tabIndex = place === current ? 0 : -1;
      row.setAttribute("aria-selected", place === current);
    });
    if (focus) rows()[current].focus();
  };
  const move = (from, to, focus = true) => {
    if (model.get("locked") || to < 0 || to >= rows().length || to === from) return;
    const order = [...model.get("order")];
    order.splice(to, 0, ...order.splice(from, 1));
    model.set("order", order);
    model.save_changes();
    select(to, focus);
    said.textContent = `${model.get("texts")[order[to]]}: now ${to + 1} of ${order.length}`;
  };
  const show = () => {
    const focused = list.contains(document.activeElement);
    list.setAttribute("aria-label", model.get("label"));
    list.setAttribute("aria-disabled", model.get("locked"));
    list.replaceChildren(...model.get("order").map(name => {
      const row = document.createElement("li");
      row.setAttribute("role", "option");
      row.dataset.lmSuppressShortcuts = "true";
      row.textContent = model.get("texts")[name];
      return row;
    }));
    select(current, focused);
  };

  list.addEventListener("keydown", event => {
    const step = { ArrowUp: -1, ArrowDown: 1, Home: -current, End: rows().length - 1 - current }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    event.altKey ? move(current, current + step) : select(current + step);
  });
  list.addEventListener("pointerdown", event => {
    const index = rows().indexOf(event.target);
    if (index < 0) return;
    select(index);
    event.preventDefault();
    list.setPointerCapture(event.pointerId);
  });
  list.addEventListener("pointermove", event => {
    if (!list.hasPointerCapture(event.pointerId)) return;
    const over = rows().findIndex(row => {
      const box = row.getBoundingClientRect();
      return event.clientY >= box.top && event.clientY < box.bottom;
    });
    if (over >= 0) move(current, over);
  });
  for (const [name, step] of [["Move up", -1], ["Move down", 1]]) {
    const button = document.createElement("button");
    button.textContent = name;
    button.dataset.lmSuppressShortcuts = "true";
    button.addEventListener("click", () => move(current, current + step, false));
    buttons.append(button);
  }
  const lock = () => {
    show();
    for (const button of buttons.children) button.disabled = model.get("locked");
  };
  for (const trait of ["label", "texts", "order"]) model.on(`change:${trait}`, show);
  model.on("change:locked", lock);
  lock();
  el.classList.add("course-answer");
  el.append(list, buttons, hint, said);
}
export default { render };
"""

_BUTTON = """
function render({ model, el }) {
  const button = document.createElement("button");
  button.dataset.lmSuppressShortcuts = "true";
  const show = () => {
    button.textContent = model.get("label");
    button.hidden = !model.get("label");
    // A button that is really disabled loses the focus, and a keyboard its place on the page.
    button.setAttribute("aria-disabled", !model.get("enabled"));
  };
  const look = () => {
    const answer = el.closest(".course-live")?.querySelector("[role=group][aria-label]");
    if (!model.get("enabled") || !answer) return;
    answer.scrollIntoView({ block: answer.offsetHeight > 0.7 * window.innerHeight ? "start" : "nearest" });
  };
  button.addEventListener("click", () => {
    if (!model.get("enabled")) return;
    model.set("enabled", false);
    model.set("clicks", model.get("clicks") + 1);
    model.save_changes();
  });
  for (const trait of ["label", "enabled"]) model.on(`change:${trait}`, show);
  model.on("change:enabled", look);
  show();
  el.classList.add("course-answer");
  el.append(button);
}
export default { render };
"""

_STYLE = """
.course-answer { color: var(--jp-ui-font-color1, #1a1a1a); line-height: 1.4; max-width: 46em; }
.course-answer fieldset { border: 0; margin: 0; padding: 0; min-width: 0; }
.course-answer legend, .course-answer p { padding: 0; margin: 4px 0; color: inherit; }
.course-answer label { display: flex; gap: 8px; padding: 4px 0; align-items: baseline; }
.course-answer input[type=radio] + span { white-space: pre-wrap; }
.course-answer input[type=radio] + span::first-letter { font-weight: bold; }
.course-answer input { accent-color: var(--jp-brand-color1, #1976d2); margin: 0; }
.course-answer ol { list-style: none; margin: 4px 0; padding: 0; counter-reset: place; }
.course-answer ol { touch-action: none; user-select: none; }
.course-answer li {
  margin: 3px 0; padding: 5px 10px; cursor: grab; counter-increment: place;
  border: 1px solid var(--jp-border-color0, #757575); background: var(--jp-layout-color1, #fff);
}
.course-answer li::before { content: counter(place) ". "; }
.course-answer li[aria-selected=true] { border-left-width: 5px; padding-left: 6px; }
.course-answer ol[aria-disabled=true] li { cursor: default; border-style: dashed; }
.course-answer button {
  margin: 4px 6px 4px 0; padding: 5px 12px; font: inherit; cursor: pointer; color: inherit;
  border: 1px solid var(--jp-border-color0, #757575); background: var(--jp-layout-color2, #eee);
}
.course-answer button:disabled, .course-answer button[aria-disabled=true] { cursor: default; opacity: 0.55; }
.course-answer :focus-visible { outline: 2px solid var(--jp-brand-color1, #1976d2); outline-offset: 1px; }
.course-unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
"""


class Options(anywidget.AnyWidget):
    """Radio buttons, or with `several` check boxes. chosen: the numbers of those chosen."""

    _esm = _OPTIONS
    _css = _STYLE
    label = traitlets.Unicode().tag(sync=True)
    texts = traitlets.List(traitlets.Unicode()).tag(sync=True)
    several = traitlets.Bool().tag(sync=True)
    chosen = traitlets.List(traitlets.Int()).tag(sync=True)
    locked = traitlets.Bool().tag(sync=True)

    def __init__(self, label: str, texts: Sequence[str], several: bool = False) -> None:
        super().__init__(label=label, texts=list(texts), several=several)


class OrderList(anywidget.AnyWidget):
    """A list to put in order, with the mouse or with keys. order: the names; texts: how each is written."""

    _esm = _ORDER
    _css = _STYLE
    label = traitlets.Unicode().tag(sync=True)
    texts = traitlets.Dict().tag(sync=True)
    order = traitlets.List(traitlets.Unicode()).tag(sync=True)
    locked = traitlets.Bool().tag(sync=True)

    def __init__(self, label: str, texts: Mapping[str, str]) -> None:
        super().__init__(label=label, texts=dict(texts), order=list(texts))


class Button(anywidget.AnyWidget):
    """A button; without a label it is hidden.

    clicks: how often it was pressed.  enabled: not while what it does is being done; whoever does it says when again.
    """

    _esm = _BUTTON
    _css = _STYLE
    label = traitlets.Unicode().tag(sync=True)
    enabled = traitlets.Bool(True).tag(sync=True)
    clicks = traitlets.Int().tag(sync=True)

    def __init__(self, label: str = "") -> None:
        super().__init__(label=label)
