"""One run on a pool: hand out the task, listen to the ranks, and judge when it is over.

A run ends when all ranks have returned, or as soon as it is clear that they never will: one has failed,
the time is over, or everybody is blocked, nothing has moved for a second and nothing ever can.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

import psutil

from course_lib.ranks import errors, messages
from course_lib.ranks.diagnosis import endings, mismatch
from course_lib.ranks.diagnosis.deadlock import explain_deadlock
from course_lib.ranks.diagnosis.status import RankStatus, line_in, make_report, status_of
from course_lib.ranks.parent.interrupts import Interrupt
from course_lib.ranks.parent.output import Display
from course_lib.ranks.parent.pool import Pool

_TICK = 0.05  # seconds between looks at the board
_STILL = 1.0  # seconds without progress after which to look whether any is still possible
_GRACE = 0.3  # after the first failure, for others to fail too
_GRACE_IF_CUT_OFF = 2.0  # after the first broken connection, for its cause to be noticed
_GRACE_IF_GONE = 10.0  # for a dead process, until its exit code is known
_STARTUP = 60.0
_AT_MOST = 10  # times the limit, by the wall clock: then a run is over, however busy the machine is
_ASLEEP = 0.15  # seconds: a rank that has computed less since it moved has slept


class _Moved(NamedTuple):
    """The last time a rank was seen to move, and the seconds that it had computed by then."""

    events: int = -1
    at: float = 0.0
    computed: float = 0.0


@dataclass
class _TimeTaken:
    """The seconds of a run that count towards its time limit, or since a failure towards the patience with the others.

    Seconds in which a rank waits for a core do not count, unless the ranks themselves keep all cores busy.
    passed: all seconds, by the wall clock.
    """

    until: float
    used: list[tuple[float, float]] = field(default_factory=list)  # by rank: seconds computed, waited for a core
    computed: float = 0.0
    passed: float = 0.0
    not_waited: float = 0.0  # reported by the system only after a wait, so too small during a long one

    def go_on(self, now: float, used: list[tuple[float, float]]) -> None:
        pairs = [*zip(self.used, used, strict=False)]  # none at first
        self.computed += sum(new[0] - old[0] for old, new in pairs) / (os.cpu_count() or 1)
        waited = max([0.0, *(new[1] - old[1] for old, new in pairs)])  # the waits of threads that end are lost
        self.not_waited += min(now - self.until - waited, _STILL)  # a late look: this process stalled, as ranks may
        self.passed += now - self.until
        self.until, self.used = now, used

    @property
    def seconds(self) -> float:
        return max(self.computed, self.not_waited)

    def is_over(self, limit: float) -> bool:
        return self.seconds >= limit or self.passed >= _AT_MOST * limit


def _used_by(pid: int) -> tuple[float, float]:
    """Seconds that a process has computed, and that its threads have waited for a core, if the system counts them.

    The seconds of threads that have ended count, too.
    """
    computed = waited = 0.0
    with contextlib.suppress(psutil.Error):  # the process has just ended
        computed = sum(psutil.Process(pid).cpu_times()[:2])
    with contextlib.suppress(OSError):
        waited = sum(int(file.read_text().split()[1]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
    return computed, waited


class RunMonitor:
    """One run on a pool: hand out the task, listen, and judge when it is over."""

    def __init__(self, pool: Pool, timeout: float, display: Display, interrupt: Interrupt) -> None:
        self.pool, self.timeout, self.display, self.interrupt = pool, timeout, display, interrupt
        self.outcomes: list[messages.RankOutcome | None] = [None] * pool.world_size
        self.exit_codes: list[int | None] = [None] * pool.world_size
        self.handled: dict[int, messages.Failure] = {}  # the last exception that has not yet left its rank's function
        self.printed: list[list[str]] = [[] for _ in range(pool.world_size)]
        self.began: float | None = None
        self.since_failure: _TimeTaken | None = None  # of the first failure
        self.moved = [_Moved()] * pool.world_size
        self.looked = 0.0  # when the whole board was last read

    def run(self, task: messages.Task) -> list[messages.RankOutcome]:
        """Run the task on every rank; raises a RunError as soon as it is clear that it cannot end well."""
        asked, message = time.perf_counter(), pickle.dumps((self.pool.world, task))
        for worker in self.pool.workers:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death is noticed below
                worker.line.send_bytes(message)
        self.taken = _TimeTaken(asked)
        judged = asked
        while None in self.outcomes:
            self._listen()
            if time.perf_counter() - judged >= _TICK:
                self._judge()
                self.display.refresh()
                judged = time.perf_counter()
        self._judge_result()
        for rank in range(self.pool.world_size):
            if text := self.pool.log(rank):
                self._print(rank, text)
        return [outcome for outcome in self.outcomes if outcome is not None]

    def _print(self, rank: int, text: str) -> None:
        self.printed[rank].append(text)
        self.display.show(rank, text)

    def _listen(self) -> None:
        workers = self.pool.workers
        awaited = [rank for rank, one in enumerate(self.outcomes) if one is None and self.exit_codes[rank] is None]
        whose = {end: rank for rank in awaited for end in (workers[rank].line, workers[rank].process.sentinel)}
        for rank in {whose[end] for end in connection.wait(whose, timeout=_TICK)}:
            has_ended = workers[rank].process.exitcode is not None
            self._drain(rank)  # the messages that it sent before
            if has_ended:
                self._note_death(rank)

    def _note_death(self, rank: int) -> None:
        if self.outcomes[rank] is None:
            self.exit_codes[rank] = self.pool.workers[rank].process.exitcode
            self._note_failure()

    def _drain(self, rank: int) -> None:
        line = self.pool.workers[rank].line
        with contextlib.suppress(EOFError, OSError):
            while self.outcomes[rank] is None and line.poll():
                self._take(rank, line.recv_bytes())

    def _take(self, rank: int, message: bytes) -> None:
        if message.startswith(messages.PRINTED):
            self._print(rank, message[1:].decode())
        elif message.startswith(messages.RAISED):
            self.handled[rank] = pickle.loads(message[1:])
        else:
            self.outcomes[rank] = outcome = pickle.loads(message[1:])
            if outcome.failure:
                self._note_failure()

    def _note_failure(self) -> None:
        self.since_failure = self.since_failure or _TimeTaken(time.perf_counter(), self.taken.used)

    # Judging

    def statuses(self) -> list[RankStatus]:
        ranks = range(self.pool.world_size)
        statuses = [status_of(self.pool.board, r, self.outcomes[r], self.exit_codes[r]) for r in ranks]
        for status in statuses:
            status.since = status.since or self.began or 0.0
        return statuses

    def _judge(self) -> None:
        now = time.perf_counter()
        used = [_used_by(worker.process.pid) for worker in self.pool.workers]
        for taken in filter(None, (self.taken, self.since_failure)):
            taken.go_on(now, used)
        if self.began is None and any(map(self.pool.board.has_begun, range(self.pool.world_size))):
            self.began, self.taken = now, _TimeTaken(now, used)
        if self.interrupt.has_come:
            self._raise_stop()
        if self.since_failure is not None:
            if self.since_failure.seconds >= self._grace():
                self._raise_failure()
        elif self.taken.is_over(self.timeout + _STARTUP * (self.began is None)):
            self._raise_timeout()
        elif None in self.outcomes:
            self._judge_stillness(now)

    def _grace(self) -> float:
        """The seconds to wait for the cause of a failure: the rank that caused it may have died unnoticed."""
        statuses = self.statuses()
        if any(self.pool.workers[status.rank].is_gone for status in statuses if not status.has_ended):
            return _GRACE_IF_GONE
        failed = [status for status in statuses if status.state in ("raised", "died")]
        return _GRACE_IF_CUT_OFF if all(map(endings.is_cut_off, failed)) else _GRACE

    def _judge_stillness(self, now: float) -> None:
        """Look closer, twice a second, while a rank has not moved for a while, and ask that rank for the next look."""
        for rank, moved in enumerate(self.moved):
            if (events := self.pool.board.events(rank)) != moved.events:
                self.moved[rank] = _Moved(events, now, self.taken.used[rank][0])
        resting = {rank: now - moved.at for rank, moved in enumerate(self.moved) if not self.outcomes[rank]}
        if now - self.looked < _STILL / 2 or max(resting.values()) < _STILL / 2:
            return
        self.looked = now
        still = [rank for rank, seconds in resting.items() if seconds >= _STILL]
        if still:
            statuses = self._matching()
            self._raise(explain_deadlock(self._settled(statuses), still), statuses)
        for rank, seconds in resting.items():
            if seconds >= _STILL / 2:
                self.pool.workers[rank].ask()

    def _settled(self, statuses: list[RankStatus]) -> list[RankStatus]:
        """Count ranks that sleep on a future as waiting: DistributedDataParallel waits there, out of sight."""
        for status in statuses:
            handed = [op for op in status.operations if op.handed_on and not op.ended]
            if handed and self.taken.used[status.rank][0] - self.moved[status.rank].computed >= _ASLEEP:
                status.may_act = True
            elif handed and status.state == "computing" and not status.may_act:
                status.state, handed[0].blocked = "waiting", handed[0].posted
        return statuses

    def _raise(self, error: errors.RunError | None, statuses: list[RankStatus]) -> None:
        """Raise an error, if there is one, with a report of what every rank was doing."""
        if error is not None:
            error = endings.behind(error, statuses, self.handled)
            error.report = make_report(statuses)
            error.histories = [status.operations for status in statuses]
            raise error

    def _matching(self) -> list[RankStatus]:
        """The status of every rank. Raises Mismatch if calls do not fit, since that explains any other error."""
        statuses = self.statuses()
        self._raise(mismatch.explain_mismatch([status.operations for status in statuses]), statuses)
        return statuses

    def _raise_failure(self) -> None:
        statuses = self._matching()
        for dead in [status for status in statuses if status.state == "died"]:
            endings.forgive_cut_off(statuses)
            dead.line = line_in(self.pool.log(dead.rank)) or dead.line
            self._raise(endings.explain_death(dead, self.pool.board.has_begun(dead.rank)), statuses)
        self._raise(endings.explain_failures(statuses), statuses)

    def _raise_timeout(self) -> None:
        self._look_closer(statuses := self._matching())
        self._raise(endings.explain_timeout(statuses, self.timeout), statuses)

    def _raise_stop(self) -> None:
        self._look_closer(statuses := self.statuses())
        self._raise(endings.explain_stop(statuses), statuses)

    def _look_closer(self, statuses: list[RankStatus]) -> None:
        """The statuses, with the lines that computing ranks are at."""
        lines = self.pool.stack_lines([status.rank for status in statuses if status.state == "computing"])
        for rank, line in lines.items():
            statuses[rank].line = line or statuses[rank].line

    def _judge_result(self) -> None:
        """Look for errors that stopped no rank, once all ranks have ended."""
        if self.since_failure is not None:
            self._raise_failure()
        outcomes = [outcome for outcome in self.outcomes if outcome is not None]
        histories = [outcome.operations for outcome in outcomes]
        unfinished = [outcome.unfinished for outcome in outcomes]
        error = mismatch.explain_mismatch(histories) or mismatch.explain_unfinished(histories, unfinished)
        if error := error or mismatch.explain_changed(histories):
            self._raise(error, self.statuses())  # comparing all histories takes longer than a short run

    def is_clean(self, may_keep_changes: bool) -> bool:
        """Whether the workers can be reused: all have returned, no message is unreceived, nothing is left behind."""
        outcomes = [outcome for outcome in self.outcomes if outcome is not None]
        is_left = [one.unfinished or not one.reusable or (one.has_changes and not may_keep_changes) for one in outcomes]
        is_whole = len(outcomes) == self.pool.world_size and not any(is_left)
        return is_whole and mismatch.all_matched([outcome.operations for outcome in outcomes])
