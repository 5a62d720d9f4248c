"""The worker processes of one world size: forked together, used again and again, killed together.

There is one way to recover from anything: kill all workers and fork new ones, which takes a tenth of a
second. A pool is used again only after a run that has left nothing behind.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import psutil

from course_lib.ranks import diagnosis, errors, messages, start
from course_lib.ranks.board import Board, State

_TICK = 0.05  # seconds between looks at the board
_STILL = 1.0  # nothing has moved for this long: look whether anything still can
_GRACE = 0.3  # after the first failure, for others to fail too
_STARTUP = 60.0
_PREFIX = "course-ranks-"
SERVER_MARK = "COURSE_LIB_IN_FORK_SERVER"  # set in the environment of the fork server and its workers


def _start_method() -> str:
    """Forking is fast and shares memory, but unsafe on macOS and missing on Windows."""
    chosen = os.environ.get("COURSE_LIB_START_METHOD")
    return chosen or ("forkserver" if sys.platform == "linux" else "spawn")


def warm_up() -> None:
    """Start the fork server, which then imports torch while the student reads."""
    if _start_method() != "forkserver" or SERVER_MARK in os.environ:
        return
    from multiprocessing import forkserver

    forkserver.set_forkserver_preload(["course_lib.ranks.preload"])
    with _marked_environment(), _signals_blocked():
        forkserver.ensure_running()


@contextlib.contextmanager
def _marked_environment() -> Iterator[None]:
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
def _no_main_module() -> Iterator[None]:
    """Keep a worker from running the student's script again: what it needs travels by value."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@dataclass
class _Worker:
    process: Any
    line: connection.Connection
    lifeline: connection.Connection


class Pool:
    """`world_size` workers that have joined one process group."""

    def __init__(self, world_size: int, uses_gpu: bool = False) -> None:
        warm_up()
        _sweep()
        self.world_size, self.uses_gpu, self.owner = world_size, uses_gpu, os.getpid()
        self.directory = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
        self.workers: list[_Worker] = []
        self.is_alive = True
        try:
            context = multiprocessing.get_context(_start_method())
            self.memory = context.RawArray("c", Board.size(world_size))
            self.board = Board(self.memory)
            with _no_main_module(), _marked_environment():
                for rank in range(world_size):
                    self.workers.append(self._start_worker(context, rank))
        except BaseException:
            self.kill()
            raise

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

    def fits(self, world_size: int, uses_gpu: bool) -> bool:
        """Whether it can run this many ranks now: a pool does not survive a fork of the notebook's kernel."""
        same = (self.world_size, self.uses_gpu, self.owner) == (world_size, uses_gpu, os.getpid())
        return same and self.is_alive and all(worker.process.is_alive() for worker in self.workers)

    def kill(self) -> None:
        """End all workers and whatever they have started, and remove every trace."""
        if not self.is_alive or self.owner != os.getpid():
            return
        self.is_alive = False
        with interrupts_deferred():
            for worker in self.workers:
                _kill_group(worker.process)
            for worker in self.workers:
                worker.process.join(2)
                worker.line.close()
                worker.lifeline.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    def log(self, rank: int) -> str:
        path = os.path.join(self.directory, f"rank-{rank}.log")
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return ""

    def stack_line(self, rank: int) -> str:
        """The line that a busy rank is at, asked of the process even if it never returns to Python."""
        if not hasattr(signal, "SIGUSR1"):
            return ""
        before = len(self.log(rank))
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.workers[rank].process.pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.01)
            place = diagnosis.line_in(self.log(rank)[before:])
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
    for name in os.listdir(tempfile.gettempdir()):
        pid = name[len(_PREFIX) :].partition("-")[0]
        if name.startswith(_PREFIX) and pid.isdigit() and not _exists(int(pid)):
            path = os.path.join(tempfile.gettempdir(), name)
            with contextlib.suppress(OSError):
                if not hasattr(os, "getuid") or os.lstat(path).st_uid == os.getuid():
                    shutil.rmtree(path, ignore_errors=True)


def _exists(pid: int) -> bool:
    return psutil.pid_exists(pid)


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


class Conversation:
    """One run on a pool: hand out the task, listen, and judge when it is over."""

    def __init__(self, pool: Pool, timeout: float, show: Callable[[int, str], None]) -> None:
        self.pool, self.timeout, self.show = pool, timeout, show
        self.outcomes: list[messages.Outcome | None] = [None] * pool.world_size
        self.exit_codes: list[int | None] = [None] * pool.world_size
        self.printed: list[list[str]] = [[] for _ in range(pool.world_size)]
        self.began: float | None = None
        self.first_failure: float | None = None
        self.still_since = time.perf_counter()
        self.events: tuple = ()
        self.cpu: list[float] = []
        self.kills_before = _out_of_memory_kills()

    def hold(self, task: bytes) -> list[messages.Outcome]:
        """Run the task on every rank; raises a RunError as soon as it is clear that it cannot end well."""
        asked = time.perf_counter()
        for worker in self.pool.workers:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death is noticed below
                worker.line.send_bytes(task)
        while None in self.outcomes:
            self._listen()
            self._judge(asked)
        self._judge_result()
        return [outcome for outcome in self.outcomes if outcome is not None]

    def _listen(self) -> None:
        lines = {w.line: rank for rank, w in enumerate(self.pool.workers) if self.outcomes[rank] is None}
        lines = {line: rank for line, rank in lines.items() if self.exit_codes[rank] is None}
        ends = {self.pool.workers[rank].process.sentinel: rank for rank in lines.values()}
        for ready in connection.wait([*lines, *ends], timeout=_TICK):
            if ready in ends:
                self._drain(ends[ready])
                self._note_death(ends[ready])
            else:
                self._receive(lines[ready])  # type: ignore[index]

    def _receive(self, rank: int) -> bool:
        """Take one message from a rank; False if its line is closed."""
        try:
            message = self.pool.workers[rank].line.recv_bytes()
        except (EOFError, OSError):
            return False
        if message.startswith(messages.PRINTED):
            text = message[1:].decode()
            self.printed[rank].append(text)
            self.show(rank, text)
        else:
            self.outcomes[rank] = outcome = pickle.loads(message[1:])
            if outcome.failure:
                self._note_failure()
        return True

    def _drain(self, rank: int) -> None:
        line = self.pool.workers[rank].line
        while self.outcomes[rank] is None and line.poll() and self._receive(rank):
            pass

    def _note_death(self, rank: int) -> None:
        process = self.pool.workers[rank].process
        process.join(1)
        if self.outcomes[rank] is None:
            self.exit_codes[rank] = process.exitcode if process.exitcode is not None else 255
            self._note_failure()

    def _note_failure(self) -> None:
        self.first_failure = self.first_failure or time.perf_counter()

    # Judging

    def views(self) -> list[diagnosis.View]:
        ranks = range(self.pool.world_size)
        return [diagnosis.look(self.pool.board, r, self.outcomes[r], self.exit_codes[r]) for r in ranks]

    def report(self, views: list[diagnosis.View]) -> errors.Report:
        return diagnosis.make_report(views, time.perf_counter())

    def _judge(self, asked: float) -> None:
        now = time.perf_counter()
        if self.began is None and any(self.pool.board.state(r) != State.IDLE for r in range(self.pool.world_size)):
            self.began = now
        if self.first_failure is not None:
            if now - self.first_failure >= _GRACE:
                self._raise_failure()
        elif now - (self.began or asked + _STARTUP) >= self.timeout:
            self._raise_timeout()
        elif None in self.outcomes:
            self._judge_stillness(now)

    def _judge_stillness(self, now: float) -> None:
        events = tuple(self.pool.board.events(rank) for rank in range(self.pool.world_size)), len(self._ended())
        if events != self.events:
            self.events, self.still_since = events, now
            self.cpu = [self._cpu_seconds(rank) for rank in range(self.pool.world_size)]
        elif now - self.still_since >= _STILL:
            views = self.views()
            self._raise_mismatch([view.operations for view in views])
            verdict = diagnosis.explain_deadlock(self._settled(views))
            if verdict:
                text, rank, advice = verdict
                raise errors.Deadlock(text, rank, self.report(views), advice)
            self.still_since = now

    def _settled(self, views: list[diagnosis.View]) -> list[diagnosis.View]:
        """Count as waiting whoever sleeps on a future, where DistributedDataParallel waits unseen."""
        for view in views:
            handed = [op for op in view.operations if op.handed_on and not op.ended]
            if view.state == "computing" and handed and self._cpu_seconds(view.rank) - self.cpu[view.rank] < 0.1:
                view.state, handed[0].blocked = "waiting", handed[0].posted
        return views

    def _cpu_seconds(self, rank: int) -> float:
        try:
            times = psutil.Process(self.pool.workers[rank].process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return times.user + times.system

    def _ended(self) -> list[int]:
        return [rank for rank, outcome in enumerate(self.outcomes) if outcome is not None]

    def _raise_mismatch(self, histories: list[list[Any]]) -> None:
        verdict = diagnosis.explain_mismatch(histories)
        if verdict:
            text, rank, advice = verdict
            raise errors.Mismatch(text, rank, self.report(self.views()), advice)

    def _raise_failure(self) -> None:
        views = self.views()
        self._raise_mismatch([view.operations for view in views])
        report = self.report(views)
        for view in views:
            if view.state == "died":
                kills = _out_of_memory_kills() > self.kills_before
                view.line = diagnosis.line_in(self.pool.log(view.rank)) or view.line
                text = diagnosis.explain_death(view, kills)
                raise errors.RankDied(text, view.rank, self.report(views))
        text, rank, details = diagnosis.explain_failures(views)
        failure = views[rank].failure
        kind = errors.RankDied if failure and failure.kind == "exited" else errors.RankFailed
        raise kind(text, rank, report, details) from _original(failure)

    def _raise_timeout(self) -> None:
        views = self.views()
        for view in views:
            if view.state == "computing":
                view.line = self.pool.stack_line(view.rank) or view.line
        text, rank, advice = diagnosis.explain_timeout(views, self.timeout)
        raise errors.RankTimeout(text, rank, self.report(views), advice)

    def _judge_result(self) -> None:
        """Everybody has ended; look for what went wrong without stopping anybody."""
        if self.first_failure is not None:
            self._raise_failure()
        outcomes = [outcome for outcome in self.outcomes if outcome is not None]
        histories = [outcome.operations for outcome in outcomes]
        self._raise_mismatch(histories)
        verdict = diagnosis.explain_unfinished(histories, [outcome.unfinished for outcome in outcomes])
        if verdict:
            text, rank, advice = verdict
            raise errors.RankFailed(text, rank, self.report(self.views()), advice)

    def is_clean(self, may_keep_groups: bool) -> bool:
        """Whether the workers can be used again: all ended, nothing half-sent, nothing left behind."""
        outcomes = [outcome for outcome in self.outcomes if outcome is not None]
        if len(outcomes) < self.pool.world_size or not all(outcome.reusable for outcome in outcomes):
            return False
        if not may_keep_groups and any(outcome.has_new_groups for outcome in outcomes):
            return False
        done = all(not outcome.unfinished for outcome in outcomes)
        return done and diagnosis.all_matched([outcome.operations for outcome in outcomes])


def _original(failure: messages.Failure | None) -> BaseException | None:
    """The exception as it was raised on the rank, if it could travel."""
    try:
        return pickle.loads(failure.exception) if failure and failure.exception else None
    except Exception:
        return None


def _out_of_memory_kills() -> int:
    """How many processes this machine has killed for want of memory since it started; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/vmstat") as file:
        return int(file.read().split("oom_kill ")[1].split()[0])
    return 0


_pools: dict[str, Pool] = {}
_lock = threading.RLock()


@contextlib.contextmanager
def borrowed(purpose: str, world_size: int, uses_gpu: bool) -> Iterator[Pool]:
    """The pool kept for a purpose, forked anew if the last one does not fit; killed if the body fails."""
    with _lock:
        pool = _pools.get(purpose)
        if pool is None or not pool.fits(world_size, uses_gpu):
            discard(purpose)
            pool = _pools[purpose] = Pool(world_size, uses_gpu)
        try:
            yield pool
        except BaseException:
            discard(purpose)
            raise
        _Retirement.postpone()


def size_of(purpose: str) -> int | None:
    """How many ranks wait for this purpose; None if there are none."""
    pool = _pools.get(purpose)
    return pool.world_size if pool and pool.fits(pool.world_size, pool.uses_gpu) else None


def discard(purpose: str) -> None:
    pool = _pools.pop(purpose, None)
    if pool is not None:
        pool.kill()


def discard_all() -> None:
    """Let all workers go; the next launch forks new ones."""
    with _lock:
        for purpose in list(_pools):
            discard(purpose)


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
        if _start_method() == "forkserver":
            from multiprocessing import forkserver

            forkserver._forkserver._stop()  # type: ignore[attr-defined]


atexit.register(discard_all)
