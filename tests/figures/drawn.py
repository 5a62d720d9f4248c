"""Functions that read pictures back from their SVG."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import NamedTuple

import plotly.graph_objects as go

from course_lib.figures import Picture, chart_plotly

SVG = "{http://www.w3.org/2000/svg}"


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    fill: str
    tip: str


def zoomable(picture: Picture) -> go.Figure:
    """The plotly figure that a notebook shows for a chart."""
    assert picture.chart is not None
    return go.Figure(chart_plotly.figure(picture.chart))


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def texts(svg: str) -> list[str]:
    """Every text in the picture, from first to last."""
    return [element.text or "" for element in parsed(svg).iter(f"{SVG}text")]


def written(svg: str) -> list[tuple[str, float, float]]:
    """Each text, and its place."""
    return [(e.text or "", float(e.attrib["x"]), float(e.attrib["y"])) for e in parsed(svg).iter(f"{SVG}text")]


def places(svg: str) -> dict[str, tuple[float, float]]:
    """The place of each text that occurs once."""
    return {text: (x, y) for text, x, y in written(svg)}


def boxes(svg: str) -> list[Box]:
    """The boxes with a tooltip: bars, and the places of points."""
    found = []
    for element in parsed(svg).iter(f"{SVG}rect"):
        tip = element.find(f"{SVG}title")
        if tip is not None:
            x, y, width, height = (float(element.attrib[name]) for name in ("x", "y", "width", "height"))
            found.append(Box(x, y, width, height, kind_of(element.attrib["fill"]), tip.text or ""))
    return found


def strips(svg: str) -> list[Box]:
    """The pieces of the shapes in which many narrow bars are joined."""
    found = []
    for element in parsed(svg).iter(f"{SVG}path"):
        tip = element.find(f"{SVG}title")
        if tip is not None:
            for x, y, width, height in re.findall(r"M([\d.]+),([\d.]+)h([\d.]+)v([\d.]+)h-", element.attrib["d"]):
                fill = kind_of(element.attrib["fill"])
                found.append(Box(float(x), float(y), float(width), float(height), fill, tip.text or ""))
    return found


def kind_of(fill: str) -> str:
    """The kind that a fill stands for, or the plain color."""
    named = re.fullmatch(r"url\(#\w+-(\w+)\)", fill)
    return named[1] if named else fill


def ids(svg: str) -> list[str]:
    return [element.attrib["id"] for element in parsed(svg).iter() if "id" in element.attrib]


def references(svg: str) -> set[str]:
    return set(re.findall(r"url\(#([^)]+)\)", svg))
