"""Stop, or Ctrl-C: heard wherever it falls, and never in the middle of a clean-up.

Python raises KeyboardInterrupt between any two lines. In a clean-up that leaves the rest undone, and in a `__del__` it
is lost. So what must not break is `fenced`: inside, an interrupt is only noted. Who waits there looks at `has_come`
again and again; what may wait where nobody can look is `open` to it; one that nobody has heard is raised at the end:

    fenced |--noted--|--open: raised at once--|--noted--| what is left: raised
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from course_lib.ranks.errors import Stopped


class Interrupt:
    """The interrupt of one fenced stretch. Only the first counts: a second has nothing left to stop."""

    def __init__(self) -> None:
        self.has_come, self._open_as = False, ""

    def come(self, *_: Any) -> None:
        self.has_come, words, self._open_as = True, self._open_as, ""
        if words:
            raise Stopped(words)

    @contextlib.contextmanager
    def open(self, words: str) -> Iterator[None]:
        """Inside, an interrupt is raised at once in these words, also one that has come before."""
        self._open_as = words
        try:
            if self.has_come:
                self.come()
            yield
        finally:
            self._open_as = ""


@contextlib.contextmanager
def fenced(always: bool = False) -> Iterator[Interrupt]:
    """Hold back interrupts; Stopped at the end if one has come that nobody has raised yet.

    always: also where they are ignored, as a kernel does between its cells and messages.
    """
    interrupt, before = Interrupt(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not (always or callable(before)):
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt.come)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupt.has_come and not isinstance(sys.exc_info()[1], KeyboardInterrupt):
            raise Stopped("Stopped at the end of the run.")
