"""The start of a worker process. The parent imports this module, so it must not import torch."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

is_rank = False  # whether this process is a rank


def begin(place: Any, parent: Connection, lifeline: Connection, memory: Any) -> None:
    """Become a rank. lifeline: carries questions, and closes with the parent, perhaps while torch is imported."""
    global is_rank
    is_rank = True
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # so that a child process left behind can be ended with its worker
    answers: list[Callable[[], None]] = []  # called when the parent asks, once the rank has set it
    threading.Thread(target=_end_with, args=(lifeline, answers), name="lifeline", daemon=True).start()
    from course_lib.ranks.worker import process

    process.main(place, parent, memory, answers)


def _end_with(lifeline: Connection, answers: list[Callable[[], None]]) -> None:
    """Answer questions while the main thread is busy, and end this process with the parent."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            lifeline.recv_bytes()
            for answer in answers:
                answer()
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
