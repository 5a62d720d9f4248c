"""The timeline of a run, from what the ranks noted: when a blocked rank waited, and when data moved.

    rank 0   send posted ......|=========|        wait until the receive was posted, then transfer
    rank 1   computing         recv posted =====|                      only transfer

A collective is the same with more ranks: until the last of them has arrived, it waits. On the real clock that is found
out afterwards, from what all ranks noted; an emulated clock needs it to go on, so it notes it (`Moments`).
"""

from __future__ import annotations

from collections import defaultdict

from course_lib.ranks.board import Moments, Operation
from course_lib.ranks.messages import RankOutcome
from course_lib.timeline import COMPUTE_KINDS, Span, Timeline


def make_timeline(outcomes: list[RankOutcome], is_emulated: bool) -> Timeline:
    """All spans of a run; time zero is when the first rank began."""
    zero = 0.0 if is_emulated else min(outcome.started for outcome in outcomes)
    came: dict[tuple, dict[int, float]] = defaultdict(dict)  # when each rank began its part of an operation
    for rank, outcome in enumerate(outcomes):
        for op in outcome.operations:
            came[op.meeting(rank)][rank] = op.posted
    spans = []
    for rank, outcome in enumerate(outcomes):
        spans += [mark._replace(start=mark.start - zero, end=mark.end - zero) for mark in outcome.marks]
        for op in outcome.operations:
            if op.ended and op.name != "new_group":
                moments = op.emulated or _measured(rank, op, came[op.meeting(rank)])
                spans += _operation_spans(rank, op, moments, zero)
    untimed = set().union(*(outcome.untimed for outcome in outcomes))
    origin = "emulated" if is_emulated else "measured"
    return Timeline(spans, len(outcomes), origin, tuple(kind for kind in COMPUTE_KINDS if kind in untimed))


def _measured(rank: int, op: Operation, came: dict[int, float]) -> Moments:
    """Moments of an operation: data can move when the ranks that it depends on have come: all, the root, none."""
    if op.name in ("broadcast", "scatter"):
        came = {rank: op.posted, op.peer: came.get(op.peer, 0.0)}
    elif op.name in ("reduce", "gather") and rank != op.peer:
        came = {rank: op.posted}
    return Moments(op.posted, max(came.values()), op.blocked or op.ended, op.ended)


def _operation_spans(rank: int, op: Operation, moments: Moments, zero: float) -> list[Span]:
    peer = op.peer if op.is_message else None
    _, moving, blocked, ended = moments
    assert blocked is not None
    pieces = [
        ("wait", blocked, min(moving, ended), False),
        ("transfer", moving, min(blocked, ended), True),
        ("transfer", max(blocked, min(moving, ended)), ended, False),
    ]
    spans, n_bytes = [], op.sent
    for kind, start, end, background in pieces:
        if end > start:
            carried = n_bytes if kind == "transfer" else 0
            n_bytes -= carried
            span = Span(rank, kind, op.name, start - zero, end - zero, bytes=carried, peer=peer, background=background)
            spans.append(span)
    if n_bytes or not spans:  # it ended before it was waited for, and still sent its bytes
        at = ended - zero
        spans.append(Span(rank, "transfer", op.name, at, at, bytes=n_bytes, peer=peer, background=True))
    return spans
