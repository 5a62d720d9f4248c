"""Where the time goes: one bar for each run, cut into computing and the causes of loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from course_lib.figures.axis import percent
from course_lib.figures.bars import Bars, bars_in_plotly, draw_bars
from course_lib.figures.breakdown import CAUSES, TimeBreakdown
from course_lib.figures.frame import draw_legend, draw_origins, draw_title, new_sheet, on_card
from course_lib.figures.palette import STYLES
from course_lib.figures.picture import Picture

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Each cause looks like a kind of span: a wait looks like a wait in every picture.
CAUSE_STYLES = {
    cause: STYLES[kind]._replace(label=CAUSES[cause])
    for cause, kind in (("compute", "forward"), ("wait", "wait"), ("transfer", "transfer"), ("rest", "other"))
}


def lost_time(shares: Mapping[str, TimeBreakdown], width: int = 800, title: str | None = None) -> Picture:
    """Draw where the ranks' time went: a bar for each name, from `time_breakdown(timeline)`.

    Raises ValueError if there is nothing to draw.
    """
    if not shares:
        example = '{"4 ranks": time_breakdown(run.timeline)}'
        raise ValueError(f"shares is empty; give at least one bar, for instance {example}")
    bars = _with_origins(shares)
    sheet = new_sheet(width)
    y = draw_title(sheet, title)
    y = draw_origins(sheet, {one.origin for one in bars.values()}, y)
    y = draw_legend(sheet, CAUSE_STYLES, y)
    sheet.height = draw_bars(sheet, _bars(bars), y)
    return Picture(
        sheet,
        summary=_summary(shares),
        rows=[{"run": name, **{CAUSES[c]: percent(getattr(one, c)) for c in CAUSES}} for name, one in bars.items()],
        figure=lambda: _plotly(bars, title),
    )


def _with_origins(shares: Mapping[str, TimeBreakdown]) -> dict[str, TimeBreakdown]:
    """The names of the bars, with their origins where those differ."""
    mixed = len({one.origin for one in shares.values()}) > 1
    return {f"{name} ({one.origin})" if mixed else name: one for name, one in shares.items()}


def _summary(shares: Mapping[str, TimeBreakdown]) -> str:
    name, worst = min(shares.items(), key=lambda item: item[1].compute)
    cause = max(("wait", "transfer", "rest"), key=lambda cause: getattr(worst, cause))
    most = "Most time is lost with " if len(shares) > 1 else ""
    return (
        f"{most}{name} ({worst.origin}): {percent(1 - worst.compute)} of the time is not spent computing, "
        f"and the largest part of that is {CAUSES[cause]}, {percent(getattr(worst, cause))}."
    )


def _bars(named: Mapping[str, TimeBreakdown]) -> Bars:
    values = {name: {cause: getattr(one, cause) for cause in CAUSES} for name, one in named.items()}
    tenths = [tenth / 10 for tenth in range(0, 11, 2)]
    return Bars(values, CAUSE_STYLES, 1.0, tenths, "share of the ranks' time", percent, percent)


def _plotly(named: Mapping[str, TimeBreakdown], title: str | None) -> go.Figure:
    figure = bars_in_plotly(_bars(named)).update_xaxes(tickformat=".0%")
    return on_card(figure, title, (one.origin for one in named.values()))
