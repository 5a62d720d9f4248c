"""Displays for the output of the ranks during a run."""

from __future__ import annotations

import html
import os
import sys
import time
from typing import Any


class Terminal:
    """A terminal shows each line, with its rank in front, as soon as it is complete."""

    def __init__(self) -> None:
        self.begun: dict[int, str] = {}

    def show(self, rank: int, text: str) -> None:
        *lines, self.begun[rank] = (self.begun.get(rank, "") + text).split("\n")
        for line in lines:
            sys.stdout.write(f"rank {rank} | {line}\n")

    def refresh(self) -> None:
        """Do nothing: lines are written as they come."""

    def finish(self) -> None:
        for rank in [rank for rank, line in self.begun.items() if line]:
            self.show(rank, "\n")
        sys.stdout.flush()


class Notebook:
    """A notebook shows one panel with the output grouped by rank, redrawn in place.

    Grouping by rank makes the output the same in every run, whichever rank printed first. A short run is drawn once, at
    its end. COURSE_PATIENCE says what is short, for tools that do not follow redraws (nbval).
    """

    patience = float(os.environ.get("COURSE_PATIENCE", 1.0))  # seconds from the first print to the first picture
    interval = 0.1  # seconds between redraws

    def __init__(self, fold: bool = False) -> None:
        self.fold = fold
        self.texts: dict[int, list[str]] = {}
        self.handle: Any = None
        self.next_draw = 0.0
        self.pending = False

    def show(self, rank: int, text: str) -> None:
        if not self.texts:
            self.next_draw = time.perf_counter() + self.patience
        self.texts.setdefault(rank, []).append(text)
        self.pending = True

    def refresh(self) -> None:
        if time.perf_counter() >= self.next_draw:
            self.finish()

    def finish(self) -> None:
        if not self.pending:
            return
        from IPython.display import display

        data = {"text/plain": self._plain(), "text/html": self._html()}
        if self.handle is None:
            self.handle = display(data, raw=True, display_id=True)
        else:
            self.handle.update(data, raw=True)
        self.next_draw, self.pending = time.perf_counter() + self.interval, False

    def _plain(self) -> str:
        whole = [(rank, "".join(texts)) for rank, texts in sorted(self.texts.items())]
        return "\n".join(f"rank {rank} | {line}" for rank, text in whole for line in text.splitlines())

    def _html(self) -> str:
        if not self.fold:
            return f"<pre>{html.escape(self._plain())}</pre>"
        parts = []
        for rank in sorted(self.texts):
            text = html.escape("".join(self.texts[rank]).rstrip("\n"))
            opened = " open" if rank == min(self.texts) else ""
            parts.append(f"<details{opened}><summary>rank {rank}</summary><pre>{text}</pre></details>")
        return "".join(parts)


Display = Notebook | Terminal


def make_display(fold: bool) -> Display:
    """The display: a panel in a notebook, lines elsewhere."""
    if "ipykernel" in sys.modules:
        from IPython import get_ipython

        if getattr(get_ipython(), "kernel", None) is not None:
            return Notebook(fold)
    return Terminal()
