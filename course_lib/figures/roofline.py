"""Communication against computation: what a link leaves of a device's speed.

    FLOP/s ^            ____________  what large matrix products reach
           |           /   o          a plan, by what it computes for each byte that it sends over this link
           |         /
           |       /  bandwidth x FLOPs per byte: a device cannot compute faster than it is sent work
           +-----------------------> FLOPs per byte

Williams, Waterman and Patterson 2009, "Roofline", Communications of the ACM 52(4), with a link in place of memory.
A point lies below its roof, as not all traffic is hidden, and matrices are not all large.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from course_lib.figures.axis import number, percent, powers, with_prefix
from course_lib.figures.chart import Axis, Chart, Curve, Label, Mark, Panel, Point, Range, Words
from course_lib.figures.palette import LIKELY, LINES, Line
from course_lib.figures.picture import Picture, Row

if TYPE_CHECKING:
    from course_lib.planner import Cluster, Estimate

LEFT, RIGHT, HEIGHT = 60.0, 24.0, 320.0
TERA = 1e12


class _Point(NamedTuple):
    """A plan over one of its links. intensity: FLOPs of a device for each byte that it sends there.

    speed, roof: FLOP/s of a device, as planned and as the link allows at this intensity.
    likely: where its speed lies with 90%.
    """

    name: str
    link: str
    intensity: float
    speed: float
    roof: float
    likely: tuple[float, float]

    @property
    def share(self) -> float:
        return self.speed / self.roof

    @property
    def likely_in_words(self) -> str:
        return " to ".join(number(speed / TERA) for speed in self.likely)

    def in_words(self) -> str:
        return (
            f"{self.name} over {self.link}: {with_prefix(self.intensity)} FLOPs a byte, "
            f"{number(self.speed / TERA)} TFLOP/s ({self.likely_in_words} with 90%), {percent(self.share)} of its roof"
        )

    def row(self) -> Row:
        return {
            "plan": self.name,
            "link": self.link,
            "FLOPs a byte": self.intensity,
            "TFLOP/s": self.speed / TERA,
            "with 90%": self.likely_in_words,
            "roof (TFLOP/s)": self.roof / TERA,
        }


def roofline(estimates: Mapping[str, Estimate], width: int = 800, title: str | None = None) -> Picture:
    """Draw how much each plan computes for a byte it sends, and what every link allows at that.

    Raises ValueError if the plans are for different clusters.
    """
    cluster, precision = _common(estimates)
    roofs = {link.name: link.achieved for link in (cluster.inside_link, cluster.between_link)}
    peak = cluster.spec.peak[precision] * cluster.spec.matmul
    points = [point for name, one in estimates.items() for point in _points(name, one, roofs, peak)]
    looks = dict(zip(roofs, LINES, strict=False))
    chart = Chart([_panel(points, roofs, peak, looks, width)], {"modelled"}, title, width, {**looks, LIKELY: None})
    return Picture.of(chart, _summary(points, roofs, peak), [point.row() for point in points])


def _common(estimates: Mapping[str, Estimate]) -> tuple[Cluster, str]:
    """What all plans compute on."""
    kinds = {
        (one.cluster.device, one.cluster.inside, one.cluster.between, one.plan.precision): one.cluster
        for one in estimates.values()
    }
    if len(kinds) > 1:
        raise ValueError(f"estimates are for {len(kinds)} kinds of cluster or precision; draw them one by one")
    (((*_, precision), cluster),) = kinds.items()
    return cluster, precision


def _points(name: str, one: Estimate, roofs: Mapping[str, float], peak: float) -> Iterator[_Point]:
    own = one.flops / one.cluster.devices
    speed = own / one.step_time.total
    for link, sent in _sent(one).items():
        if sent:
            roof = min(peak, own / sent * roofs[link])
            yield _Point(name, link, own / sent, speed, roof, one.step_time.around(speed))


def _sent(one: Estimate) -> dict[str, float]:
    """Bytes of one device by link. Of a ring through several nodes, one hop in each node crosses the network."""
    from course_lib.planner.communication import groups

    inside, between = one.cluster.inside_link.name, one.cluster.between_link.name
    sent = {inside: 0.0, between: 0.0}
    for kind, flow in one.flows.items():
        group = groups(one.plan, one.cluster.devices_per_node)[kind]
        is_ring = kind != "pipeline" and group.nodes > 1
        crossing = flow.bytes / group.per_node if is_ring else flow.bytes
        sent[flow.link] += crossing
        sent[inside] += flow.bytes - crossing
    return sent


def _panel(
    points: list[_Point], roofs: Mapping[str, float], peak: float, looks: Mapping[str, Line], width: int
) -> Panel:
    known = [*(peak / bandwidth for bandwidth in roofs.values()), *(point.intensity for point in points)]
    across = Axis.by_powers("FLOPs for each byte that a device sends over the link", known, 4, with_prefix)
    low, high = min([peak, *(point.speed for point in points)]) / 8 / TERA, 2 * peak / TERA
    up = Axis("TFLOP/s of a device", low, high, powers(low, high), is_log=True)
    marks: list[Mark] = []
    for link, bandwidth in roofs.items():
        start = max(across.low, TERA * low / bandwidth)
        ends = (start, start * bandwidth), (peak / bandwidth, peak), (across.high, peak)
        marks.append(Curve(link, [Point(intensity, speed / TERA) for intensity, speed in ends], looks[link]))
    marks += _names(points, across, up, width)
    for point in points:
        low, high = point.likely
        marks.append(Range(point.intensity, low / TERA, high / TERA, point.in_words()))
        at = Point(point.intensity, point.speed / TERA, point.in_words())
        marks.append(Curve(point.link, [at], looks[point.link]._replace(dash=None)))
    return Panel(across, up, marks, HEIGHT, LEFT, RIGHT)


def _names(points: list[_Point], across: Axis, up: Axis, width: int) -> Iterator[Curve | Label]:
    """A thin line through the points of each plan, and its name below, lower where another name stands already."""
    taken: list[tuple[float, float]] = []
    for name in dict.fromkeys(point.name for point in points):
        own = [Point(point.intensity, point.speed / TERA) for point in points if point.name == name]
        yield Curve("", sorted(own), look=None)
        middle = prod(point.x for point in own) ** (1 / len(own))
        x, y = (width - LEFT - RIGHT) * across.share(middle), -HEIGHT * up.share(own[0].y)
        down = 20
        while any(abs(x - other) < 160 and abs(y + down - height) < 16 for other, height in taken):
            down += 16
        yield Label(middle, own[0].y, Words(name, down=down, anchor="middle", is_bold=False, has_halo=True))
        taken.append((x, y + down))


def _summary(points: list[_Point], roofs: Mapping[str, float], peak: float) -> str:
    ridges = " and ".join(f"{with_prefix(peak / bandwidth)} for {link}" for link, bandwidth in roofs.items())
    text = f"To compute at full speed a plan needs so many FLOPs for each byte it sends: {ridges}"
    if not points:
        return f"{text}; these plans send nothing."
    nearest = min(points, key=lambda point: point.intensity * roofs[point.link])
    return f"{text}; nearest to the slope is {nearest.in_words()}."
