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

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from course_lib.figures.axis import number, percent, powers
from course_lib.figures.frame import draw_origins, draw_title, new_sheet, on_card
from course_lib.figures.palette import INK, LINES
from course_lib.figures.picture import Picture
from course_lib.figures.plot import (
    Axis,
    Plot,
    Scale,
    draw_axes,
    draw_line,
    draw_lines_legend,
    draw_symbol,
    spread,
)
from course_lib.figures.svg import BACKGROUND, Sheet

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from course_lib.planner import Cluster, Estimate

LEFT, RIGHT, HEIGHT = 60.0, 24.0, 320.0
TERA = 1e12


class _Point(NamedTuple):
    """A plan over one of its links. intensity: FLOPs of a device for each byte that it sends there."""

    name: str
    link: str
    intensity: float
    speed: float


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
    sheet = new_sheet(width)
    y = draw_title(sheet, title)
    y = draw_origins(sheet, {"modelled"}, y)
    y = draw_lines_legend(sheet, dict(zip(roofs, LINES, strict=False)), y)
    sheet.height = _draw(sheet, points, roofs, peak, y)
    return Picture(
        sheet,
        _summary(points, roofs, peak),
        [_row(p, roofs, peak) for p in points],
        lambda: _plotly(points, roofs, peak, title),
    )


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


def _draw(sheet: Sheet, points: list[_Point], roofs: Mapping[str, float], peak: float, top: float) -> float:
    ridges = [peak / bandwidth for bandwidth in roofs.values()]
    across = spread([*ridges, *(point.intensity for point in points)], margin=4)
    up = Scale(min([peak, *(point.speed for point in points)]) / 8, 2 * peak, is_log=True)
    plot = Plot(LEFT, sheet.width - RIGHT, top, top + HEIGHT, across, up)
    end = draw_axes(
        sheet,
        plot,
        Axis("FLOPs for each byte that a device sends over the link", powers(across.low, across.high), _count),
        Axis(
            "TFLOP/s of a device",
            [TERA * mark for mark in powers(up.low / TERA, up.high / TERA)],
            lambda speed: number(speed / TERA),
        ),
    )
    lines = dict(zip(roofs, LINES, strict=False))
    for link, bandwidth in roofs.items():
        start = max(across.low, up.low / bandwidth)
        corner = (peak / bandwidth, peak)
        draw_line(sheet, lines[link], [plot.at(start, start * bandwidth), plot.at(*corner), plot.at(across.high, peak)])
    _name_points(sheet, plot, points)
    for point in points:
        x, y = plot.at(point.intensity, point.speed)
        draw_symbol(sheet, lines[point.link], x, y, tip=_in_words(point, roofs, peak))
    return end


def _name_points(sheet: Sheet, plot: Plot, points: list[_Point]) -> None:
    """A thin line through the points of each plan, and its name below, lower where another name stands already."""
    taken: list[tuple[float, float]] = []
    for name in dict.fromkeys(point.name for point in points):
        own = [plot.at(point.intensity, point.speed) for point in points if point.name == name]
        draw_line(sheet, None, sorted(own))
        x, y = sum(x for x, _ in own) / len(own), own[0][1] + 20
        while any(abs(x - other) < 160 and abs(y - height) < 16 for other, height in taken):
            y += 16
        halo = {"stroke": BACKGROUND, "stroke_width": 4, "paint_order": "stroke"}
        sheet.text(x, y, name, text_anchor="middle", **halo)
        taken.append((x, y))


def _count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{number(value / size)}{unit}"
    return number(value)


def _in_words(point: _Point, roofs: Mapping[str, float], peak: float) -> str:
    share = percent(point.speed / _roof(point.intensity, roofs[point.link], peak))
    return (
        f"{point.name} over {point.link}: {_count(point.intensity)} FLOPs a byte, "
        f"{number(point.speed / TERA)} TFLOP/s, {share} of its roof"
    )


def _summary(points: list[_Point], roofs: Mapping[str, float], peak: float) -> str:
    ridges = " and ".join(f"{_count(peak / bandwidth)} for {link}" for link, bandwidth in roofs.items())
    text = f"To compute at full speed a plan needs so many FLOPs for each byte it sends: {ridges}"
    if not points:
        return f"{text}; these plans send nothing."
    nearest = min(points, key=lambda point: point.intensity * roofs[point.link])
    return f"{text}; nearest to the slope is {_in_words(nearest, roofs, peak)}."


def _row(point: _Point, roofs: Mapping[str, float], peak: float) -> dict[str, object]:
    return {
        "plan": point.name,
        "link": point.link,
        "FLOPs a byte": point.intensity,
        "TFLOP/s": point.speed / TERA,
        "roof (TFLOP/s)": _roof(point.intensity, roofs[point.link], peak) / TERA,
    }


def _plotly(points: list[_Point], roofs: Mapping[str, float], peak: float, title: str | None) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    for (link, bandwidth), line in zip(roofs.items(), LINES, strict=False):
        ridge = peak / bandwidth
        dash = {"color": line.color, "dash": line.dash.replace(",", "px,") + "px" if line.dash else "solid"}
        intensities = [ridge / 100, ridge, 1e4 * max(peak / slowest for slowest in roofs.values())]
        speeds = [_roof(intensity, bandwidth, peak) / TERA for intensity in intensities]
        figure.add_scatter(x=intensities, y=speeds, name=link, mode="lines", line=dash)
        own = [point for point in points if point.link == link]
        figure.add_scatter(
            x=[point.intensity for point in own],
            y=[point.speed / TERA for point in own],
            text=[point.name for point in own],
            name=f"plans over {link}",
            mode="markers+text",
            textposition="bottom center",
            marker={"color": line.color, "symbol": line.symbol, "size": 10, "line": {"color": INK, "width": 0.5}},
        )
    figure.update_xaxes(type="log", title_text="FLOPs for each byte that a device sends over the link")
    figure.update_yaxes(type="log", title_text="TFLOP/s of a device")
    return on_card(figure, title, {"modelled"})
