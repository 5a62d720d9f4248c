"""Operations of different ranks that belong together but do not fit.

gloo compares nothing: a wrong size aborts a process, and a wrong dtype turns numbers into garbage. The
histories of the ranks, laid side by side, show both. Two tensors of the same size that are swapped on one rank
are added to each other without a word, here too: nobody can see which of them a rank means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from course_lib.ranks.board import Operation
from course_lib.ranks.errors import Mismatch, RankFailed, describe_line, listing


def explain_mismatch(histories: list[list[Operation]]) -> Mismatch | None:
    """Explain the first pair of operations that do not fit; None if all fit."""
    for first, second in _pairs(histories):
        difference = _difference(first[1], second[1]) or _unequal_rows(first, second) or _unequal_rows(second, first)
        if difference:
            lines = [f"rank {rank}: {describe_line(op.line)}" for rank, op in (first, second) if op.line]
            advice = "\n".join([*lines, _advice(first[1], second[1])])
            return Mismatch(difference.format(a=first[0], b=second[0]), details=advice, calls=dict((first, second)))
    return None


_Call = tuple[int, Operation]  # a rank and what it called


def _pairs(histories: list[list[Operation]]) -> Iterator[tuple[_Call, _Call]]:
    """The pairs of operations on two ranks that belong together."""
    first: dict[tuple, _Call] = {}
    for rank, history in enumerate(histories):
        for op in history:
            if op.name != "recv_any_source":
                one = first.setdefault(op.meeting(rank), (rank, op))
                if one[1] is not op:
                    yield one, (rank, op)


def _difference(a: Operation, b: Operation) -> str:
    """The difference between two operations, a sentence with placeholders for the ranks; "" if they fit."""
    if a.is_message:
        send, other = ("{a}", "{b}") if a.is_send else ("{b}", "{a}")
        sent, received = (a, b) if a.is_send else (b, a)
        if (sent.elements, sent.dtype) == (received.elements, received.dtype):
            return ""
        return f"Rank {send} sends {_data(sent)} but rank {other} receives into {_data(received)}."
    if a.members != b.members:
        groups = [listing(op.member_ranks()) for op in (a, b)]
        return f"Rank {{a}} calls new_group for {groups[0]} while rank {{b}} calls it for {groups[1]}."
    if a.name != b.name:
        return f"Rank {{a}} is in {a.name} while rank {{b}} is in {b.name}: all ranks must call the same collective."
    if a.peer != b.peer:
        return f"Ranks {{a}} and {{b}} call {a.name} with different roots: {a.peer} and {b.peer}."
    if a.detail != b.detail and a.name != "all_to_all":
        return f"Ranks {{a}} and {{b}} call {a.name} with different operations: {a.detail} and {b.detail}."
    if a.dtype == b.dtype and (a.elements == b.elements or a.name == "all_to_all"):
        return ""
    return f"Ranks {{a}} and {{b}} call {a.name} with different tensors: {_data(a)} and {_data(b)}."


def _unequal_rows(giver: _Call, taker: _Call) -> str:
    """The rows that a rank gives another in an all_to_all_single, if the other rank expects another number of rows."""
    (rank, gives), (other, takes) = giver, taker
    if gives.name != "all_to_all" or not (gives.detail and takes.detail):
        return ""
    ranks = gives.member_ranks()
    given = gives.detail.partition(">")[2].split(",")[ranks.index(other)]
    taken = takes.detail.partition(">")[0].split(",")[ranks.index(rank)]
    return "" if given == taken else f"Rank {rank} gives rank {other} {given} rows, which takes {taken} of them."


def _advice(a: Operation, b: Operation) -> str:
    if a.members != b.members:
        return "All ranks call new_group for all groups in the same order, also those that are not in a group."
    if not a.is_message:
        return "What all ranks call together has to be the same on all of them."
    if a.dtype != b.dtype:
        return "A tensor to receive into needs the dtype of what arrives; torch.empty makes float32."
    return "Which of the two has the right size for what should travel here?"


def _data(op: Operation) -> str:
    return f"{op.shape or 'a single number'} {op.dtype}"


def explain_unfinished(histories: list[list[Operation]], unfinished: list[list[int]]) -> RankFailed | None:
    """The first operation that nobody waited for."""
    for rank, numbers in enumerate(unfinished):
        for op in histories[rank]:
            if op.number in numbers:
                to = f" {'to' if op.is_send else 'from'} rank {op.peer}" if op.is_message and op.peer >= 0 else ""
                text = f"Rank {rank} began {op.name}{to} and returned without waiting for it."
                advice = "Keep the handle that it returns and call its wait(), before anything uses the tensor."
                return RankFailed(text, rank, details=f"{describe_line(op.line)}\n{advice}")
    return None


def explain_changed(histories: list[list[Operation]]) -> RankFailed | None:
    """The first message whose tensor was changed before its receive had begun: gloo sends what is there by then."""
    for pair in _pairs(histories):
        for (rank, sent), (other, received) in (pair, pair[::-1]):
            if 0 < sent.changed < received.posted:
                text = f"Rank {rank} changed the tensor that it was sending to rank {other}, which got what it is now."
                advice = "Change it after wait() on the handle, or send a copy: isend(tensor.clone(), ...)."
                return RankFailed(text, rank, details=f"{describe_line(sent.line)}\n{advice}")
    return None


def all_matched(histories: list[list[Operation]]) -> bool:
    """Whether every message was received and every collective was called by all its members."""
    came: Counter[tuple] = Counter()
    for rank, history in enumerate(histories):
        for op in history:
            came[op.meeting(rank), 2 if op.is_message else op.members.bit_count()] += 1
    return all(count == expected for (_, expected), count in came.items())
