"""The process of one rank: it joins the group once and then runs one function after another."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from course_lib import timeline
from course_lib.ranks import messages
from course_lib.ranks.board import Board
from course_lib.ranks.library_code import RANKS, is_library
from course_lib.ranks.worker import backward, changes, threads, traced_group
from course_lib.ranks.worker.tracer import Tracer, run_student

_PR_SET_PDEATHSIG = 1
_TOO_MUCH = "\n... this rank printed too much; the rest is left out\n"


def main(place: messages.Place, parent: Connection, board_memory: Any, answers: list[Any]) -> None:
    """Serve runs until the parent goes away."""
    _outlive_nobody()
    _redirect_output(place)
    tracer = Tracer(place.rank, Board(board_memory))
    torch.set_num_threads(1)
    if place.uses_gpu:
        tracer.device = torch.device("cuda", place.rank)
        torch.cuda.set_device(tracer.device)
        torch.set_default_device(tracer.device)
        torch.autograd.set_multithreading_enabled(False)  # its hooks run where the clock and the stacks are looked for
    traced_group.register(tracer)
    timeline.record_with(tracer)
    threads.watch()
    backward.follow_all(tracer.progress, lambda: tracer.emulated is not None)
    answers.append(tracer.answer)
    changes.watch_all()
    worker = Worker(place, parent, tracer)
    while True:
        try:
            message = parent.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        worker.run(*pickle.loads(message))


def _outlive_nobody() -> None:
    """Die with the parent, however it dies, and before the parent when memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what the Stop button means
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    if "multiprocessing.forkserver" in sys.modules:
        _close_fork_server_descriptor()
    _allow_children()


def _allow_children() -> None:
    """Allow a DataLoader its workers: multiprocessing forbids children to daemons like this process."""
    config: Any = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    config["daemon"] = False
    if sys.platform == "linux":
        multiprocessing.set_start_method("fork", force=True)  # another fork server would stay behind


def _close_fork_server_descriptor() -> None:
    """Close the inherited pipe that keeps the fork server alive; open, it would keep both processes forever."""
    from multiprocessing import forkserver

    _forkserver: Any = forkserver._forkserver
    if _forkserver._forkserver_alive_fd is not None:
        os.close(_forkserver._forkserver_alive_fd)
        _forkserver._forkserver_alive_fd = None


def _redirect_output(place: messages.Place) -> None:
    """Send the output of C++ code to the log, and let a crash write its stack there."""
    log = open(place.log, "a", encoding="utf-8", errors="replace")  # noqa: SIM115  (stays open for good)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, log)  # so the parent asks where an endless loop is


def _schedule_as(policy: str) -> None:
    with contextlib.suppress(AttributeError, OSError):  # on systems without it
        os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))


class Printer(io.TextIOBase):
    """A standard output that sends text to the parent at once, since a rank may end at any moment."""

    def __init__(self, parent: Connection, lock: Any) -> None:
        self._parent, self._lock = parent, lock
        self._room = messages.MAX_PRINTED

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            if text and self._room > 0:
                end = _TOO_MUCH if len(text) > self._room else ""
                shown = text[: self._room] + end
                self._parent.send_bytes(messages.PRINTED + shown.encode(errors="replace"))
                self._room -= len(text)
        return len(text)


class Worker:
    """Runs the tasks of one rank and tells the parent how they ended."""

    def __init__(self, place: messages.Place, parent: Connection, tracer: Tracer) -> None:
        self.place, self.parent, self.tracer, self.pid = place, parent, tracer, os.getpid()
        self.lock = threading.Lock()
        self.world: messages.World | None = None
        tracer.tell = lambda error: self._send(messages.RAISED, _describe(error, "raised"))
        self.own_environment = {"RANK": str(place.rank), "LOCAL_RANK": str(place.rank)}
        if not place.uses_gpu:
            self.own_environment["CUDA_VISIBLE_DEVICES"] = ""
        self.module_count = len(sys.modules)
        self.ended: list[Any] = []  # groups of the run before
        self.settings, self.filters = changes.settings(), list(warnings.filters)

    def run(self, world: messages.World, task: messages.Task) -> None:
        os.ftruncate(1, 0)  # the log of the run before
        if world != self.world:
            try:
                self._join(world)
            except Exception as error:
                now, failure = time.perf_counter(), _describe(error, "joining")
                self._send(messages.FINISHED, messages.RankOutcome(now, now, failure=failure, reusable=False))
                return
        self.tracer.board.clear(self.place.rank, has_begun=True)
        self._settle_in(task)
        self.tracer.reset(task.pace)
        changes.replaced.clear()
        own_threads = set(threading.enumerate())
        printer = Printer(self.parent, self.lock)
        with contextlib.redirect_stdout(printer), contextlib.redirect_stderr(printer):
            outcome = self._attempt(task)
        self._inspect(outcome, own_threads)
        self._send(messages.FINISHED, outcome)
        if ended := self.ended:  # for each of their connections, gloo sleeps for 10 ms
            threading.Thread(target=ended.clear, name="ended groups", daemon=True).start()
        self.ended, self.tracer.groups = self.tracer.groups, []

    def _send(self, kind: bytes, value: Any) -> None:
        with self.lock:
            self.parent.send_bytes(kind + pickle.dumps(value))

    def _join(self, world: messages.World) -> None:
        """Leave the process group of earlier runs, as all its ranks do, and join that of the next."""
        hook = sys.excepthook  # torch wraps it again each time
        if dist.is_initialized():
            dist.destroy_process_group()
        # The board has it all; torch would also record the stack of every operation, and hold the code of every run.
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
        self.own_environment["WORLD_SIZE"] = str(world.size)
        os.environ.update(self.own_environment)
        # gloo's threads poll; begun so, they leave the cores to the ranks (25 -> 6 ms a run)
        _schedule_as("SCHED_BATCH")
        store = dist.FileStore(world.rendezvous, world.size)
        dist.init_process_group("traced", store=store, rank=self.place.rank, world_size=world.size)
        _schedule_as("SCHED_OTHER")
        self.tracer.enter(world.rendezvous)
        sys.excepthook, self.world, self.has_run = hook, world, False

    def _settle_in(self, task: messages.Task) -> None:
        """Copy the settings of the student's notebook, and undo those that the last run changed."""
        sys.path[:] = task.path
        environment = {**task.environment, **self.own_environment}
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        with contextlib.suppress(OSError):
            os.chdir(task.directory)
        self._forget_own_modules()
        if warnings.filters != self.filters:
            warnings.resetwarnings()
            warnings.filters[:] = self.filters  # type: ignore[index]
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        _seed(1000 + self.place.rank, self.place.uses_gpu)

    def _forget_own_modules(self) -> None:
        """Import the student's own files anew, since they may have been edited.

        Only the newest names are looked at: touching all would copy megabytes of the fork server's memory.
        """
        for name in list(itertools.islice(reversed(sys.modules), len(sys.modules) - self.module_count)):
            filename = getattr(sys.modules[name], "__file__", None)
            if filename is not None and not is_library(filename):
                del sys.modules[name]
            else:
                changes.watch(sys.modules[name])
        self.module_count = len(sys.modules)

    def _attempt(self, task: messages.Task) -> messages.RankOutcome:
        started = time.perf_counter()
        outcome = messages.RankOutcome(started, started)
        kind = "arrival"
        try:
            fn, args = cloudpickle.loads(task.function)
            kind = "raised"
            if not self.has_run:
                self._line_up()
            outcome.started = time.perf_counter()
            value = self._call(fn, args)
            outcome.ended = time.perf_counter()
            self.tracer.end_run()
            outcome.value, outcome.failure = _pickle_result(value)
        except BaseException as error:
            outcome.ended = time.perf_counter()
            outcome.failure = _describe(error, kind)
        outcome.operations, outcome.marks = self.tracer.operations, self.tracer.marks
        outcome.untimed = self.tracer.emulated.untimed if self.tracer.emulated else set()
        return outcome

    def _call(self, fn: Any, args: tuple) -> Any:
        try:
            return run_student(fn, self.place.rank, args)
        finally:
            if os.getpid() != self.pid:  # a child that the function has forked is no rank
                os._exit(0)

    def _line_up(self) -> None:
        """Start together: a head start would show in the timeline, and nobody starts where a rank could not join."""
        world: Any = dist.group.WORLD
        world.inner.barrier().wait()
        self.has_run = True

    def _inspect(self, outcome: messages.RankOutcome, own_threads: set[threading.Thread]) -> None:
        """Look for threads, child processes and changes that the function has left behind."""
        outcome.unfinished = sorted(self.tracer.unclaimed)
        left = [thread for thread in threading.enumerate() if thread not in own_threads and _outlasts(thread)]
        has_child = _has_child()
        outcome.reusable = not left and not has_child
        outcome.has_changes = len(dist.distributed_c10d._world.pg_map) != 1 or changes.made(self.settings)
        own = [thread for thread in left if not thread.daemon or _is_students(thread)]
        if outcome.failure is None and (own or has_child):
            what, advice = (f"the thread {own[0].name!r}", "join() it") if own else ("a child process", "wait() for it")
            outcome.failure = messages.Failure("leftover", what, f"{advice} before the function returns")


def _seed(seed: int, uses_gpu: bool) -> None:
    """Seed each rank differently, so that a forgotten broadcast shows."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats three stacks: a millisecond
    if uses_gpu:
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


class _ResultPickler(cloudpickle.Pickler):
    """A pickler that sends the numbers of a tensor: no GPU, and not the whole storage of which it may be a part."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, AsyncCollectiveTensor):
            return value.trigger_wait().__reduce_ex__(2)  # its data may not have arrived yet
        if isinstance(value, torch.Tensor) and value.is_cuda:
            copy = value.detach().cpu()
            kind = torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor.requires_grad_
            return kind(copy, value.requires_grad).__reduce_ex__(2)
        is_plain = type(value) is torch.Tensor and value.layout == torch.strided
        if is_plain and value.untyped_storage().nbytes() > value.nbytes:
            return value.detach().clone().requires_grad_(value.requires_grad).__reduce_ex__(2)
        return super().reducer_override(value)


def _pickle_result(value: Any) -> tuple[bytes | None, messages.Failure | None]:
    buffer, size = io.BytesIO(), _tensor_bytes(value)
    if size > messages.MAX_RESULT_BYTES:
        limit = messages.MAX_RESULT_BYTES // 1024**2
        advice = f"at most {limit} MB come back; return a summary, or save it on the rank with torch.save"
        return None, messages.Failure("result", type(value).__name__, f"of {size / 1e9:.2f} GB: {advice}")
    try:
        _ResultPickler(buffer).dump(value)
    except Exception as error:
        advice = "it cannot be sent to the notebook; return tensors, numbers, strings, lists or dictionaries"
        return None, messages.Failure("result", type(value).__name__, f"({error}): {advice}")
    return buffer.getvalue(), None


def _tensor_bytes(value: Any) -> int:
    """The size of the tensors in a result, to refuse a huge one before it is copied."""
    if isinstance(value, dict | list | tuple):
        return sum(map(_tensor_bytes, value.values() if isinstance(value, dict) else value))
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return len(value) if isinstance(value, bytes | bytearray | str) else getattr(value, "nbytes", 0)


def _describe(error: BaseException, kind: str) -> messages.Failure:
    kind = "exited" if isinstance(error, SystemExit) else kind
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(RANKS)]
    own = [frame for frame in frames if not is_library(frame.filename)]
    text = "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames)])
    text += "".join(traceback.format_exception_only(type(error), error))
    failure = messages.Failure(kind, type(error).__name__, "(its message cannot be shown)", _shortened(text))
    with contextlib.suppress(Exception):
        failure.message = _shortened(str(error))
    if own or frames:
        last = (own or frames)[-1]
        failure.line = f"{last.filename}:{last.lineno}"
    with contextlib.suppress(Exception):
        pickled = cloudpickle.dumps(error.with_traceback(None))
        failure.exception = pickled if len(pickled) < 1_000_000 else None
    return failure


def _shortened(text: str, limit: int = 6000) -> str:
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}\n[...]\n{text[-half:]}"


def _outlasts(thread: threading.Thread) -> bool:
    if isinstance(thread, threading._DummyThread):  # gloo's, which has called the student's code: no join
        return False
    thread.join(0.05)
    return thread.is_alive()


def _is_students(thread: threading.Thread) -> bool:
    """Whether a thread runs the student's code, not a library's."""
    code = getattr(getattr(thread, "_target", None) or type(thread).run, "__code__", None)
    return code is not None and not is_library(code.co_filename)


def _has_child() -> bool:
    """Whether this process has a child, running or not yet waited for."""
    with contextlib.suppress(ChildProcessError, AttributeError):  # there is none, or no way to ask
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False
