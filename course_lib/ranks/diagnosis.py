"""Who waits for whom, and why: from the board to one plain sentence.

A rank that is blocked waits for the ranks that have not begun their side of its operation. If every
rank that is left waits for such a rank, nobody will ever move. Where the arrows

    rank 0  --waits to receive from-->  rank 1  --waits to receive from-->  rank 0

close a circle, the circle is the culprit; otherwise it is the rank where they end.
"""

from __future__ import annotations

import graphlib
import re
import signal
import time
from dataclasses import dataclass, field, replace

from course_lib.ranks import errors
from course_lib.ranks.board import Board, Operation, belong
from course_lib.ranks.errors import Report, Row, describe_line, listing, sentence
from course_lib.ranks.messages import Failure, Outcome
from course_lib.ranks.places import is_library


@dataclass
class RankStatus:
    """What the parent knows about one rank at some moment."""

    rank: int
    state: str  # "starting" "computing" "waiting" "returned" "raised" "died"
    operations: list[Operation] = field(default_factory=list)
    outcome: Outcome | None = None
    exit_code: int | None = None
    line: str = ""
    since: float = 0.0

    @property
    def blocked_in(self) -> Operation | None:
        return next((op for op in reversed(self.operations) if op.is_blocked), None)

    @property
    def has_ended(self) -> bool:
        return self.state in ("returned", "raised", "died")

    @property
    def failure(self) -> Failure | None:
        return self.outcome.failure if self.outcome else None


def look(board: Board, rank: int, outcome: Outcome | None, exit_code: int | None) -> RankStatus:
    """A rank as it is now."""
    status = RankStatus(rank, "computing", board.operations(rank), outcome, exit_code)
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


def _row(status: RankStatus, now: float) -> Row:
    op = status.blocked_in or (status.operations[-1] if status.state == "died" and status.operations else None)
    row = Row(status.rank, status.state, line=describe_line(status.line))
    if status.since:
        row = replace(row, seconds=max(0.0, now - status.since))
    if op is None:
        return row
    peer = str(op.peer) if op.peer >= 0 else "any" if op.is_message else "all"
    return replace(row, operation=op.name, peer=peer, shape=f"{op.shape} {op.dtype}".strip(), seconds=now - op.posted)


# Deadlock


def missing(status: RankStatus, statuses: list[RankStatus]) -> list[int]:
    """The ranks that a blocked rank waits for: those that have not begun their side."""
    op = status.blocked_in
    if op is None:
        return []
    if op.name == "recv_any_source":
        senders = [other.rank for other in statuses if _unreceived(op, status, other)]
        return [] if senders else [other.rank for other in statuses if other.rank != status.rank]
    partners = [op.peer] if op.is_message else [rank for rank in op.member_ranks() if rank != status.rank]
    return [rank for rank in partners if not any(belong(op, status.rank, o, rank) for o in statuses[rank].operations)]


def _unreceived(op: Operation, status: RankStatus, other: RankStatus) -> bool:
    """Whether the other one sends something that `op` can take: its send may have ended before the receive does."""
    sends = [o for o in other.operations if o.is_send and belong(op, status.rank, o, other.rank)]
    received = {mine.meeting(status.rank) for mine in status.operations}
    return any(not o.ended or (o.ended > op.posted and o.meeting(other.rank) not in received) for o in sends)


def explain_deadlock(statuses: list[RankStatus], still: list[int]) -> errors.Deadlock | None:
    """Why some rank can never move again; None if all still might.

    still: the ranks that have not moved for a while; only of these is a deadlock believed.
    """
    waits = {one.rank: others for one in statuses if one.rank in still and (others := missing(one, statuses))}
    ended = {status.rank for status in statuses if status.has_ended}
    certain = {rank: others for rank, others in waits.items() if not _takes_anybody(statuses[rank])}
    if len(waits) == len(statuses) - len(ended):
        certain = waits  # even who would take a message from anybody will get none
    cycle = _find_cycle(certain)
    if cycle:
        text = ", ".join(_wait_phrase(statuses[a], b) for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True))
        advice = _cycle_advice([statuses[rank] for rank in cycle], statuses)
        return errors.Deadlock(f"Nobody can move: {text}.", details=advice)
    absent = {rank: gone for rank, others in certain.items() if (gone := [one for one in others if one in ended])}
    return _explain_absence(statuses, absent) if absent else None


def _takes_anybody(status: RankStatus) -> bool:
    return status.blocked_in is not None and status.blocked_in.name == "recv_any_source"


def _find_cycle(waits: dict[int, list[int]]) -> list[int]:
    """Ranks that wait for each other in a circle, lowest first; empty if there is none."""
    try:
        graphlib.TopologicalSorter(waits).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1][:0:-1]  # in which each waited for the one before it
        lowest = circle.index(min(circle))
        return circle[lowest:] + circle[:lowest]
    return []


def _wait_phrase(status: RankStatus, other: int) -> str:
    op = status.blocked_in
    assert op is not None
    if not op.is_message:
        return f"{status.rank} waits in {op.name} for {other}"
    return f"{status.rank} waits to {'send to' if op.is_send else 'receive from'} {other}"


def _cycle_advice(cycle: list[RankStatus], statuses: list[RankStatus]) -> str:
    blocked = [status.blocked_in for status in cycle if status.blocked_in]
    if all(op.is_send for op in blocked):
        return "A send ends when its receive has begun: somebody must receive first, or use isend and wait later."
    if reasons := list(filter(None, (_what_came_instead(status, statuses) for status in cycle))):
        return reasons[0]
    if all(op.is_message and not op.is_send for op in blocked):
        return "Everybody waits for a message that nobody has sent yet, so somebody must send first."
    return "Each waits for the other to come to the same operation. Bring their calls into the same order."


def _what_came_instead(status: RankStatus, statuses: list[RankStatus]) -> str:
    """What a rank that waits to receive was sent by the other one: another tag, or fewer messages; "" if nothing."""
    op = status.blocked_in
    if op is None or not op.is_message or op.is_send or op.peer < 0:
        return ""
    sent = [o for o in statuses[op.peer].operations if o.is_send and (o.peer, o.group) == (status.rank, op.group)]
    for other in sent:
        if other.tag != op.tag and not any(belong(other, op.peer, mine, status.rank) for mine in status.operations):
            return f"Rank {op.peer} sends with tag {other.tag}, and rank {status.rank} waits for tag {op.tag}."
    count = sum(o.tag == op.tag for o in sent)
    if not count:
        return ""
    text = f"Rank {status.rank} waits for message {op.order + 1} of rank {op.peer}, which has sent {count}"
    return f"{text}: compare rounds."


def _explain_absence(statuses: list[RankStatus], absent: dict[int, list[int]]) -> errors.Deadlock:
    """Somebody waits for a rank that has ended and will never come."""
    waiting = min(absent)
    gone = absent[waiting][0]
    op = statuses[waiting].blocked_in
    assert op is not None
    if op.is_message:
        who, what = f"rank {waiting} waits to {'send to' if op.is_send else 'receive from'} rank {gone}", "its part"
    else:
        together = [status.rank for status in statuses if _same_call(status.blocked_in, op)]
        who = f"{listing(together)} wait{'s' if len(together) == 1 else ''} in {op.name}"
        what = f"that {op.name}"
    text = f"{sentence(who)}, but rank {gone} has already returned without {what}."
    where = describe_line(op.line)
    advice = [_what_came_instead(statuses[waiting], statuses), f"The call that waits: {where}." if where else ""]
    return errors.Deadlock(text, gone, details="\n".join(filter(None, advice)))


def _same_call(op: Operation | None, other: Operation) -> bool:
    return op is not None and (op.name, op.group, op.order) == (other.name, other.group, other.order)


# Failures, deaths, time


def explain_failures(statuses: list[RankStatus]) -> errors.RunError:
    """What ranks raised, or returned although it cannot be sent; the first of them counts."""
    by_time = sorted(statuses, key=lambda status: status.since)
    failed = [(status.rank, status.failure) for status in by_time if status.failure]
    rank, first = failed[0]
    text = _failure_sentence(rank, first)
    others = [f"rank {rank} {_raised(failure)}" for rank, failure in failed if failure.message != first.message]
    if not others and len(failed) == len(statuses) > 1:
        text = text.replace(f"Rank {rank}", "Every rank", 1)
    if others:
        text += f" Also: {'; '.join(others).rstrip('.')}."
    waiting = [status.rank for status in statuses if status.state == "waiting"]
    if waiting:
        text += f" {sentence(listing(waiting))} waited for it."
    kind = errors.RankDied if first.kind == "exited" else errors.RankFailed
    error = kind(text, rank, details=first.traceback)
    error.__cause__ = first.original
    return error


def _raised(failure: Failure) -> str:
    first_line = failure.message.strip().partition("\n")[0][:300]
    if failure.kind == "exited":
        return f"called sys.exit({failure.message})"
    return f"raised {failure.type}: {first_line}" if first_line else f"raised {failure.type}"


def _failure_sentence(rank: int, failure: Failure) -> str:
    if failure.kind == "result":
        return f"Rank {rank} returned a {failure.type} {failure.message}."
    if failure.kind == "arrival":
        return f"Rank {rank} could not rebuild the function or its args, which {_raised(failure)} there."
    if failure.kind == "leftover":
        return f"Rank {rank} returned but left {failure.type} behind; {failure.message}."
    where = describe_line(failure.line)
    return f"Rank {rank} {_raised(failure)}{f' ({where})' if where else ''}."


def is_cut_off(status: RankStatus) -> bool:
    """Whether a rank failed in the middle of an operation, or at one that the end of another rank made impossible."""
    refused = status.failure is not None and "by peer" in status.failure.message  # closed or reset
    return status.state == "raised" and (status.blocked_in is not None or refused)


def forgive_cut_off(statuses: list[RankStatus]) -> None:
    """A rank whose operation failed because another rank died was waiting; the failure is not its own."""
    for status in statuses:
        if status.state == "raised" and status.blocked_in is not None:
            status.state = "waiting"


def explain_death(status: RankStatus) -> errors.RankDied:
    """Why a rank's process ended, as far as its exit code tells."""
    code = status.exit_code or 0
    where = describe_line(status.line)
    last = f" The last line it reached in a process group call: {where}." if where else ""
    if code >= 0:
        text = f"Rank {status.rank} ended its process with exit code {code} in the middle of the run.{last}"
        return errors.RankDied(text, status.rank)
    reasons = {  # by name, as not every system has each
        "SIGKILL": "was killed (SIGKILL), by somebody or because memory ran out",
        "SIGSEGV": "crashed with a segmentation fault: compiled code touched memory that is not its own",
        "SIGABRT": "was aborted by compiled code (SIGABRT)",
        "SIGTERM": "was asked to end (SIGTERM)",
    }
    why = reasons.get(signal.Signals(-code).name, f"was ended by signal {-code}")
    return errors.RankDied(f"Rank {status.rank} {why}.{last}", status.rank)


def explain_timeout(statuses: list[RankStatus], timeout: float) -> errors.RankTimeout:
    """Who has not returned when the time is over."""
    busy = [status for status in statuses if status.state in ("computing", "starting")]
    waiting = [status.rank for status in statuses if status.state == "waiting"]
    if busy:
        where = describe_line(busy[0].line)
        text = f"{listing([status.rank for status in busy])} had not returned" + (f" ({where})" if where else "")
        text += f", and {listing(waiting)} waited" if waiting else ""
    else:
        text = f"{listing(waiting)} had not finished an operation on all sides"
    advice = "If it is right but slow, give launch a longer timeout."
    rank = busy[0].rank if busy else None
    return errors.RankTimeout(f"Time limit: after {timeout:g} s {text}.", rank, details=advice)


def explain_stop(statuses: list[RankStatus]) -> errors.Stopped:
    """Who was doing what when the run was stopped."""
    doing = {"computing": "computed", "waiting": "waited"}
    ranks = {state: [status.rank for status in statuses if status.state == state] for state in doing}
    parts = [f"{listing(ranks[state])} {did}" for state, did in doing.items() if ranks[state]]
    text = f"Stopped. At that moment {' and '.join(parts) or 'the ranks were starting'}."
    return errors.Stopped(text, details="The next launch starts fresh.")


def line_in(stacks: str) -> str:
    """The student's innermost line in the stacks that faulthandler wrote, as `file:number`."""
    for stack in reversed(stacks.split("(most recent call first):")):
        inner, found, _ = stack.partition(" in run_student")
        if found:
            places = re.findall(r'File "(.+)", line (\d+)', inner)
            return next((f"{filename}:{line}" for filename, line in places if not is_library(filename)), "")
    return ""
