"""The status of a rank as its parent knows it: from the board, from its messages, from the end of its process."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field, replace

from course_lib.ranks.board import Board, Operation
from course_lib.ranks.errors import Report, ReportRow, describe_line
from course_lib.ranks.library_code import is_library
from course_lib.ranks.messages import Failure, RankOutcome


@dataclass
class RankStatus:
    """The status of one rank at some moment, as its parent knows it."""

    rank: int
    state: str  # "starting" "computing" "waiting" "returned" "raised" "died"
    operations: list[Operation] = field(default_factory=list)
    outcome: RankOutcome | None = None
    exit_code: int | None = None
    line: str = ""
    since: float = 0.0
    may_act: bool = True  # one of its threads might go on without another rank

    @property
    def pending(self) -> list[Operation]:
        """The operations whose end would let the rank go on."""
        return [op for op in self.operations if op.is_blocked or (op.handed_on and not op.ended)]

    @property
    def blocked_in(self) -> Operation | None:
        return next((op for op in reversed(self.operations) if op.is_blocked), None)

    @property
    def has_ended(self) -> bool:
        return self.state in ("returned", "raised", "died")

    @property
    def failure(self) -> Failure | None:
        return self.outcome.failure if self.outcome else None


def status_of(board: Board, rank: int, outcome: RankOutcome | None, exit_code: int | None) -> RankStatus:
    """The status of a rank now."""
    may_act = board.may_act(rank)  # read first: whatever the rank does afterwards shows in its operations
    status = RankStatus(rank, "computing", board.operations(rank), outcome, exit_code, may_act=may_act)
    if outcome is not None:
        status.state = "raised" if outcome.failure else "returned"
        status.since = outcome.ended
        status.line = outcome.failure.line if outcome.failure else ""
    elif exit_code is not None:
        status.state = "died"
    elif not board.has_begun(rank):
        status.state = "starting"
    elif status.blocked_in is not None:
        status.state = "waiting"
    if status.operations and not status.line:
        last = status.blocked_in or status.operations[-1]
        status.line, status.since = last.line, status.since or last.ended or last.posted
    return status


def make_report(statuses: list[RankStatus]) -> Report:
    return Report(tuple(_row(status, time.perf_counter()) for status in statuses))


def _row(status: RankStatus, now: float) -> ReportRow:
    op = status.blocked_in or (status.operations[-1] if status.state == "died" and status.operations else None)
    since = op.posted if op else status.since or now
    row = ReportRow(status.rank, status.state, seconds=max(0.0, now - since), line=describe_line(status.line))
    if op is None:
        return row
    peer = str(op.peer) if op.peer >= 0 else "any" if op.is_message else "all"
    return replace(row, operation=op.name, peer=peer, shape=f"{op.shape} {op.dtype}".strip())


def line_in(stacks: str) -> str:
    """The student's innermost line in the stacks that faulthandler wrote, as `file:number`."""
    for stack in reversed(stacks.split("(most recent call first):")):
        inner, found, _ = stack.partition(" in run_student")
        if found:
            places = re.findall(r'File "(.+)", line (\d+)', inner)
            return next((f"{filename}:{line}" for filename, line in places if not is_library(filename)), "")
    return ""
