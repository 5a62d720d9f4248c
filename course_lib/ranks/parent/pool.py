"""The worker processes of one purpose: forked when they are needed, used again and again, killed together.

A run of N ranks uses the first N workers of a pool. If the run before used another number, they meet in a new process
group, which takes a tenth of the time of forking them.

There is one way to recover from anything: kill all workers and fork new ones, which takes a tenth of a
second. A pool is used again only after a run that has left nothing behind.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil

from course_lib.ranks import messages
from course_lib.ranks.board import SLOT, Board
from course_lib.ranks.diagnosis.status import line_in
from course_lib.ranks.parent import fork_server
from course_lib.ranks.parent.interrupts import Interrupt
from course_lib.ranks.worker import start

ROOM = 8  # workers of a pool that serves runs of up to this many ranks; more ranks get a pool of their own

IDLE = 600.0  # seconds without a run after which the processes go
_PATIENCE = 3.0  # seconds for ranks to say where they are: the machine may be busy


@dataclass
class _WorkerProcess:
    process: Any
    line: connection.Connection
    lifeline: connection.Connection

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, even if the fork server has not reported its exit code yet."""
        with contextlib.suppress(psutil.NoSuchProcess):  # a process frees its memory before its connections
            return not self.process.is_alive() or self._as_seen.memory_info().rss == 0
        return True

    def ask(self) -> None:
        """Ask the worker to write on the board whether it may still go on."""
        with contextlib.suppress(OSError):  # the worker has ended
            self.lifeline.send_bytes(b"?")

    @functools.cached_property
    def _as_seen(self) -> psutil.Process:
        """The process in psutil, looked up once: every launch asks each worker."""
        return psutil.Process(self.process.pid)


class Pool:
    """Workers that run together, as the ranks of a world. room: the most workers that it can have."""

    def __init__(self, room: int, uses_gpu: bool = False) -> None:
        self.room, self.uses_gpu, self.owner = room, uses_gpu, os.getpid()
        self.directory = tempfile.mkdtemp(dir=fork_server.home())
        self.started: list[_WorkerProcess] = []
        self.world = messages.World(0, "")
        self.worlds = itertools.count()
        self.is_tidy = True  # nothing is left that a next run could meet
        self.has_run = False
        self.context: Any = multiprocessing.get_context(fork_server.start_method(uses_gpu))
        self.memory = self.context.RawArray("c", room * SLOT)
        self.board = Board(self.memory)

    @property
    def world_size(self) -> int:
        return self.world.size

    @property
    def workers(self) -> list[_WorkerProcess]:
        return self.started[: self.world_size]

    def gather(self, world_size: int) -> None:
        """Make the first workers the ranks of the next run, and start those that are missing."""
        if world_size != self.world_size:
            self.world = messages.World(world_size, os.path.join(self.directory, f"world-{next(self.worlds)}"))
        try:
            self._start_missing()
        except (EOFError, ConnectionError, FileNotFoundError):  # somebody has ended the fork server
            fork_server.retire()
            self._end_workers()
            self._start_missing()
        for rank in range(world_size):
            self.board.clear(rank, has_begun=False)

    def _start_missing(self) -> None:
        if len(self.started) < self.world_size:
            fork_server.start()
            with fork_server.no_main_module():
                for rank in range(len(self.started), self.world_size):
                    self.started.append(self._start_worker(rank))

    def _start_worker(self, rank: int) -> _WorkerProcess:
        context = self.context
        line, their_line = context.Pipe()
        their_lifeline, lifeline = context.Pipe(duplex=False)
        place = messages.Place(rank, self.directory, self.uses_gpu)
        arguments = (place, their_line, their_lifeline, self.memory)
        process = context.Process(target=start.begin, args=arguments, name=f"rank {rank}", daemon=True)
        process.start()
        their_line.close()
        their_lifeline.close()
        return _WorkerProcess(process, line, lifeline)

    def fits(self, room: int, uses_gpu: bool) -> bool:
        """Whether the pool can be used now: all workers are alive, and nobody has removed its directory."""
        is_whole = os.path.isdir(self.directory) and not any(worker.is_gone for worker in self.started)
        return is_whole and (self.room, self.uses_gpu) == (room, uses_gpu)

    def kill(self) -> None:
        """End all workers and all processes that they have started, and remove their files."""
        if self.owner == os.getpid():
            self._end_workers()
            shutil.rmtree(self.directory, ignore_errors=True)

    def _end_workers(self) -> None:
        for worker in self.started:
            _kill_group(worker.process)
        for worker in self.started:
            worker.process.join(2)
            worker.line.close()
            worker.lifeline.close()
        self.started.clear()

    def log(self, rank: int) -> str:
        """The output of C++ code on a rank in its last run."""
        with contextlib.suppress(OSError):
            return Path(messages.Place(rank, self.directory, self.uses_gpu).log).read_text(errors="replace")
        return ""

    def stack_lines(self, ranks: list[int]) -> dict[int, str]:
        """The lines that busy ranks are at, even if these never return to Python.

        A stopped process is continued for it.
        """
        for rank in ranks if hasattr(signal, "SIGUSR1") else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.workers[rank].process.pid, signal.SIGUSR1)
                os.kill(self.workers[rank].process.pid, signal.SIGCONT)
        until = time.monotonic() + _PATIENCE
        while True:
            logs = {rank: self.log(rank) for rank in ranks}
            if all(" in begin\n" in log for log in logs.values()) or time.monotonic() > until:  # a stack's last line
                return {rank: line_in(log) for rank, log in logs.items()}
            time.sleep(0.01)


def _kill_group(process: Any) -> None:
    if process.pid is None or process.exitcode is not None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        process.kill()


_pools: dict[str, Pool] = {}  # by purpose
_lock = threading.RLock()


@contextlib.contextmanager
def borrowed(purpose: str, world_size: int, uses_gpu: bool, interrupt: Interrupt) -> Iterator[Pool]:
    """The pool kept for a purpose, with so many ranks; a new pool if none can be used.

    It is killed afterwards unless the body has found it tidy.
    """
    # Ranks of cells keep their variables, and ranks with GPUs keep connections that take long to make.
    room = world_size if uses_gpu or purpose == "cells" else max(world_size, ROOM)
    with _lock:
        if purpose in _pools and not _pools[purpose].fits(room, uses_gpu):
            discard(purpose)
        pool = _pools[purpose] = _pools.get(purpose) or Pool(room, uses_gpu)
        pool.is_tidy, pool.has_run = False, True
        try:
            with interrupt.open("Stopped while the ranks were starting."):  # the fork server may still import
                pool.gather(world_size)
            yield pool
        finally:
            if not pool.is_tidy:
                discard(purpose)
                if fork_server.start_method(uses_gpu) == "spawn":
                    with contextlib.suppress(OSError):  # ranks of the next run import while the student reads the error
                        _pools[purpose] = Pool(room, uses_gpu)
                        _pools[purpose].gather(world_size)
            _postpone_retirement()


def last_world_size(purpose: str) -> int | None:
    """The number of ranks of the last run for this purpose; None if they are gone, or if there was no run."""
    pool = _pools.get(purpose)
    return pool.world_size if pool and pool.has_run and pool.fits(pool.room, pool.uses_gpu) else None


def prepare(purpose: str, world_size: int) -> None:
    """Start the workers of a purpose in a thread, so that they are there when the first run needs them."""

    def start_them() -> None:
        with _lock, contextlib.suppress(OSError):
            if purpose not in _pools:
                _pools[purpose] = Pool(max(world_size, ROOM))
                _pools[purpose].gather(world_size)
                _postpone_retirement()

    threading.Thread(target=start_them, daemon=True).start()


def renew(purpose: str) -> None:
    """End the workers of a purpose if any of them has run something."""
    with _lock:
        if purpose in _pools and _pools[purpose].has_run:
            discard(purpose)


def discard(purpose: str) -> None:
    """End the workers of a purpose, if there are any."""
    with _lock:
        if purpose in _pools:
            _pools.pop(purpose).kill()


def discard_all() -> None:
    """End all workers; the next launch forks new ones."""
    for purpose in list(_pools):
        discard(purpose)


_retirement: threading.Timer | None = None


def _postpone_retirement() -> None:
    """Put off the end of all workers: after minutes without a run, they free memory that other students may need."""
    global _retirement
    if _retirement is not None:
        _retirement.cancel()
    _retirement = threading.Timer(IDLE, _retire)
    _retirement.daemon = True
    _retirement.start()


def _retire() -> None:
    discard_all()
    fork_server.retire()


atexit.register(discard_all)
