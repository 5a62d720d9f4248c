"""The source of worker processes: a fork server that has imported everything they need.

Forking a process that has imported torch takes milliseconds and shares its memory; importing torch in
each worker would take seconds. Where forking is missing or unsafe, workers are started from scratch.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from multiprocessing import util
from typing import Any

from course_lib import preloading

SHARED = "COURSE_LIB_FORK_SERVER"  # the variable with the address of one that another process has started
_lock = threading.Lock()
_home = ""


def start_method(uses_gpu: bool = False) -> str:
    """The start method: forking is fast and shares memory, but unsafe on macOS and for CUDA, and missing on Windows."""
    chosen = os.environ.get("COURSE_LIB_START_METHOD")
    return chosen or ("forkserver" if sys.platform == "linux" and not uses_gpu else "spawn")


def warm_up() -> None:
    """Start the fork server, unless this process is somebody's child, a rank for instance, which may never need it."""
    is_beginning = getattr(multiprocessing.current_process(), "_inheriting", False)  # a child that imports its script
    if multiprocessing.parent_process() is None and not is_beginning:
        start()


def start() -> None:
    """Start the fork server if it does not run yet, and return at once, while it imports torch."""
    if start_method() != "forkserver":
        return
    from multiprocessing import forkserver, resource_tracker

    if address := os.environ.get(SHARED):
        _join(forkserver._forkserver, address)
        return
    with _lock, _in_own_group():
        resource_tracker.ensure_running()  # first, as it unblocks the signals that are to be blocked
        config: Any = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
        config["tempdir"] = home()  # of multiprocessing's sockets
        worker = "course_lib.ranks.worker"  # by name, since this process does without torch
        forkserver.set_forkserver_preload([f"{worker}.preload", *preloading.modules, f"{worker}.freeze"])
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until it is in a group of its own
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _join(server: Any, address: str) -> None:
    """Have workers forked by the one at this address, which lives as long as the process that has started it."""
    if server._forkserver_address != address:
        server._forkserver_address = address
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # every request sends one; nothing hangs on it
        server.ensure_running = lambda: None


def home() -> str:
    """The directory of all our files, which goes with this process, however that ends."""
    global _home
    if not _home:
        usual = tempfile.gettempdir()
        is_short = len(usual) < 60 or not os.path.isdir("/tmp")  # enough for a socket's address
        _home = tempfile.mkdtemp(prefix="ranks-", dir=usual if is_short else "/tmp")
        atexit.register(shutil.rmtree, _home, ignore_errors=True)
    if not os.path.isdir(_home):  # the system has swept it away
        os.mkdir(_home, 0o700)
    return _home


# The fork server looks at the pipe from the notebook when it has imported everything. Until then the system does:
# when the notebook's end closes, SIGIO ends the process, whichever thread imports and whatever holds Python's lock.
_END_WITH_PIPE = (
    "; import fcntl, select; fcntl.fcntl({pipe}, fcntl.F_SETOWN, os.getpid())"
    "; fcntl.fcntl({pipe}, fcntl.F_SETFL, os.O_ASYNC); select.select([{pipe}], [], [], 0)[0] and os._exit(0)"
)


@contextlib.contextmanager
def _in_own_group() -> Iterator[None]:
    """Start multiprocessing's helpers outside the notebook's process group.

    A kernel that shuts down signals its whole group and waits; these two end by themselves when it has gone. The
    resource tracker is the last to go, and removes our files if the kernel was killed.
    """
    plain = util.spawnv_passfds

    def spawn(path: Any, args: Any, passfds: Any) -> int:
        first, last = "import os; os.setpgid(0, 0)", ""
        if "forkserver" in args[-1]:
            first += _END_WITH_PIPE.format(pipe=passfds[1])
        elif "resource_tracker" in args[-1]:
            last = f"; import shutil; shutil.rmtree({home()!r}, True)"
        return plain(path, [*args[:-1], f"{first}; {args[-1]}{last}"], passfds)

    util.spawnv_passfds = spawn
    try:
        yield
    finally:
        util.spawnv_passfds = plain


@contextlib.contextmanager
def no_main_module() -> Iterator[None]:
    """Keep a worker from running the student's script again: it gets everything by value. A notebook is no script."""
    main = sys.modules["__main__"]
    if hasattr(main, "__file__"):
        sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def retire() -> None:
    """End the fork server; the next pool starts another."""
    if start_method() == "forkserver":
        from multiprocessing import forkserver

        server: Any = forkserver._forkserver
        with _lock, contextlib.suppress(OSError):
            server._stop()
