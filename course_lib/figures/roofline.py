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
from course_lib.figures.chart import Axis, Chart, Curve, Label, Panel, Point, Words
from course_lib.figures.palette import LINES
from course_lib.figures.picture import Picture, Row

if TYPE_CHECKING:
    from course_lib.planner import Cluster, Estimate

LEFT, RIGHT, HEIGHT = 60.0, 24.0, 320.0
TERA = 1e12


class _Point(NamedTuple):
    """A plan over one of its links. intensity: FLOPs of a device for each byte that it sends there."""

    name: str
    link: str
    intensity: float
    speed: float

    def at(self, tip: str = "") -> Point:
        return Point(self.intensity, self.speed / TERA, tip)


def roofline(estimates: Mapping[str, Estimate], width: int = 800, title: str | None = None) -> Picture:
    """Draw how much each plan computes for a byte it sends, and what every link allows at that.

    Raises ValueError if there is nothing to draw, or if the plans are for different clusters.
    """
    if not estimates:
        raise ValueError('estimates is empty; give at least one, for instance {"our plan": estimate(...)}')
    cluster, precision = _common(estimates)
    roofs = {link.name: link.achieved for link in (cluster.inside_link, cluster.between_link)}
    peak = cluster.spec.peak[precision] * cluster.spec.matmul
    points = [point for name, one in estimates.items() for point in _points(name, one)]
    chart = Chart(
        [_panel(points, roofs, peak, width)], {"modelled"}, title, width, dict(zip(roofs, LINES, strict=False))
    )
    return Picture.of(chart, _summary(points, roofs, peak), [_row(point, roofs, peak) for point in points])


def _common(estimates: Mapping[str, Estimate]) -> tuple[Cluster, str]:
    """What all plans compute on."""
    used = {
        (one.cluster.device, one.cluster.inside, one.cluster.between, one.plan.precision) for one in estimates.values()
    }
    if len(used) > 1:
        raise ValueError(
            f"estimates are for {len(used)} kinds of cluster or precision; a picture has one roof, so draw "
            "them one by one"
        )
    first = next(iter(estimates.values()))
    return first.cluster, first.plan.precision


def _points(name: str, one: Estimate) -> list[_Point]:
    flops = one.model.step_flops(one.global_batch) + one.model.recomputed_flops(one.global_batch, one.plan.recompute)
    own = flops / one.cluster.devices
    sent = _sent(one)
    return [_Point(name, link, own / sent[link], own / one.step_time.total) for link in sent if sent[link]]


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


def _roof(intensity: float, bandwidth: float, peak: float) -> float:
    return min(peak, intensity * bandwidth)


def _panel(points: list[_Point], roofs: Mapping[str, float], peak: float, width: int) -> Panel:
    ridges = [peak / bandwidth for bandwidth in roofs.values()]
    across = Axis.by_powers(
        "FLOPs for each byte that a device sends over the link",
        [*ridges, *(point.intensity for point in points)],
        4,
        with_prefix,
    )
    low, high = min([peak, *(point.speed for point in points)]) / 8 / TERA, 2 * peak / TERA
    up = Axis("TFLOP/s of a device", low, high, powers(low, high), is_log=True)
    looks = dict(zip(roofs, LINES, strict=False))
    lines = []
    for link, bandwidth in roofs.items():
        start = max(across.low, TERA * low / bandwidth)
        ends = (start, start * bandwidth), (peak / bandwidth, peak), (across.high, peak)
        lines.append(Curve(link, [Point(intensity, speed / TERA) for intensity, speed in ends], looks[link]))
    symbols = [
        Curve(point.link, [point.at(_in_words(point, roofs, peak))], looks[point.link]._replace(dash=None))
        for point in points
    ]
    return Panel(across, up, [*lines, *_names(points, across, up, width), *symbols], HEIGHT, LEFT, RIGHT)


def _names(points: list[_Point], across: Axis, up: Axis, width: int) -> Iterator[Curve | Label]:
    """A thin line through the points of each plan, and its name below, lower where another name stands already."""
    taken: list[tuple[float, float]] = []
    for name in dict.fromkeys(point.name for point in points):
        own = [point.at() for point in points if point.name == name]
        yield Curve("", sorted(own), look=None)
        middle = prod(point.x for point in own) ** (1 / len(own))
        x, y = (width - LEFT - RIGHT) * across.share(middle), -HEIGHT * up.share(own[0].y)
        down = 20
        while any(abs(x - other) < 160 and abs(y + down - height) < 16 for other, height in taken):
            down += 16
        yield Label(middle, own[0].y, Words(name, down=down, anchor="middle", is_bold=False, has_halo=True))
        taken.append((x, y + down))


def _in_words(point: _Point, roofs: Mapping[str, float], peak: float) -> str:
    share = percent(point.speed / _roof(point.intensity, roofs[point.link], peak))
    return (
        f"{point.name} over {point.link}: {with_prefix(point.intensity)} FLOPs a byte, "
        f"{number(point.speed / TERA)} TFLOP/s, {share} of its roof"
    )


def _summary(points: list[_Point], roofs: Mapping[str, float], peak: float) -> str:
    ridges = " and ".join(f"{with_prefix(peak / bandwidth)} for {link}" for link, bandwidth in roofs.items())
    text = f"To compute at full speed a plan needs so many FLOPs for each byte it sends: {ridges}"
    if not points:
        return f"{text}; these plans send nothing."
    nearest = min(points, key=lambda point: point.intensity * roofs[point.link])
    return f"{text}; nearest to the slope is {_in_words(nearest, roofs, peak)}."


def _row(point: _Point, roofs: Mapping[str, float], peak: float) -> Row:
    return {
        "plan": point.name,
        "link": point.link,
        "FLOPs a byte": point.intensity,
        "TFLOP/s": point.speed / TERA,
        "roof (TFLOP/s)": _roof(point.intensity, roofs[point.link], peak) / TERA,
    }
