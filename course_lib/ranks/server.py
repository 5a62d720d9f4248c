"""Where worker processes come from: a fork server that has imported everything they need.

Forking a process that has imported torch takes milliseconds and shares its memory; importing torch in
each worker would take seconds. Where forking is missing or unsafe, workers are started from scratch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator

SERVER_MARK = "COURSE_LIB_IN_FORK_SERVER"  # set in the environment of the fork server and its workers


def start_method(uses_gpu: bool = False) -> str:
    """Forking is fast and shares memory, but unsafe on macOS, missing on Windows and not for CUDA."""
    chosen = os.environ.get("COURSE_LIB_START_METHOD")
    return chosen or ("forkserver" if sys.platform == "linux" and not uses_gpu else "spawn")


def warm_up() -> None:
    """Start the fork server, which then imports torch while the student reads."""
    if start_method() != "forkserver" or SERVER_MARK in os.environ:
        return
    from multiprocessing import forkserver

    forkserver.set_forkserver_preload(["course_lib.ranks.preload"])
    with marked_environment(), _signals_blocked():
        forkserver.ensure_running()


@contextlib.contextmanager
def marked_environment() -> Iterator[None]:
    os.environ[SERVER_MARK] = "1"
    try:
        yield
    finally:
        del os.environ[SERVER_MARK]


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process started here never sees Ctrl-C, not even before it can say so itself."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def no_main_module() -> Iterator[None]:
    """Keep a worker from running the student's script again: what it needs travels by value."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Finish a clean-up even if Stop is pressed again; the second press has nothing left to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def retire() -> None:
    """Let the fork server go; the next pool starts another."""
    if start_method() == "forkserver":
        from multiprocessing import forkserver

        forkserver._forkserver._stop()  # type: ignore[attr-defined]
