"""The roofline of communication: the speed of a device behind a link.

    FLOP/s ^            ____________  the speed of large matrix products
           |           /   o          a plan, by the FLOPs it computes for each byte it sends over this link
           |         /
           |       /  bandwidth x FLOPs per byte: a device cannot compute faster than it is sent work
           +-----------------------> FLOPs per byte

Williams, Waterman and Patterson 2009, "Roofline", Communications of the ACM 52(4), with a link in place of memory.
A point lies below its roof, as some traffic is exposed, and not all matrices are large.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from course_lib.figures.axis import number, percent, powers, thousands
from course_lib.figures.chart import Axis, Chart, Curve, Label, Mark, Panel, Point, interval
from course_lib.figures.palette import LIKELY, LINES, Line
from course_lib.figures.picture import Picture, table
from course_lib.planner import Estimate
from course_lib.planner.communication import group

TERA = 1e12
COLUMNS = "plan", "link", "FLOPs a byte", "TFLOP/s", "with 90%", "roof (TFLOP/s)"


class _Use(NamedTuple):
    """A plan over one of its links. intensity: FLOPs of a device for each byte that it sends over the link.

    speed, roof: TFLOP/s of a device, as planned, and the most that the link allows at this intensity.
    low, high: the 90% interval of its speed.
    """

    name: str
    link: str
    intensity: float
    speed: float
    roof: float
    low: float
    high: float

    @property
    def likely(self) -> str:
        return f"{number(self.low)} to {number(self.high)}"

    def in_words(self) -> str:
        return (
            f"{self.name} over {self.link}: {thousands(round(self.intensity))} FLOPs a byte, "
            f"{number(self.speed)} TFLOP/s ({self.likely} with 90%), {percent(self.speed / self.roof)} of its roof"
        )


def roofline(estimates: Mapping[str, Estimate], width: int = 800, title: str | None = None) -> Picture:
    """Draw each plan's speed over the FLOPs for a byte it sends, below the roof of each link.

    Raises ValueError if the plans are for different kinds of cluster or precision.
    """
    plans = list(estimates.values())
    kinds = {(one.cluster.device, one.cluster.inside, one.cluster.between, one.plan.precision) for one in plans}
    if len(kinds) > 1:
        raise ValueError(f"estimates are for {len(kinds)} kinds of cluster or precision; draw them one by one")
    cluster = plans[0].cluster
    roofs = {link.name: link.achieved / TERA for link in (cluster.inside_link, cluster.between_link)}
    peak = cluster.spec.peak[plans[0].plan.precision] * cluster.spec.matmul / TERA
    uses = [use for name, one in estimates.items() for use in _uses(name, one, roofs, peak)]
    looks = dict(zip(roofs, LINES, strict=False))
    chart = Chart([_panel(uses, roofs, peak, looks)], {"modelled"}, title, width, {**looks, LIKELY: None})
    rows = [(use.name, use.link, use.intensity, use.speed, use.likely, use.roof) for use in uses]
    return Picture.of(chart, _summary(uses, roofs, peak), table(COLUMNS, rows))


def _uses(name: str, one: Estimate, roofs: Mapping[str, float], peak: float) -> Iterator[_Use]:
    own = one.flops / one.cluster.devices
    speed = own / one.step_time.total / TERA
    for link, sent in _sent(one).items():
        if sent:
            roof = min(peak, own / sent * roofs[link])
            yield _Use(name, link, own / sent, speed, roof, *one.step_time.around(speed))


def _sent(one: Estimate) -> dict[str, float]:
    """Bytes that a device sends, by link. In a ring through several nodes, one hop of each node crosses the network."""
    inside, between = one.cluster.inside_link.name, one.cluster.between_link.name
    sent = {inside: 0.0, between: 0.0}
    sizes = {"tensor": (one.plan.tp, 1), "context": (one.plan.cp, one.plan.tp)}
    sizes["data"] = one.plan.cp * one.plan.dp, one.plan.tp  # context ranks hold the same parameters
    rings = {kind: group(*size, one.cluster.devices_per_node) for kind, size in sizes.items()}
    for kind, flow in one.flows.items():
        crossing = flow.bytes / rings[kind].per_node if kind in rings and rings[kind].nodes > 1 else flow.bytes
        sent[flow.link] += crossing
        sent[inside] += flow.bytes - crossing
    return sent


def _panel(uses: list[_Use], roofs: Mapping[str, float], peak: float, looks: Mapping[str, Line]) -> Panel:
    known = [*(peak / bandwidth for bandwidth in roofs.values()), *(use.intensity for use in uses)]
    across = Axis.by_powers("FLOPs for each byte that a device sends over the link", known, 4, thousands)
    low, high = min([peak, *(use.speed for use in uses)]) / 8, 2 * peak
    up = Axis("TFLOP/s of a device", low, high, powers(low, high), is_log=True)
    marks: list[Mark] = []
    for link, bandwidth in roofs.items():
        start = max(across.low, low / bandwidth)
        ends = Point(start, start * bandwidth), Point(peak / bandwidth, peak), Point(across.high, peak)
        marks.append(Curve(link, ends, looks[link]))
    marks += [_joined(name, uses) for name in dict.fromkeys(use.name for use in uses)]
    for use in uses:
        marks.append(interval(use.in_words(), (use.intensity, use.low), (use.intensity, use.high)))
        at = Point(use.intensity, use.speed, use.in_words())
        marks.append(Curve(use.link, [at], looks[use.link]._replace(dash=None)))
    return Panel(across, up, marks, height=320.0, left=60.0)


def _joined(name: str, uses: list[_Use]) -> Curve:
    """A thin line through the points of a plan, with its name to the right of the last."""
    *others, last = sorted(Point(use.intensity, use.speed) for use in uses if use.name == name)
    words = Label(name, right=9, down=4, is_bold=False)
    return Curve("", [*others, last._replace(words=words)], look=None)


def _summary(uses: list[_Use], roofs: Mapping[str, float], peak: float) -> str:
    ridges = " and ".join(f"{thousands(round(peak / bandwidth))} for {link}" for link, bandwidth in roofs.items())
    nearest = min(uses, key=lambda use: use.intensity * roofs[use.link], default=None)
    where = f"nearest to the slope is {nearest.in_words()}" if nearest else "these plans send nothing"
    return f"To compute at full speed a plan needs so many FLOPs for each byte it sends: {ridges}; {where}."
