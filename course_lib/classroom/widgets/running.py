"""A line with the current run, its time left, and a button that stops it.

    [=====------] 3 more to run, about 4 s left   [Stop]

It appears only after a moment, so that short runs do not flicker. A run that holds the kernel can be reached by an
interrupt only; so in JupyterLab the button sends one. Between two runs, where an interrupt does nothing, the click
itself arrives: `stopped` changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from course_lib.classroom.questions.markup import inline
from course_lib.classroom.questions.outcome import WRONG
from course_lib.figures.svg import ROOMY
from course_lib.ranks import RunError, fenced


def beside_this(name: str) -> str:
    """The content of a file in this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


KEYS = beside_this("keys.js")


class Running(anywidget.AnyWidget):
    """A progress line. words: what is running; "" when nothing is.  seconds: time left; 0 if unknown.

    stopped: the time of the last press of Stop, in milliseconds on the browser's clock.
    """

    _esm = KEYS + beside_this("running.js")
    _css = f".course-live {{ {ROOMY} }}" + beside_this("running.css")
    words = traitlets.Unicode().tag(sync=True)
    seconds = traitlets.Float().tag(sync=True)
    stopped = traitlets.Float().tag(sync=True)

    def begin(self, words: str, seconds: float = 0.0) -> None:
        with self.hold_sync():
            self.seconds, self.words = seconds, words

    def end(self) -> None:
        self.begin("")


def shown(live: dict[str, Any], stored: Mapping[str, str]) -> dict[str, Any]:
    """The output of a cell: the view of a widget, and the stored form, shown once its process has ended."""
    live["application/vnd.jupyter.widget-view+json"]["process"] = os.getpid()  # see jupyter_server_config.py
    return {**live, **stored}


def attempt(action: Callable[[], object]) -> BaseException | None:
    """Run an action; return its error, or the interrupt of Stop, which kernels ignore between cells."""
    try:
        with fenced(always=True) as interrupt, interrupt.open("Stopped."):
            action()
    except (Exception, KeyboardInterrupt) as problem:
        return problem
    return None


def explained(problem: BaseException, again: str) -> str:
    """A problem in words. again: the way to try again."""
    if isinstance(problem, KeyboardInterrupt):
        return f"Stopped. {again}"
    reason = problem.message if isinstance(problem, RunError) else f"{type(problem).__name__}: {problem}"
    return f"This could not be run. {reason} {again}"


def said(text: str, role: str = "status") -> str:
    """A sentence as HTML. role: "status" or "alert", for screen readers."""
    bar = f";border-left:4px solid {WRONG};padding-left:8px" if role == "alert" else ""
    return f"<p role='{role}' style='line-height:1.4;margin:4px 0{bar}'>{inline(text)}</p>"
