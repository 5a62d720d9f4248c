"""Synthetic timelines for the tests of pictures."""

from __future__ import annotations

from course_lib.timeline import Span, Timeline


def gpipe(
    ranks: int, micro_batches: int, forward: float = 0.01, transfer: float = 0.0, origin: str = "modelled"
) -> Timeline:
    """GPipe with backwards twice as long as forwards, a wait wherever a rank has nothing to do yet, and an
    optimizer step at the end. Its bubble is (p-1)/(m+p-1) of the time before the optimizer."""
    spans: list[Span] = []
    free = [0.0] * ranks
    for backward in (False, True):
        ready = dict.fromkeys(range(micro_batches), 0.0)
        for step in range(ranks):
            rank = ranks - 1 - step if backward else step
            for micro_batch in reversed(range(micro_batches)) if backward else range(micro_batches):
                peer = rank + 1 if backward else rank - 1
                start = max(free[rank], ready[micro_batch])
                if start > free[rank]:
                    spans.append(Span(rank, "wait", "recv", free[rank], start, peer=peer))
                if transfer and step:
                    spans.append(Span(rank, "transfer", "recv", start, start + transfer, bytes=4096, peer=peer))
                    start += transfer
                end = start + forward * (2 if backward else 1)
                spans.append(Span(rank, "backward" if backward else "forward", "", start, end, micro_batch, rank))
                free[rank] = ready[micro_batch] = end
    spans += [Span(rank, "optimizer", "AdamW", free[rank], free[rank] + forward) for rank in range(ranks)]
    return Timeline(spans, ranks, origin)


def every_kind() -> Timeline:
    """Two ranks with one span of each kind, one blocked inside its compute, one with a background transfer."""
    return Timeline(
        [
            Span(0, "forward", "", 0.0, 0.010, micro_batch=0),
            Span(0, "backward", "", 0.010, 0.030, micro_batch=0),
            Span(0, "wait", "all_reduce", 0.020, 0.024),
            Span(0, "transfer", "all_reduce", 0.024, 0.026, bytes=4096),
            Span(0, "transfer", "all_reduce", 0.012, 0.019, bytes=8192, background=True),
            Span(0, "optimizer", "AdamW", 0.030, 0.035),
            Span(1, "other", 'load <data> & "sort"', 0.0, 0.005),
            Span(1, "forward", "", 0.005, 0.015, micro_batch=1),
            Span(1, "weight_grad", "", 0.015, 0.024, micro_batch=1),
            Span(1, "transfer", "all_reduce", 0.024, 0.026, bytes=4096),
            Span(1, "optimizer", "AdamW", 0.026, 0.031),
        ],
        world_size=2,
        origin="measured",
    )


def spent(compute: float, wait: float, transfer: float, rest: float) -> Timeline:
    """A timeline of one rank that spends these seconds; nothing is recorded for the rest."""
    spans, now = [], 0.0
    for kind, seconds in (("forward", compute), ("", rest), ("wait", wait), ("transfer", transfer)):
        if kind and seconds:
            spans.append(Span(0, kind, "", now, now + seconds))
        now += seconds
    return Timeline(spans, 1)


def dense(ranks: int, spans_per_rank: int) -> Timeline:
    """A timeline of many short spans: forward, wait, backward, transfer in turn; lengths repeat after seven."""
    spans = []
    for rank in range(ranks):
        now = 0.0
        for i in range(spans_per_rank):
            kind = ("forward", "wait", "backward", "transfer")[i % 4]
            length = 1e-5 * (1 + (i * 3 + rank) % 7)
            spans.append(Span(rank, kind, kind, now, now + length, micro_batch=i // 4 if i % 2 == 0 else None))
            now += length
    return Timeline(spans, ranks, "emulated")
