"""Where the time of runs went, and its picture: a bar for each run, cut into computing and the causes of loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from course_lib.figures.axis import percent
from course_lib.figures.bars import bars_panel, with_origins
from course_lib.figures.chart import Axis, Chart
from course_lib.figures.palette import STYLES
from course_lib.figures.picture import Picture, Row
from course_lib.timeline import Span, Timeline

CAUSES = {
    "compute": "computing",
    "wait": "waiting for others",
    "transfer": "communication not hidden",
    "rest": "overhead or idle",
}
# Each cause looks like a kind of span: a wait looks like a wait in every picture.
CAUSE_STYLES = {
    cause: STYLES[kind]._replace(label=CAUSES[cause])
    for cause, kind in (("compute", "forward"), ("wait", "wait"), ("transfer", "transfer"), ("rest", "other"))
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


def lost_time(shares: Mapping[str, TimeBreakdown], width: int = 800, title: str | None = None) -> Picture:
    """Draw where the ranks' time went: a bar for each name, from `time_breakdown(timeline)`."""
    names = with_origins({name: one.origin for name, one in shares.items()})
    values = {names[name]: {cause: getattr(one, cause) for cause in CAUSES} for name, one in shares.items()}
    axis = Axis("share of the ranks' time", 0, 1, [tenth / 10 for tenth in range(0, 11, 2)], percent)
    panel = bars_panel(values, CAUSE_STYLES, axis, width, percent)
    chart = Chart([panel], {one.origin for one in shares.values()}, title, width, CAUSE_STYLES)
    rows: list[Row] = [
        {"run": name, **{CAUSES[cause]: percent(share) for cause, share in parts.items()}}
        for name, parts in values.items()
    ]
    return Picture.of(chart, _summary(shares), rows)


def _summary(shares: Mapping[str, TimeBreakdown]) -> str:
    name, worst = min(shares.items(), key=lambda item: item[1].compute)
    cause = max(("wait", "transfer", "rest"), key=lambda cause: getattr(worst, cause))
    most = "Most time is lost with " if len(shares) > 1 else ""
    return (
        f"{most}{name} ({worst.origin}): {percent(1 - worst.compute)} of the time is not spent computing, "
        f"and the largest part of that is {CAUSES[cause]}, {percent(getattr(worst, cause))}."
    )
