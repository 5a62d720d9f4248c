"""The time of runs by cause, and its picture: a bar for each run, cut into computing and the causes of loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from course_lib.figures.axis import percent
from course_lib.figures.bars import bars_panel
from course_lib.figures.chart import Axis, Chart
from course_lib.figures.palette import STYLES
from course_lib.figures.picture import Picture, Row
from course_lib.timeline import Span, Timeline

# Each cause has the look of a kind of span, so that a wait looks the same in every picture.
CAUSES = {
    "compute": STYLES["forward"]._replace(label="computing"),
    "wait": STYLES["wait"]._replace(label="waiting for others"),
    "transfer": STYLES["transfer"]._replace(label="communication not hidden"),
    "rest": STYLES["other"]._replace(label="overhead or idle"),
}
DONE = "until all are done"
Shares = dict[str, float]  # by cause


def with_final_waits(timeline: Timeline) -> Timeline:
    """The timeline, with a wait after each rank's last span until all are done: the bubble of a draining pipeline."""
    ends = {rank: max(span.end for span in timeline.of(rank)) for rank in {span.rank for span in timeline.spans}}
    waits = [Span(rank, "wait", DONE, end, max(ends.values())) for rank, end in ends.items()]
    return replace(timeline, spans=timeline.spans + [wait for wait in waits if wait.duration])


def time_breakdown(timeline: Timeline) -> Shares:
    """The ranks' time by cause, as shares of world_size x makespan that add up to 1.

    compute: computing. wait: blocked until a peer arrived, and at the end until all were done.
    transfer: exposed transfers; those hidden behind compute are not counted.
    rest: none of these.

    Raises ValueError if no time passed.
    """
    whole = timeline.world_size * timeline.makespan
    if whole <= 0:
        raise ValueError("the timeline is empty, so there is no time to attribute; mark compute or communicate in it")
    timeline, ranks = with_final_waits(timeline), range(timeline.world_size)
    of_rank = timeline.busy, timeline.waiting, timeline.transferring
    compute, wait, transfer = (sum(map(seconds, ranks)) / whole for seconds in of_rank)
    return {"compute": compute, "wait": wait, "transfer": transfer, "rest": max(0.0, 1 - compute - wait - transfer)}


def largest_loss(shares: Shares) -> str:
    """The cause that costs most, in words, and its share."""
    cause = max(("wait", "transfer", "rest"), key=lambda cause: shares[cause])
    return f"{CAUSES[cause].label}, {percent(shares[cause])}"


def lost_time(runs: Mapping[str, Timeline], width: int = 800, title: str | None = None) -> Picture:
    """Draw the ranks' time by cause: a bar for each run."""
    shares = {name: time_breakdown(run) for name, run in runs.items()}
    axis = Axis("share of the ranks' time", 0, 1, [tenth / 10 for tenth in range(0, 11, 2)], percent)
    panel = bars_panel(shares, CAUSES, axis, width, percent)
    chart = Chart([panel], {run.origin for run in runs.values()}, title, width, CAUSES)
    rows: list[Row] = [
        {"run": name, **{CAUSES[cause].label: percent(share) for cause, share in parts.items()}}
        for name, parts in shares.items()
    ]
    return Picture.of(chart, _summary(runs, shares), rows)


def _summary(runs: Mapping[str, Timeline], shares: Mapping[str, Shares]) -> str:
    worst = min(shares, key=lambda name: shares[name]["compute"])
    most = ", the most of all these runs" if len(runs) > 1 else ""
    lost = percent(1 - shares[worst]["compute"])
    return (
        f"{worst} ({runs[worst].origin}): {lost} of the time is not spent computing{most}, "
        f"and the largest part of that is {largest_loss(shares[worst])}."
    )
