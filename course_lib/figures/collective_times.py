"""How long a collective takes with more and more ranks: a line for each algorithm, a panel for each size of message."""

from __future__ import annotations

from collections.abc import Mapping

from course_lib.figures.axis import duration, thousands
from course_lib.figures.chart import Axis, Chart, Curve, Panel, Point
from course_lib.figures.palette import Line, lines_of
from course_lib.figures.picture import Picture

Times = Mapping[str, Mapping[int, float]]  # seconds, by algorithm and number of ranks


def collective_times(panels: Mapping[str, Times], width: int = 850, title: str | None = None) -> Picture:
    """Draw modelled times beside each other. panels: by what is sent, such as "an all-reduce of 1 MB"."""
    looks = lines_of(next(iter(panels.values())))
    rows: list[dict[str, object]] = [
        {"what": what, "ranks": ranks, **{name: duration(times[name][ranks]) for name in times}}
        for what, times in panels.items()
        for ranks in next(iter(times.values()))
    ]
    chart = Chart([_panel(*panel, looks) for panel in panels.items()], {"modelled"}, title, width, looks, is_row=True)
    return Picture.of(chart, "; ".join(_in_words(*panel) for panel in panels.items()) + ".", rows)


def _panel(what: str, times: Times, looks: Mapping[str, Line]) -> Panel:
    curves = [
        Curve(name, [Point(n, 1e3 * s, f"{name}, {n} ranks: {duration(s)}") for n, s in line.items()], looks[name])
        for name, line in times.items()
    ]
    ranks, seconds = zip(*(point for line in times.values() for point in line.items()), strict=True)
    across = Axis.by_powers(f"number of ranks, for {what}", ranks, 1.3, thousands)
    up = Axis.by_powers("time (ms)", [1e3 * s for s in seconds], 1.6, thousands)
    return Panel(across, up, curves, 220.0)


def _in_words(what: str, times: Times) -> str:
    most = max(next(iter(times.values())))
    ends = ", ".join(f"{name} {duration(line[most])}" for name, line in times.items())
    return f"{what} over {thousands(most)} ranks: {ends}"
