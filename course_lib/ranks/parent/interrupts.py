"""The Stop button and Ctrl-C: noticed everywhere, and never in the middle of a clean-up.

Python raises KeyboardInterrupt between any two lines. In a clean-up that leaves the rest undone, and in a `__del__` it
is lost. So code that must not break is `fenced`: inside, an interrupt is only noted. A loop that waits there polls
`has_come`; a call that may block is `open` to interrupts; one that has not been raised yet is raised at the end:

    fenced |--noted--|--open: raised at once--|--noted--| one left: raised
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
    """The interrupt of one fenced block. Only the first counts: a second one has nothing left to stop."""

    def __init__(self) -> None:
        self.has_come, self._open_as = False, ""

    def come(self, *_: Any) -> None:
        self.has_come, words, self._open_as = True, self._open_as, ""
        if words:
            raise Stopped(words)

    @contextlib.contextmanager
    def open(self, words: str) -> Iterator[None]:
        """Raise an interrupt inside the block at once, with these words, also one that has come before."""
        self._open_as = words
        try:
            if self.has_come:
                self.come()
            yield
        finally:
            self._open_as = ""


@contextlib.contextmanager
def fenced(always: bool = False) -> Iterator[Interrupt]:
    """Hold back interrupts; raise Stopped at the end if one has come and has not been raised yet.

    always: also where interrupts are ignored, as a kernel does between its cells and messages.
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
