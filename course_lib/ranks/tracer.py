"""What one rank has done in the current run: its operations, its marks, and the pace it must keep."""

from __future__ import annotations

import functools
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from course_lib.ranks.board import Board, Operation
from course_lib.ranks.messages import Mark
from course_lib.ranks.pace import Pace
from course_lib.ranks.places import COURSE

_TORCH = os.path.dirname(torch.__file__) + os.sep
_RANKS = os.path.dirname(__file__) + os.sep
clock = time.perf_counter


class _OpenMark(NamedTuple):
    kind: str
    name: str
    micro_batch: int | None
    stage: int | None
    seconds: float | None
    start: float
    blocked_before: float


class Tracer:
    """What this rank has done in the current run, and the pace at which it may do it.

    In a paced run all times are those of the emulated rank. This process comes to them a little late (it shares the
    cores with others), catches up by sleeping less, and may be up to `pace.slack` seconds behind.
    """

    def __init__(self, rank: int, board: Board) -> None:
        self.rank = rank
        self.board = board
        self.device: torch.device | None = None
        self.reset(None)

    def reset(self, pace: Pace | None) -> None:
        self.pace = pace
        self.operations: list[Operation] = []
        self.unclaimed: set[int] = set()  # numbers of operations that nobody waits for yet
        self.marks: list[Mark] = []
        self.steps = 0  # marks and operations begun; tells whether a wait() follows its call at once
        self.blocked_seconds = 0.0
        self.link_free = 0.0
        self.emulated = 0.0  # how far the emulated rank has come
        self.orders: Counter[tuple] = Counter()
        self._open: list[_OpenMark] = []

    # What `course_lib.timeline.compute` reports

    def begin(
        self, kind: str, name: str, micro_batch: int | None, stage: int | None, work: float, includes: str
    ) -> None:
        self.steps += 1
        self.board.touch(self.rank)
        seconds = self.pace.compute_seconds(kind, work, includes) if self.pace else None
        start = clock() if seconds is None else self.now()
        self._open.append(_OpenMark(kind, name, micro_batch, stage, seconds, start, self.blocked_seconds))

    def reach(self, fraction: float) -> None:
        self.steps += 1
        if self._open:
            self._compute_to(self._open[-1], fraction)

    def end(self) -> None:
        if self.device is not None:
            torch.cuda.synchronize(self.device)  # a GPU computes after the call has returned
        self._compute_to(self._open[-1], 1.0)
        end, mark = self.now(), self._open.pop()
        self.emulated = end
        self.marks.append(Mark(mark.kind, mark.name, mark.start, end, mark.micro_batch, mark.stage))
        self.steps += 1
        self.board.touch(self.rank)

    def _compute_to(self, mark: _OpenMark, fraction: float) -> None:
        if mark.seconds is not None:
            waited = self.blocked_seconds - mark.blocked_before
            self.advance(mark.start + waited + fraction * mark.seconds)

    # The clock

    def now(self) -> float:
        """The time of this rank: in a paced run the emulated one, unless this process is too far behind it."""
        real, pace = clock(), self.pace
        if pace is None or (self._open and self._open[-1].seconds is None):
            return real
        return real if real - self.emulated > pace.slack else self.emulated

    def advance(self, moment: float) -> None:
        """Let the emulated rank come to this moment."""
        sleep_until(moment)
        self.emulated = max(self.emulated, moment)

    # What the process groups report

    def post(self, op: Operation, key: tuple, tensor: torch.Tensor | None = None) -> None:
        self.steps += 1
        op.number = len(self.operations) + 1
        op.order = self.orders[key]
        self.orders[key] += 1
        op.line, op.label, op.names = _caller(tensor)
        op.posted = self.now()
        self.operations.append(op)
        if self.pace and op.is_send:
            self._send_off(op, self.pace)
        self.board.post(self.rank, op)

    def _send_off(self, op: Operation, pace: Pace) -> None:
        """A rank sends one message after the other: the next leaves when the last is on its way."""
        link = pace.link_between([self.rank, op.peer])
        self.link_free = max(op.posted, self.link_free) + op.bytes / link.bandwidth
        op.arrival = self.link_free + link.latency

    def block(self, op: Operation, started: int) -> None:
        op.blocked = op.posted if self.steps == started else self.now()
        self.board.mark_blocked(self.rank, op)

    def finish(self, op: Operation) -> None:
        op.ended = self.now()
        self.blocked_seconds += op.ended - op.blocked
        self.board.mark_ended(self.rank, op)

    def release_time(self, op: Operation) -> float:
        """When the emulated links would have completed an operation that is really complete."""
        pace = self.pace
        if pace is None:
            return 0.0
        if op.is_send:
            return op.arrival - pace.link_between([self.rank, op.peer]).latency
        if op.is_message:
            sent = self.board.partner(op, self.rank, op.peer)
            return sent.arrival if sent else 0.0
        return self._collective_release(op, pace)

    def _collective_release(self, op: Operation, pace: Pace) -> float:
        """Collectives of a rank share its links, so each starts when the one before it is over."""
        if not op.arrival:
            for earlier in self.operations[: op.number - 1]:
                if not earlier.arrival and earlier.family == "collective":
                    self._collective_release(earlier, pace)
            partners = (self.board.partner(op, self.rank, rank) for rank in op.member_ranks() if rank != self.rank)
            start = max([op.posted, self.link_free, *(partner.posted for partner in partners if partner)])
            op.arrival = start + pace.collective_seconds(op.name, op.bytes, op.member_ranks())
            self.link_free = op.arrival
        return op.arrival


def sleep_until(moment: float) -> None:
    remaining = moment - clock()
    if remaining > 0:
        time.sleep(remaining)


class _Origin(NamedTuple):
    """Whose code a frame runs: plumbing (torch's and this package's), the course's or the student's."""

    is_plumbing: bool
    is_course: bool
    checksum: int


@functools.lru_cache(maxsize=10_000)
def _origin(filename: str, function: str) -> _Origin:
    is_plumbing = filename.startswith((_TORCH, _RANKS, "<frozen", "<string>")) or filename.endswith("contextlib.py")
    return _Origin(is_plumbing, filename.startswith(COURSE), zlib.crc32(f"{filename}:{function}".encode()))


def is_torch(code: Any) -> bool:
    return code.co_filename.startswith(_TORCH)


def run_student(fn: Callable, rank: int, args: tuple) -> Any:
    """Call the student's function; the frame of this call is where their code begins."""
    return fn(rank, *args)


def _caller(tensor: torch.Tensor | None) -> tuple[str, int, int]:
    """The line of the student's code that led here, a label of the whole way, and one of the tensor's names.

    Operations that belong together usually carry equal labels on all ranks. Two labels in opposite
    order on two ranks mean that different tensors were added to each other.
    """
    frame: Any = sys._getframe(2)
    line, is_own, label, names = "", False, 0, 0
    while frame is not None and frame.f_code is not run_student.__code__:
        origin = _origin(frame.f_code.co_filename, frame.f_code.co_name)
        if not origin.is_plumbing:
            if not line and tensor is not None:
                names = _names(frame.f_locals, tensor)
            label = (label * 31 + origin.checksum + frame.f_lineno) & 0xFFFFFFFF
            if not line or (not is_own and not origin.is_course):
                line, is_own = f"{frame.f_code.co_filename}:{frame.f_lineno}", not origin.is_course
        frame = frame.f_back
    return line, label, names


def _names(variables: dict[str, Any], tensor: torch.Tensor) -> int:
    """A checksum of the names under which the calling code knows a tensor; 0 if it has none."""
    names = [name for name, value in variables.items() if value is tensor]
    return zlib.crc32(",".join(sorted(names)).encode()) if names else 0
