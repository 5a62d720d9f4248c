"""The trace of one rank in the current run: operations and marks, on the real clock or an emulated one."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks.board import Board, Operation
from course_lib.ranks.library_code import COURSE, RANKS
from course_lib.ranks.pace import Pace
from course_lib.ranks.worker import threads
from course_lib.ranks.worker.clock import EmulatedClock, Entries
from course_lib.timeline import Span

clock = time.perf_counter
_LATE_NOTES = 2000  # polls for the end of an operation, which another thread notes


class Tracer:
    """The trace of this rank in the current run."""

    def __init__(self, rank: int, board: Board) -> None:
        self.rank, self.board = rank, board
        self.device: torch.device | None = None
        self.emulated: EmulatedClock | None = None
        self.groups: list[Any] = []  # groups that the rank has left
        self.tell: Callable[[BaseException], None] = lambda error: None  # of an exception that is being handled
        self.enter("")
        self.reset(None)

    def enter(self, rendezvous: str) -> None:
        """Enter a world: its ranks have met at this rendezvous, and all begin the same number of runs."""
        self.rendezvous, self.runs = rendezvous, 0

    def reset(self, pace: Pace | None) -> None:
        """Begin a run."""
        self.runs += 1
        if self.emulated:
            self.emulated.entries.close()
        self.emulated = None
        if pace:
            self.emulated = EmulatedClock(self.rank, pace, Entries(f"{self.rendezvous}-times-{self.runs}-", self.rank))
        self.operations: list[Operation] = []
        self.unclaimed: dict[int, Any] = {}  # not waited for yet: gloo forgets a message without its handle
        self.buffered: list[Any] = []  # handles of collectives that work on copies
        self.receiving: list[Any] = []  # handles of receives that do
        self.marks: list[Span] = []
        self.steps = 0  # marks and operations begun: whether a wait() follows its call at once
        self.orders: Counter[tuple] = Counter()
        self._told = 0  # the id of an exception, which must not be kept alive
        self._last_key: tuple = ()
        self._open: list[Span] = []

    # Called by `course_lib.timeline.compute`

    def begin(self, kind: str, name: str, micro_batch: int | None, stage: int | None, work: float, also: str) -> None:
        self.steps += 1
        self.board.touch(self.rank)
        if self.emulated:
            self.emulated.begin(kind, work, also)
        self._open.append(Span(self.rank, kind, name or kind, self.now(), 0.0, micro_batch, stage))

    def progress(self, fraction: float) -> None:
        self.steps += 1
        if self.emulated:
            self.emulated.progress(fraction)

    def end(self, failed: bool) -> None:
        if self.device is not None:
            # A GPU computes after the call has returned. In its other streams a receive may wait for what comes after.
            torch.cuda.current_stream().synchronize()
        if self.emulated:
            self.emulated.end(failed)
        self.marks.append(self._open.pop()._replace(end=self.now()))
        self.steps += 1
        self.board.touch(self.rank)

    def now(self) -> float:
        """Seconds on the clock of the timeline."""
        return self.emulated.now if self.emulated else clock()

    def end_run(self) -> None:
        """End the run. Operations that were waited for out of sight have ended, but this may be noted a bit later."""
        if self.emulated:
            self.emulated.come_by()
            if self.emulated.refused:
                raise self.emulated.refused
        for _ in range(_LATE_NOTES):  # looks, not seconds: a machine may stand still
            if not any(op.handed_on and not op.ended for op in self.operations):
                break
            time.sleep(0.0005)

    def answer(self) -> None:
        """Write on the board how many threads may still go on."""
        events = self.board.events(self.rank)
        has_futures = any(op.handed_on and not op.ended for op in self.operations)
        self.board.answer(self.rank, events, threads.how_many_act(has_futures))

    # Called by the process groups

    def post(self, op: Operation, key: tuple) -> None:
        if self.emulated:
            self.emulated.follow(op.name)
            self.emulated.come_by()
        self.steps += 1
        op.number = len(self.operations) + 1
        op.order = self.orders[key]
        self.orders[key] += 1
        self._last_key = key
        op.line = _caller()
        self._look_for_exception(op)
        op.posted = clock()
        self.operations.append(op)
        if self.emulated and op.name != "new_group":
            self.emulated.post(op)
        self.board.post(self.rank, op)

    def _look_for_exception(self, op: Operation) -> None:
        """Tell the parent of an exception whose handler, or finally, begins an operation that may hold it up."""
        error = sys.exc_info()[1]
        op.in_handler = error is not None
        if error is not None and id(error) != self._told:
            self._told = id(error)
            self.tell(error)

    def withdraw(self, op: Operation) -> None:
        """Take back the last operation, which was refused as soon as it began."""
        self.operations.remove(op)
        self.orders[self._last_key] -= 1
        if self.emulated:
            self.emulated.withdraw(op)
        self.finish(op)

    def block(self, op: Operation, started: int) -> None:
        op.blocked = op.posted if self.steps == started else clock()
        self.board.write(self.rank, op)

    def finish(self, op: Operation) -> None:
        op.ended = clock()
        self.board.write(self.rank, op)


@functools.lru_cache(maxsize=10_000)
def _origin(filename: str) -> tuple[bool, bool]:
    """Whether a file belongs to torch or to this package, and whether it belongs to the course."""
    plumbing = (threads.TORCH, RANKS, "<frozen", "<string>", contextlib.__file__)
    return filename.startswith(plumbing), filename.startswith(COURSE)


def torch_calls() -> Iterator[str]:
    """The functions of torch.distributed on the stack, up to the one that the student called."""
    return (code.co_name for code in _torch_codes() if code.co_filename == dist.distributed_c10d.__file__)


def is_called_directly() -> bool:
    """Whether torch.distributed is called by code outside of torch."""
    direct = {dist.distributed_c10d.__file__, dist.c10d_logger.__file__}
    files = {code.co_filename for code in _torch_codes() if not code.co_filename.startswith(RANKS)}
    return bool(files) and files <= direct


def _torch_codes() -> Iterator[Any]:
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((threads.TORCH, RANKS)):
        yield frame.f_code
        frame = frame.f_back


def run_student(fn: Callable, rank: int, args: tuple) -> Any:
    """Call the student's function; the frame of this call is where their code begins."""
    return fn(rank, *args)


def _caller() -> str:
    """The line of the student's code that led here; without one, the line of the course's code."""
    frame: Any = sys._getframe(2)
    line = ""
    while frame is not None and frame.f_code is not run_student.__code__:
        is_plumbing, is_course = _origin(frame.f_code.co_filename)
        if not is_plumbing:
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if not is_course:
                return place
            line = line or place
        frame = frame.f_back
    return line
