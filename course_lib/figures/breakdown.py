"""Where the time of a run went."""

from __future__ import annotations

from dataclasses import dataclass, replace

from course_lib.timeline import Span, Timeline

CAUSES = {
    "compute": "computing",
    "wait": "waiting for others",
    "transfer": "communication not hidden",
    "rest": "overhead or idle",
}


DONE = "until all are done"


@dataclass(frozen=True)
class TimeBreakdown:
    """What became of the ranks' time, as shares of world_size x makespan that add up to 1.

    compute: computing. wait: held up until a peer arrived, and at the end until all were done.
    transfer: held up by data on the move; what runs behind compute costs nothing and is not in here.
    rest: none of these.
    origin: "measured", "emulated" or "modelled".
    """

    compute: float
    wait: float
    transfer: float
    rest: float
    origin: str = "measured"


def filled(timeline: Timeline) -> Timeline:
    """The same, with a wait after each rank's last span until all are done: a pipeline's bubble as it drains."""
    ends = {rank: max(span.end for span in timeline.of(rank)) for rank in {span.rank for span in timeline.spans}}
    waits = [Span(rank, "wait", DONE, end, max(ends.values())) for rank, end in ends.items()]
    return replace(timeline, spans=timeline.spans + [wait for wait in waits if wait.duration])


def time_breakdown(timeline: Timeline) -> TimeBreakdown:
    """Say where the time of a timeline went, on average over its ranks.

    Raises ValueError if no time passed.
    """
    whole = timeline.world_size * timeline.makespan
    if whole <= 0:
        raise ValueError("the timeline is empty, so there is no time to attribute; mark compute or communicate in it")
    timeline, ranks = filled(timeline), range(timeline.world_size)
    of_rank = timeline.busy, timeline.waiting, timeline.transferring
    compute, wait, transfer = (sum(map(seconds, ranks)) / whole for seconds in of_rank)
    return TimeBreakdown(compute, wait, transfer, max(0.0, 1 - compute - wait - transfer), timeline.origin)
