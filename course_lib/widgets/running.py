"""A line that says what is running and for how long yet, with a button that stops it.

    [=====------] 3 more to run, about 4 s left   [Stop]

It appears only when something has been running for a moment, so that what takes no longer than a blink does not
flicker. While a run holds the kernel, nothing gets through to it but an interrupt; so in JupyterLab the button sends
one. Between two runs, where nobody minds an interrupt, the click itself arrives: `clicks` counts them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from course_lib.figures.svg import ROOMY

KEYS = Path(__file__).with_name("keys.js").read_text(encoding="utf-8")

_SCRIPT = """
function render({ model, el }) {
  const bar = document.createElement("progress");
  const text = document.createElement("span");
  const stop = document.createElement("button");
  let began = 0, timer = 0;
  stop.textContent = "Stop";
  stop.dataset.lmSuppressShortcuts = "true";

  const show = () => {
    const whole = model.get("seconds");
    const left = whole - (performance.now() - began) / 1000;
    const time = whole && left >= 0.5 ? `, about ${Math.round(left)} s left` : "";
    text.textContent = model.get("words") + time;
    bar.setAttribute("aria-label", text.textContent);
    if (whole && left > 0) bar.value = 1 - left / whole;
    else bar.removeAttribute("value");
  };
  const change = () => {
    const runs = model.get("words") !== "";
    clearInterval(timer);
    el.classList.toggle("course-runs", runs);
    // A button that is really disabled loses the focus, and a keyboard its place on the page.
    stop.setAttribute("aria-disabled", !runs);
    if (!runs) return;
    began = performance.now();
    timer = setInterval(show, 500);
    show();
  };
  stop.addEventListener("click", async () => {
    if (stop.getAttribute("aria-disabled") === "true") return;
    // A kernel ignores an interrupt that comes while it is between two things, so one that was not heard is repeated.
    const run = began;
    setTimeout(() => began === run && el.isConnected && stop.click(), 5000);
    try {
      await model.widget_manager?.kernel?.interrupt?.();
    } finally {
      model.set("clicks", model.get("clicks") + 1);
      model.save_changes();
    }
  });
  for (const trait of ["words", "seconds"]) model.on(`change:${trait}`, change);
  change();
  el.classList.add("course-running");
  el.append(bar, text, stop);
  return () => clearInterval(timer);
}
export default { render };
"""

_STYLE = """
.course-live.jupyter-widgets-disconnected::before {
  content: "The kernel has ended. Run this cell again to go on."; font: inherit; color: var(--jp-ui-font-color1);
}
.course-live .jupyter-widgets-disconnected::before { content: none; }
.jupyter-widgets-disconnected :is(.course-slider, .course-running) { display: none; }
.jupyter-widgets-disconnected :is(.course-answer, .widget-text, .widget-textarea) { pointer-events: none; }
.jupyter-widgets-disconnected .course-answer :is(input, button, p) { display: none; }
.course-live, .course-live .widget-box { overflow: visible; }
.course-live.course-old .course-picture { opacity: 0.4; transition: opacity 0s 0.4s; }
.course-live .widget-html, .course-live .widget-html-content { height: auto; }
.course-running { display: flex; align-items: center; gap: 8px; height: 32px; visibility: hidden; }
.course-running { color: var(--jp-ui-font-color1, #1a1a1a); }
.course-running.course-runs { animation: course-appear 0s 0.4s forwards; }
.course-running:focus-within { visibility: visible; }
.course-running progress { width: 120px; accent-color: var(--jp-brand-color1, #1976d2); }
.course-running button {
  padding: 3px 12px; font: inherit; cursor: pointer; color: inherit;
  border: 1px solid var(--jp-border-color0, #757575); background: var(--jp-layout-color2, #eee);
}
.course-running button[aria-disabled=true] { cursor: default; opacity: 0.55; }
.course-running :focus-visible { outline: 2px solid var(--jp-brand-color1, #1976d2); outline-offset: 1px; }
@keyframes course-appear { to { visibility: visible; } }
"""


class Running(anywidget.AnyWidget):
    """words: what is running; "" when nothing is.  seconds: how long it should take yet; 0 if nobody knows."""

    _esm = KEYS + _SCRIPT
    _css = f".course-live {{ {ROOMY} }}" + _STYLE
    words = traitlets.Unicode().tag(sync=True)
    seconds = traitlets.Float().tag(sync=True)
    clicks = traitlets.Int().tag(sync=True)

    def begin(self, words: str, seconds: float = 0.0) -> None:
        with self.hold_sync():
            self.seconds, self.words = seconds, words

    def end(self) -> None:
        self.begin("")


def shown(live: dict[str, Any], stored: Mapping[str, str]) -> dict[str, Any]:
    """What a cell shows: the view of a widget, and what there is to see once its process has ended."""
    live["application/vnd.jupyter.widget-view+json"]["process"] = os.getpid()  # see jupyter_server_config.py
    return {**live, **stored}


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let an interrupt stop what is done here. A kernel ignores it outside of its cells and messages."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
