"""Where the time goes: one bar for each run, cut into computing and the causes of loss."""

from __future__ import annotations

from collections.abc import Mapping

from course_lib.figures.axis import percent
from course_lib.figures.bars import bars_panel, with_origins
from course_lib.figures.breakdown import CAUSES, TimeBreakdown
from course_lib.figures.chart import Axis, Chart
from course_lib.figures.palette import STYLES
from course_lib.figures.picture import Picture, Row

# Each cause looks like a kind of span: a wait looks like a wait in every picture.
CAUSE_STYLES = {
    cause: STYLES[kind]._replace(label=CAUSES[cause])
    for cause, kind in (("compute", "forward"), ("wait", "wait"), ("transfer", "transfer"), ("rest", "other"))
}


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
