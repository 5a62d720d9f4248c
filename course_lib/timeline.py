"""Timelines: the activities of every rank over time.

A `Timeline` is a list of `Span`s. The same type holds a run on the real clock ("measured"), a run of real
processes and messages on an emulated clock ("emulated") and a simulation without any ("modelled"), so one
picture and one set of numbers serve all three.

    rank 0  |forward|backward|..wait..|transfer|optimizer|
    rank 1  |.forward.|.backward.|transfer|optimizer|
            0                                        makespan
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

COMPUTE_KINDS = ("forward", "backward", "weight_grad", "optimizer", "other")
KINDS = (*COMPUTE_KINDS, "transfer", "wait")
RECEIVING = frozenset({"recv", "irecv", "recv_any_source"})


class Span(NamedTuple):
    """One activity of one rank, from `start` to `end` in seconds on the clock of its timeline.

    kind: one of KINDS. "wait": the rank is blocked until its peers have arrived; "transfer": data moves once they
        have; everything else is compute.
    bytes: what this rank sends in a transfer, or the size of the message when it receives one.
        A collective counts as its ring algorithm, the cheapest in bytes
        (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms").
    peer: the other rank of a send or recv.
    background: a transfer that ran while its rank was free to do something else.
    number: which message from its sender to its receiver it is, the first, second and so on of its tag.
    """

    rank: int
    kind: str
    name: str
    start: float
    end: float
    micro_batch: int | None = None
    stage: int | None = None
    bytes: int = 0
    peer: int | None = None
    background: bool = False
    number: int | None = None

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of all ranks of one run; time zero is when the first rank began.

    origin: "measured" (real clock), "emulated" (real processes and messages, emulated clock) or "modelled"
        (formula or simulation). Every picture says which.
    untimed: kinds of compute that take no time, since the pace has no seconds for them.
    """

    spans: list[Span]
    world_size: int
    origin: str = "measured"
    untimed: tuple[str, ...] = ()

    def of(self, rank: int) -> list[Span]:
        """The spans of one rank, by start time; of two that start together the longer comes first."""
        return self._by_rank[rank]

    @cached_property
    def began(self) -> float:
        """The start of the first span: time zero of the timeline's picture."""
        return min((span.start for span in self.spans), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end; 0 for an empty timeline."""
        return max((span.end for span in self.spans), default=0.0) - self.began

    def busy(self, rank: int) -> float:
        """Seconds in which this rank computed. Time blocked inside a compute span does not count."""
        return self._covered(rank, *KINDS) - self._covered(rank, "wait", "transfer")

    def waiting(self, rank: int) -> float:
        """Seconds in which this rank was blocked because a peer had not arrived yet."""
        return self._covered(rank, "wait")

    def transferring(self, rank: int) -> float:
        """Seconds in which this rank was blocked by transfers; those hidden behind compute do not count."""
        return self._covered(rank, "wait", "transfer") - self.waiting(rank)

    def idle_fraction(self) -> float:
        """Share of world_size x makespan in which no rank computed, 0 to 1: a pipeline's bubble."""
        if self.makespan == 0:
            return 0.0
        busy = sum(self.busy(rank) for rank in range(self.world_size))
        return 1 - busy / (self.world_size * self.makespan)

    def bytes_sent(self, rank: int) -> int:
        """Bytes that this rank sent."""
        return sum(s.bytes for s in self.of(rank) if s.kind == "transfer" and s.name not in RECEIVING)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as a Chrome trace, which https://ui.perfetto.dev opens.

        Each rank is a process; its background transfers are events of their own beside its thread.
        """
        events = [event for rank in range(self.world_size) for event in _trace_of(rank, self.of(rank))]
        trace = {"displayTimeUnit": "ms", "otherData": {"origin": self.origin}, "traceEvents": events}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(trace, file)

    @cached_property
    def _by_rank(self) -> list[list[Span]]:
        ordered = sorted(self.spans, key=lambda span: (span.start, -span.end))
        return [[span for span in ordered if span.rank == rank] for rank in range(self.world_size)]

    def _covered(self, rank: int, *kinds: str) -> float:
        """Seconds in which this rank was in a span of any of these kinds that was not in the background."""
        spans = _union((span.start, span.end) for span in self.of(rank) if span.kind in kinds and not span.background)
        return sum(end - start for start, end in spans)


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _trace_of(rank: int, spans: list[Span]) -> Iterator[dict[str, object]]:
    """One process of a Chrome trace: its name, and its spans by start time."""
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for number, span in enumerate(spans):
        yield from _trace_events(span, number)


def _trace_events(span: Span, number: int) -> Iterator[dict[str, object]]:
    # Whole nanoseconds, so that rounding cannot push a span out of the one around it.
    start, end = round(span.start * 1e9), round(span.end * 1e9)
    detail = {"micro_batch": span.micro_batch, "stage": span.stage, "bytes": span.bytes or None, "peer": span.peer}
    detail["message"] = span.number
    args = {key: value for key, value in detail.items() if value is not None}
    event = {"name": span.name or span.kind, "cat": span.kind, "pid": span.rank, "tid": 0, "ts": start / 1000}
    if span.background:  # which may overlap with others
        yield {"ph": "b", "id2": {"local": number}, **event, "args": args}
        yield {"ph": "e", "id2": {"local": number}, **event, "ts": end / 1000}
    else:
        yield {"ph": "X", **event, "dur": (end - start) / 1000, "args": args}


_recorder: Any = None


def record_with(recorder: Any) -> None:
    """Send the marks of `compute` and `progress` on this process to `recorder`, or nowhere if None.

    It has begin(kind, name, micro_batch, stage, work, includes), progress(fraction), end(failed) and now().
    """
    global _recorder
    _recorder = recorder


def now() -> float:
    """Seconds on the clock of the timeline that is being recorded; 0 without a recorder."""
    return _recorder.now() if _recorder else 0.0


@contextlib.contextmanager
def compute(
    kind: str,
    name: str = "",
    micro_batch: int | None = None,
    stage: int | None = None,
    work: float = 1.0,
    includes: str = "",
) -> Iterator[None]:
    """Mark the enclosed code as compute of this kind on this rank's timeline.

    work: the amount, in the unit for which the `Pace` of the run has seconds (samples, layers, FLOPs). Only an
        emulated run uses it. Without a recorder (one process, torchrun) the mark does nothing.
    includes: another kind that is computed within; a `Pace` that has seconds for it adds them.

    Raises ValueError for a kind that is not one of COMPUTE_KINDS, and for work that is not a number of at least 0.
    """
    if not 0 <= work < math.inf:
        raise ValueError(f"work={work!r} must be a number of at least 0")
    for what, given in (("kind", kind), ("includes", includes or kind)):
        if given not in COMPUTE_KINDS:
            raise ValueError(f"{what}={given!r} is not a kind of compute; choose one of {', '.join(COMPUTE_KINDS)}")
    if _recorder is None:
        yield
        return
    recorder, failed = _recorder, True
    recorder.begin(kind, name, micro_batch, stage, work, includes)
    try:
        yield
        failed = False
    finally:
        recorder.end(failed)


def progress(fraction: float) -> None:
    """Report that this fraction (0 to 1) of the current compute mark's work is done.

    An emulated clock advances to the moment when its device would have come this far, so that what begins in the middle
    of a mark leaves at the right moment, not when all of it is computed. It follows backward passes by itself.

    Raises ValueError for a fraction outside 0 to 1.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction={fraction!r} must be between 0, where the mark begins, and 1, where it ends")
    if _recorder is not None:
        _recorder.progress(fraction)
