"""The diagnosis of a deadlock: one plain sentence about who waits for whom, and why, from the board.

A blocked rank waits for the ranks that have not begun their side of its operation. It is stuck if none of its threads
can go on, and each operation that would let one go on waits for a rank that is stuck or has ended. Where the arrows

    rank 0  --waits to receive from-->  rank 1  --waits to receive from-->  rank 0

form a cycle, the cycle is the error; otherwise the error is that the rank at their end has ended. Only a receive from
any source can still end as long as one other rank can go on.
"""

from __future__ import annotations

import graphlib

from course_lib.ranks.board import Operation, belong
from course_lib.ranks.diagnosis.status import RankStatus
from course_lib.ranks.errors import Deadlock, describe_line, listing, sentence


def missing(op: Operation, rank: int, statuses: list[RankStatus]) -> list[int]:
    """The ranks that an operation of a rank waits for: those that have not begun their side."""
    others = [op.peer] if op.is_message and op.peer >= 0 else [one for one in op.member_ranks() if one != rank]
    if op.name == "recv_any_source":
        return [] if any(_unreceived(op, statuses[rank], statuses[other]) for other in others) else others
    return [one for one in others if not any(belong(op, rank, theirs, one) for theirs in statuses[one].operations)]


def _unreceived(op: Operation, status: RankStatus, other: RankStatus) -> bool:
    """Whether another rank sends a message that `op` can receive: a send may end before its receive does."""
    sends = [o for o in other.operations if o.is_send and belong(op, status.rank, o, other.rank)]
    received = {mine.meeting(status.rank) for mine in status.operations}
    return any(not o.ended or (o.ended > op.posted and o.meeting(other.rank) not in received) for o in sends)


def explain_deadlock(statuses: list[RankStatus], still: list[int]) -> Deadlock | None:
    """Explain why some rank can never move again; None if every rank still might.

    still: the ranks that have not moved for a while; only these can be in a deadlock.
    """
    stuck = _find_stuck(statuses, still)
    waits = {rank: missing(op, rank, statuses) for rank, op in stuck.items()}
    certain = {rank: others for rank, others in waits.items() if stuck[rank].name != "recv_any_source"}
    ended = {status.rank for status in statuses if status.has_ended}
    for known in (certain, waits):
        if cycle := _find_cycle(known):
            return _explain_cycle({rank: stuck[rank] for rank in cycle}, statuses)
        for rank in sorted(known):
            if gone := [one for one in known[rank] if one in ended]:
                return _explain_absence(rank, stuck[rank], gone, statuses)
    return None


def _find_stuck(statuses: list[RankStatus], still: list[int]) -> dict[int, Operation]:
    """The ranks that cannot go on, whatever the other ranks do, each with an operation in which it is blocked."""
    idle = [status for status in statuses if status.rank in still and not (status.may_act or status.has_ended)]
    stuck = {status.rank: status.blocked_in for status in idle if status.blocked_in is not None}
    while True:
        free = {status.rank for status in statuses if not status.has_ended and status.rank not in stuck}
        freed = [rank for rank in stuck if any(_may_end(op, rank, statuses, free) for op in statuses[rank].pending)]
        if not freed:
            return stuck
        for rank in freed:
            del stuck[rank]


def _may_end(op: Operation, rank: int, statuses: list[RankStatus], free: set[int]) -> bool:
    """Whether an operation may end while these ranks are free to go on."""
    others = missing(op, rank, statuses)
    if op.name == "recv_any_source":
        return not others or not free.isdisjoint(others)
    return free.issuperset(others)


def _explain_cycle(calls: dict[int, Operation], statuses: list[RankStatus]) -> Deadlock:
    """Explain a cycle: each rank waits in its call for the next rank, and the last one for the first."""
    cycle = list(calls)
    phrases = [_wait_phrase(rank, calls[rank], other) for rank, other in zip(cycle, cycle[1:] + cycle[:1], strict=True)]
    advice = _cycle_advice(calls, statuses)
    if len({op.group for op in calls.values()}) > 1:
        groups = [op.member_ranks() for op in calls.values()]
        named = ["all ranks" if len(ranks) == len(statuses) else listing(ranks) for ranks in groups]
        phrases = [f"{phrase} (in the group of {group})" for phrase, group in zip(phrases, named, strict=True)]
        advice = "Only calls in the same group meet: compare what is given as group=, and the order of the calls."
    return Deadlock(f"Nobody can move: {', '.join(phrases)}.", details=advice, calls=calls)


def _find_cycle(waits: dict[int, list[int]]) -> list[int]:
    """The ranks of a cycle, each waiting for the next, lowest first; empty if there is no cycle."""
    try:
        graphlib.TopologicalSorter(waits).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1][:0:-1]  # each waited for the one before it
        lowest = circle.index(min(circle))
        return circle[lowest:] + circle[:lowest]
    return []


def _wait_phrase(rank: int, op: Operation, other: int) -> str:
    if not op.is_message:
        return f"{rank} waits in {op.name} for {other}"
    if op.peer < 0:
        return f"{rank} waits to receive from any rank"
    return f"{rank} waits to {'send to' if op.is_send else 'receive from'} {other}"


def _cycle_advice(calls: dict[int, Operation], statuses: list[RankStatus]) -> str:
    if all(op.is_send for op in calls.values()):
        return "A send ends when its receive has begun: somebody must receive first, or use isend and wait later."
    if reasons := list(filter(None, (_what_came_instead(rank, op, statuses) for rank, op in calls.items()))):
        return reasons[0]
    if all(op.is_message and not op.is_send for op in calls.values()):
        for rank, op in ((one.rank, op) for one in statuses for op in one.operations if op.is_send):
            if not any(belong(op, rank, theirs, op.peer) for theirs in statuses[op.peer].operations):
                text = f"Rank {rank} has sent rank {op.peer} a message that it does not receive."
                return f"{text} Is it for another rank, or should rank {op.peer} receive from rank {rank}?"
        return "Everybody waits for a message that nobody has sent yet, so somebody must send first."
    return "Each waits for the other to come to the same operation. Bring their calls into the same order."


def _what_came_instead(rank: int, op: Operation, statuses: list[RankStatus]) -> str:
    """A sentence about what the other rank sent instead: another tag, or fewer messages; "" if it sent nothing."""
    if not op.is_message or op.is_send or op.peer < 0:
        return ""
    sent = [o for o in statuses[op.peer].operations if o.is_send and (o.peer, o.group) == (rank, op.group)]
    for other in sent:
        if other.tag != op.tag and not any(belong(other, op.peer, mine, rank) for mine in statuses[rank].operations):
            return f"Rank {op.peer} sends with tag {other.tag}, and rank {rank} waits for tag {op.tag}."
    count = sum(o.tag == op.tag for o in sent)
    text = f"Rank {rank} waits for message {op.order + 1} of rank {op.peer}, which has sent {count}: compare rounds."
    return text if count else ""


def _explain_absence(rank: int, op: Operation, gone: list[int], statuses: list[RankStatus]) -> Deadlock:
    """Explain why a rank waits for ever: the ranks that it waits for have ended."""
    where = describe_line(op.line)
    call = f"The call that waits: {where}." if where else ""
    if op.name == "recv_any_source":
        have = f"{listing(gone)} {'has' if len(gone) == 1 else 'have'}"
        text = f"Rank {rank} waits to receive from any rank, but {have} already returned, and no message is left."
        advice = "Each receive needs a send: compare how many there are."
        return Deadlock(text, details=f"{advice}\n{call}", calls={rank: op})
    if op.is_message:
        who, what = f"rank {rank} waits to {'send to' if op.is_send else 'receive from'} rank {gone[0]}", "its part"
    else:
        blocked = {status.rank: status.blocked_in for status in statuses if status.blocked_in}
        together = [one for one, theirs in blocked.items() if theirs.meeting(one) == op.meeting(rank)]
        who = f"{listing(together)} wait{'s' if len(together) == 1 else ''} in {op.name}"
        what = f"that {op.name}"
    text = f"{sentence(who)}, but rank {gone[0]} has already returned without {what}."
    advice = "\n".join(filter(None, [_what_came_instead(rank, op, statuses), call]))
    return Deadlock(text, gone[0], details=advice, calls={rank: op})
