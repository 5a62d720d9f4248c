"""Play a pipeline schedule on a clock, without any process.

A `Schedule` lists what every rank does, in order. When it does it follows from three rules:

    a rank does one thing at a time, in the order of its list;
    F of a stage needs F of the stage before it, B (or I) needs B (or I) of the stage after it;
    what comes from another rank is there `transfer` seconds after it was computed.

    rank 0   F0 F1 .. .. B0 .. B1         F1 of rank 1 starts when rank 0 has finished F1 and it has arrived
    rank 1      F0 B0 F1 B1               and rank 1 has finished what stands before it

Nothing is searched or guessed, so the same schedule and the same costs give the same times to the last bit.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from course_lib.schedules import Schedule, validate
from course_lib.timeline import Span, Timeline

KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight_grad"}
Seconds: TypeAlias = "float | Sequence[float]"
_NOT_YET = -1.0
# What all micro-batches of one operation on one stage have in common: kind, seconds, needs, lag, peer and gives.
# `needs` and `gives` + micro-batch are the places, in one long list of times, of its input and of its result.
_StageOperation: TypeAlias = "tuple[str, float, int, float, int | None, int]"


def simulate(
    schedule: Schedule, forward: Seconds, backward: Seconds, weight_grad: Seconds = 0, transfer: Seconds = 0
) -> Timeline:
    """Simulate a schedule: when every rank does what, with these costs.

    forward, backward, weight_grad: seconds of F, I and W, one number or one for each stage; B, the whole backward,
        takes backward + weight_grad.
    transfer: seconds from the end of a computation to its result's arrival on another rank; one for each stage means
        the link from it to the next, both ways. A device computes while its results travel.

    Like a measured timeline it has spans where a rank is held up: "wait" until the other rank has finished, then
    "transfer" until the data are there.

    Raises ValueError for a wrong number of seconds or a negative one, and ScheduleError for a schedule that gets stuck.
    """
    given = {"forward": forward, "backward": backward, "weight_grad": weight_grad, "transfer": transfer}
    costs = {name: _per_stage(name, seconds, schedule.n_stages) for name, seconds in given.items()}
    with no_collection():
        spans = _play(schedule, _steps(schedule, costs))
    return Timeline(spans, schedule.n_ranks, "modelled")


# Of a process that was forked they are many: counting them takes 0.2 s there.
_count_frozen = functools.cache(gc.get_freeze_count)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pause garbage collection, which would search a growing list again and again for cycles that cannot be in it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not _count_frozen():  # what was made grows old at once: each younger generation would search it
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _per_stage(name: str, seconds: Seconds, n_stages: int) -> list[float]:
    each = [float(seconds)] * n_stages if isinstance(seconds, (int, float)) else [float(value) for value in seconds]
    if len(each) != n_stages:
        raise ValueError(f"{name} has {len(each)} values for {n_stages} stages; give one number or one for each stage")
    if min(each, default=0) < 0:
        raise ValueError(f"{name}={min(each)} is a negative time; give seconds of 0 or more")
    return each


def _steps(schedule: Schedule, costs: dict[str, list[float]]) -> dict[str, dict[int, _StageOperation]]:
    """For every operation and stage: its cost, what it waits for, and who waits for it.

    The list of times has a row of micro-batches for each stage's F, then for each stage's B or I; then one of zeros,
    for what needs nothing, and one that nobody reads.
    """
    n_stages, m, home = schedule.n_stages, schedule.n_micro_batches, schedule.rank_of
    nothing, nobody = 2 * n_stages * m, (2 * n_stages + 1) * m
    whole = [i + w for i, w in zip(costs["backward"], costs["weight_grad"], strict=True)]
    seconds = {"F": costs["forward"], "B": whole, "I": costs["backward"], "W": costs["weight_grad"]}
    steps: dict[str, dict[int, _StageOperation]] = {op: {} for op in KINDS}
    for op, kind in KINDS.items():
        for stage, rank in home.items():
            forward, backward, source = stage * m, (n_stages + stage) * m, stage
            needs, gives = backward, nobody
            if op == "F":
                source, gives = max(stage - 1, 0), forward
                needs = forward - m if stage else nothing
            elif op != "W":
                source, gives = min(stage + 1, n_stages - 1), backward
                needs = backward + m if stage < n_stages - 1 else forward
            peer = home[source] if home.get(source, rank) != rank else None
            lag = 0.0 if peer is None else costs["transfer"][min(stage, source)]
            steps[op][stage] = kind, seconds[op][stage], needs, lag, peer, gives
    return steps


def _play(schedule: Schedule, steps: dict[str, dict[int, _StageOperation]]) -> list[Span]:
    """Run each rank until it needs an input that is not there yet, and call it again once it is."""
    times = [_NOT_YET] * (2 * schedule.n_stages * schedule.n_micro_batches) + [0.0] * (2 * schedule.n_micro_batches)
    free, position = [0.0] * schedule.n_ranks, [0] * schedule.n_ranks
    waiting: dict[int, int] = {}
    runnable = list(range(schedule.n_ranks))
    spans: list[Span] = []
    # Millions of spans are made here, so there is one long loop, and Span(...) without its function call.
    add, new = spans.append, tuple.__new__
    while runnable:
        rank = runnable.pop()
        now, actions = free[rank], schedule.actions[rank]
        for index in range(position[rank], len(actions)):
            op, stage, micro_batch = actions[index]
            kind, seconds, needs, lag, peer, gives = steps[op][stage]
            needs += micro_batch
            sent = times[needs]
            if sent > now:
                add(new(Span, (rank, "wait", "recv", now, sent, None, None, 0, peer, False, None)))
                now = sent
            elif sent < 0:
                waiting[needs], position[rank] = rank, index
                break
            if lag and sent + lag > now:
                add(new(Span, (rank, "transfer", "recv", now, sent + lag, None, None, 0, peer, False, None)))
                now = sent + lag
            end = now + seconds
            add(new(Span, (rank, kind, op, now, end, micro_batch, stage, 0, None, False, None)))
            gives += micro_batch
            times[gives] = now = end
            if gives in waiting:
                runnable.append(waiting.pop(gives))
        free[rank] = now
    if waiting:
        validate(schedule)  # the error names the waiting rank and its input
    return spans
