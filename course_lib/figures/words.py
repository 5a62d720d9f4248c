"""A timeline in words: heading, summary, a line for each span, and a table row for each rank."""

from __future__ import annotations

from math import isclose

from course_lib.figures.axis import counted, data_size, duration, listed, percent
from course_lib.figures.breakdown import time_breakdown
from course_lib.figures.palette import ORIGINS, STYLES
from course_lib.figures.picture import Row
from course_lib.planner import Plan
from course_lib.timeline import Span, Timeline

RECOMPUTED = {"none": "nothing", "full": "every layer"}  # by the plan's recomputation


def heading(timeline: Timeline, name: str = "") -> str:
    length = duration(timeline.makespan) if timeline.spans else "nothing was recorded"
    what = f"{name}, {ORIGINS[timeline.origin]}" if name else ORIGINS[timeline.origin]
    return f"{what}: {counted(timeline.world_size, 'rank')}, {length}{_untimed(timeline)}"


def _untimed(timeline: Timeline) -> str:
    names = " and ".join(STYLES[kind].label for kind in timeline.untimed)
    return f"; {names} {'takes' if len(timeline.untimed) == 1 else 'take'} no time here" if names else ""


def summary(timeline: Timeline, compare: Timeline | None = None) -> str:
    """One sentence about the picture of a timeline, and of the one below it."""
    who = f"{counted(timeline.world_size, 'rank')}, {duration(timeline.makespan)}, {timeline.origin}"
    what = _average(timeline) + _longest_wait(timeline) if timeline.makespan else "nothing was recorded"
    below = (
        f"; below it {compare.origin}, {duration(compare.makespan)}{_difference(timeline, compare)}" if compare else ""
    )
    return f"{who}: {what}{below}{_untimed(timeline)}."


def span_in_words(span: Span, zero: float) -> str:
    """A span in one line: its activity and its times. zero: the start of its timeline."""
    start, end = duration(span.start - zero), duration(span.end - zero)
    return f"rank {span.rank}: {activity(span)}; {duration(span.duration)}, from {start} to {end}"


def activity(span: Span) -> str:
    """The activity of a rank in a span."""
    parts = [
        STYLES[span.kind].label,
        span.name if span.name != span.kind else "",
        f"micro-batch {span.micro_batch}" if span.micro_batch is not None else "",
        f"stage {span.stage}" if span.stage is not None else "",
        f"message {span.number}" if span.number is not None else "",
        f"with rank {span.peer}" if span.peer is not None else "",
        data_size(span.bytes) if span.bytes else "",
        "in the background" if span.background else "",
    ]
    return ", ".join(filter(None, parts))


def rank_rows(timeline: Timeline) -> list[Row]:
    """A row for each rank: its time by activity, in milliseconds, and the bytes it sent."""
    return [
        {
            "origin": timeline.origin,
            "rank": rank,
            "computing (ms)": timeline.busy(rank) * 1e3,
            "waiting (ms)": timeline.waiting(rank) * 1e3,
            "communication not hidden (ms)": timeline.transferring(rank) * 1e3,
            "all (ms)": timeline.makespan * 1e3,
            "sent (bytes)": timeline.bytes_sent(rank),
        }
        for rank in range(timeline.world_size)
    ]


def plan_in_words(plan: Plan) -> str:
    """A plan in one line, without the fields that it does not use."""
    each = f" with {plan.virtual_stages} stages each" if plan.virtual_stages > 1 else ""
    some = f" of {percent(plan.recomputed)} of the layers" if plan.recomputed < 1 else ""
    parts = [
        f"data {plan.dp} x tensor {plan.tp} x pipeline {plan.pp}",
        f"context {plan.cp}" if plan.cp > 1 else "",
        f"{plan.schedule}{each}" if plan.pp > 1 else "",
        f"micro-batches of {plan.micro_batch}",
        f"ZeRO-{plan.zero}" if plan.zero else "",
        "sequence parallelism" if plan.sequence_parallel else "",
        f"{plan.recompute} recomputation{some}" if plan.recompute != "none" else "",
    ]
    return ", ".join(filter(None, parts))


def _average(timeline: Timeline) -> str:
    shares = time_breakdown(timeline)
    who = "it" if timeline.world_size == 1 else "on average a rank"
    parts = [
        f"computed {percent(shares['compute'])} of the time",
        f"moved data for {percent(shares['transfer'])}" if shares["transfer"] > 0 else "",
        f"waited {percent(shares['wait'])}" if shares["wait"] > 0 else "never waited",
        f"did none of these for {percent(shares['rest'])}" if shares["rest"] >= 0.02 else "",
    ]
    return f"{who} {listed(list(filter(None, parts)))}"


def _longest_wait(timeline: Timeline) -> str:
    """The rank that waited longest, or that all waited equally; nothing if there is only one rank."""
    waits = [timeline.waiting(rank) for rank in range(timeline.world_size)]
    longest = max(waits)
    if timeline.world_size == 1 or not longest:
        return ""
    if isclose(min(waits), longest):
        return "; all waited equally long"
    return f"; rank {waits.index(longest)} waited longest, {percent(longest / timeline.makespan)}"


def _difference(timeline: Timeline, compare: Timeline) -> str:
    if not timeline.makespan or not compare.makespan:
        return ""
    change = compare.makespan / timeline.makespan - 1
    if isclose(compare.makespan, timeline.makespan):
        return ", exactly as long"
    return f", {percent(abs(change))} {'shorter' if change < 0 else 'longer'}"
