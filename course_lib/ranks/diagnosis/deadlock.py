"""Who waits for whom, and why: from the board to one plain sentence.

A rank that is blocked waits for the ranks that have not begun their side of its operation. If every
rank that is left waits for such a rank, nobody will ever move. Where the arrows

    rank 0  --waits to receive from-->  rank 1  --waits to receive from-->  rank 0

close a circle, the circle is the culprit; otherwise it is the rank where they end.
"""

from __future__ import annotations

import graphlib

from course_lib.ranks.board import Operation, belong
from course_lib.ranks.diagnosis.status import RankStatus
from course_lib.ranks.errors import Deadlock, describe_line, listing, sentence


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


def explain_deadlock(statuses: list[RankStatus], still: list[int]) -> Deadlock | None:
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
        return Deadlock(f"Nobody can move: {text}.", details=advice)
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


def _explain_absence(statuses: list[RankStatus], absent: dict[int, list[int]]) -> Deadlock:
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
    return Deadlock(text, gone, details="\n".join(filter(None, advice)))


def _same_call(op: Operation | None, other: Operation) -> bool:
    return op is not None and (op.name, op.group, op.order) == (other.name, other.group, other.order)
