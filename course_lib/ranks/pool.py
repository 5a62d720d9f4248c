"""The worker processes of one world size: forked together, used again and again, killed together.

There is one way to recover from anything: kill all workers and fork new ones, which takes a tenth of a
second. A pool is used again only after a run that has left nothing behind.
"""

from __future__ import annotations

import atexit
import contextlib
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
from typing import Any

import psutil

from course_lib.ranks import diagnosis, fork_server, messages, start
from course_lib.ranks.board import Board

ROOM = 16  # ranks that wait for one purpose at most, so that going from one number of them to another costs no fork


@dataclass
class _Worker:
    process: Any
    line: connection.Connection
    lifeline: connection.Connection


class Pool:
    """`world_size` workers that have joined one process group."""

    def __init__(self, world_size: int, uses_gpu: bool = False) -> None:
        _sweep()
        self.world_size, self.uses_gpu, self.owner = world_size, uses_gpu, os.getpid()
        self.directory = tempfile.mkdtemp(prefix=f"{fork_server.PREFIX}{os.getpid()}-")
        self.workers: list[_Worker] = []
        self.read = [0] * world_size  # how much of each log has been shown
        self.is_alive = True
        self.is_tidy = True  # nothing is left that a next run could meet
        self.has_run = False
        try:
            self._start_workers()
        except BaseException:
            self.kill()
            raise

    def _start_workers(self) -> None:
        method = fork_server.start_method(self.uses_gpu)
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            fork_server.warm_up()
        self.memory = context.RawArray("c", Board.size(self.world_size))
        self.board = Board(self.memory)
        try:
            self._start_all(context)
        except (EOFError, ConnectionError, FileNotFoundError):  # somebody has ended the fork server
            fork_server.retire()
            fork_server.warm_up()
            self._start_all(context)

    def _start_all(self, context: Any) -> None:
        for worker in self.workers:
            _kill_group(worker.process)
        self.workers.clear()
        with fork_server.no_main_module():
            for rank in range(self.world_size):
                self.workers.append(self._start_worker(context, rank))

    def _start_worker(self, context: Any, rank: int) -> _Worker:
        line, their_line = context.Pipe()
        their_lifeline, lifeline = context.Pipe(duplex=False)
        place = messages.Place(rank, self.world_size, self.directory, self.uses_gpu)
        arguments = (place, their_line, their_lifeline, self.memory)
        process = context.Process(target=start.begin, args=arguments, name=f"rank {rank}", daemon=True)
        process.start()
        their_line.close()
        their_lifeline.close()
        return _Worker(process, line, lifeline)

    def fits(self, uses_gpu: bool) -> bool:
        """Whether it can be used now: a pool does not survive a fork of the notebook's kernel."""
        same = (self.uses_gpu, self.owner) == (uses_gpu, os.getpid())
        return same and self.is_alive and all(worker.process.is_alive() for worker in self.workers)

    def kill(self) -> None:
        """End all workers and whatever they have started, and remove every trace."""
        if not self.is_alive or self.owner != os.getpid():
            return
        self.is_alive = False
        with fork_server.interrupts_deferred():
            for worker in self.workers:
                _kill_group(worker.process)
            for worker in self.workers:
                worker.process.join(2)
                worker.line.close()
                worker.lifeline.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    def log(self, rank: int, start: int = 0) -> str:
        """What a rank's process has written below Python's print, from this byte on."""
        try:
            with open(self._log_path(rank), "rb") as file:
                file.seek(start)
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def unread_log(self, rank: int) -> str:
        """What has come into a rank's log since this was last asked."""
        start, self.read[rank] = self.read[rank], self._log_size(rank)
        return self.log(rank, start) if self.read[rank] > start else ""

    def _log_path(self, rank: int) -> str:
        return messages.Place(rank, self.world_size, self.directory, self.uses_gpu).log

    def _log_size(self, rank: int) -> int:
        with contextlib.suppress(OSError):
            return os.stat(self._log_path(rank)).st_size
        return 0

    def stack_line(self, rank: int) -> str:
        """The line that a busy rank is at, asked of the process even if it never returns to Python."""
        if not hasattr(signal, "SIGUSR1"):
            return ""
        before = self._log_size(rank)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.workers[rank].process.pid, signal.SIGUSR1)
        for _ in range(50):  # half a second: the machine may be busy
            time.sleep(0.01)
            place = diagnosis.line_in(self.log(rank, before))
            if place:
                return place
        return ""


def _kill_group(process: Any) -> None:
    if process.pid is None or process.exitcode is not None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _sweep() -> None:
    """Remove what notebooks that were killed have left in the temporary directory."""
    for directory in fork_server.directories():
        for name in os.listdir(directory):
            pid = name[len(fork_server.PREFIX) :].partition("-")[0]
            if name.startswith(fork_server.PREFIX) and pid.isdigit() and not psutil.pid_exists(int(pid)):
                _remove_own(os.path.join(directory, name))


def _remove_own(path: str) -> None:
    with contextlib.suppress(OSError):
        if not hasattr(os, "getuid") or os.lstat(path).st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)


_pools: dict[tuple[str, int], Pool] = {}  # by purpose and size; the one used last comes last
_lock = threading.RLock()


@contextlib.contextmanager
def borrowed(purpose: str, world_size: int, uses_gpu: bool) -> Iterator[Pool]:
    """The pool of this size kept for a purpose, forked anew if there is none that can be used.

    It is killed afterwards unless the body has found it tidy.
    """
    with _lock:
        pool = _pools.pop((purpose, world_size), None)
        if pool is None or not pool.fits(uses_gpu):
            if pool is not None:
                pool.kill()
            _make_room(purpose, 0 if uses_gpu else ROOM - world_size)
            pool = Pool(world_size, uses_gpu)
        _pools[purpose, world_size] = pool
        pool.is_tidy, pool.has_run = False, True
        try:
            yield pool
        finally:
            if not pool.is_tidy:
                _discard((purpose, world_size))
                if fork_server.start_method(uses_gpu) == "spawn":
                    _start_spare(purpose, world_size, uses_gpu)
            _Retirement.postpone()


def _start_spare(purpose: str, world_size: int, uses_gpu: bool) -> None:
    """Start the ranks of the next run now: they import torch on their own while the student reads what went wrong."""
    with contextlib.suppress(OSError), fork_server.interrupts_deferred():
        _pools[purpose, world_size] = Pool(world_size, uses_gpu)


def _make_room(purpose: str, room: int) -> None:
    """Let those pools of a purpose go that were used least recently, until only so many ranks are left."""
    for key in [key for key in _pools if key[0] == purpose]:
        if sum(size for other, size in _pools if other == purpose) > room:
            _discard(key)


def size_of(purpose: str) -> int | None:
    """How many ranks wait in the pool last used for this purpose; None if there are none, or none that have run."""
    last = [pool for key, pool in _pools.items() if key[0] == purpose and pool.has_run][-1:]
    return last[0].world_size if last and last[0].fits(last[0].uses_gpu) else None


def discard(purpose: str) -> None:
    """Let the workers of a purpose go."""
    with _lock:
        _make_room(purpose, 0)


def discard_all() -> None:
    """Let all workers go; the next launch forks new ones."""
    with _lock:
        for key in list(_pools):
            _discard(key)


def _discard(key: tuple[str, int]) -> None:
    _pools.pop(key).kill()


class _Retirement:
    """Frees memory after minutes without a run: forty students may share one machine."""

    after = 600.0
    _timer: threading.Timer | None = None

    @classmethod
    def postpone(cls) -> None:
        if cls._timer is not None:
            cls._timer.cancel()
        cls._timer = threading.Timer(cls.after, cls._retire)
        cls._timer.daemon = True
        cls._timer.start()

    @staticmethod
    def _retire() -> None:
        discard_all()
        fork_server.retire()


atexit.register(discard_all)
