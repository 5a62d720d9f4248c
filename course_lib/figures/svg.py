"""A sheet to draw on, written out as SVG."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any, NamedTuple

from course_lib.figures.palette import INK, PAPER, Style

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
# Placeholders for values known only when the sheet is written. No text contains them: they are not XML.
TITLED = re.compile(r"><title>[^<]*</title></\w+>")
UNSEEN = re.compile(r'<rect[^>]*pointer-events="all"/>')
HIDDEN = re.compile(r'<g [^>]*visibility="hidden"[^>]*>.*?</g>')
KEY, BACKGROUND = "\x00", "\x01"
PIXEL = "var(--jp-content-font-size1,14px) / 14"
# The style of containers of pictures, which grow with the text of JupyterLab's page and with the room, until their
# smallest labels have 16 pixels: in width up to the widest picture, in height up to a notebook on a 1280 x 800 page.
ROOMY = f"container-type:inline-size;--course-pixel:max({PIXEL},min({PIXEL}*16/11,100cqw/840,(100vh - 121px)/679))"
# The colors of an image on a dark page, and the size of its labels on a projector. An image cannot see the page's
# variables, but it is told this much of it, and how wide it is.
AS_IMAGE = (
    "<style>@media(prefers-color-scheme:dark){svg{--jp-ui-font-color1:rgba(255,255,255,0.87);"
    "--jp-layout-color0:#111}}@media(min-width:1400px){text:not([font-size='14']){font-size:14px;font-weight:400}}</style>"
)
# Attributes of a text over lines or patterns: a margin in the color of the background.
HALO = {"stroke": BACKGROUND, "stroke_width": 4, "paint_order": "stroke"}


class Tip(NamedTuple):
    """A tooltip: a place on the sheet, in pixels, and the text shown when the mouse rests there."""

    x: float
    y: float
    width: float
    height: float
    text: str


class Sheet:
    """Elements in the order of painting, in pixels from the top left. Set `height` before writing it."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.height = 0.0
        self.tips: list[Tip] = []
        self._body: list[str] = []
        self._patterns: dict[str, str] = {}

    def box(self, x: float, y: float, width: float, height: float, tip: str = "", **attributes: object) -> None:
        if tip:
            self.tips.append(Tip(x, y, width, height, tip))
        self._add("rect", {"x": x, "y": y, "width": width, "height": height, **attributes}, tip=tip)

    def text(self, x: float, y: float, text: object, **attributes: object) -> None:
        self._add("text", {"x": x, "y": y, **attributes}, str(text))

    def line(self, x1: float, y1: float, x2: float, y2: float, **attributes: object) -> None:
        self._add("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, **attributes})

    def circle(self, cx: float, cy: float, r: float, **attributes: object) -> None:
        self._add("circle", {"cx": cx, "cy": cy, "r": r, **attributes})

    def path(self, data: str, tip: str = "", **attributes: object) -> None:
        self._add("path", {"d": data, **attributes}, tip=tip)

    def _add(self, tag: str, attributes: dict[str, object], text: str = "", tip: str = "") -> None:
        start, content = f"<{tag}{_attributes(attributes)}", f"<title>{clean(tip)}</title>" if tip else clean(text)
        self._body.append(f"{start}>{content}</{tag}>" if content else f"{start}/>")

    @contextmanager
    def group(self, **attributes: object) -> Iterator[None]:
        """Give these attributes to everything drawn in the block."""
        self._body.append(f"<g{_attributes(attributes)}>")
        yield
        self._body.append("</g>")

    def fill(self, name: str, style: Style) -> str:
        """The value of the `fill` attribute for a style: its color, or a reference to its pattern."""
        if not style.path:
            return style.fill
        ground = BACKGROUND if style.fill == PAPER else style.fill
        self._patterns[name] = (
            f'<pattern id="{KEY}-{name}" width="8" height="8" patternUnits="userSpaceOnUse">'
            f'<rect width="8" height="8" fill="{ground}" stroke="none"/>'
            f'<path d="{style.path}" stroke="{style.shade}" stroke-width="1.2" fill="none"/></pattern>'
        )
        return f"url(#{KEY}-{name})"

    def write(self, label: str, themed: bool = False, tips: bool = True, key: str = "") -> str:
        """The sheet as SVG. The same drawing gives the same text.

        label: read aloud instead of the picture. tips: whether the mouse shows them.
        key: the prefix of the ids of patterns, by default a hash of the drawing.
        themed: take the colors of text and background from JupyterLab's theme, which only works if the SVG is part of
            the page; an image is dark on a white card, or light on a dark one where the page around it is dark.
        """
        fit = f"width:{scaled(self.width)}" if themed else "max-width:100%"
        ink, ground = f"var(--jp-ui-font-color1,{INK})", f"var(--jp-layout-color0,{PAPER})"
        size = _attributes({"width": self.width, "height": self.height})
        markup = (
            f'<svg xmlns="http://www.w3.org/2000/svg"{size} viewBox="0 0 {_short(self.width)} {_short(self.height)}"'
            f' style="color:{ink};{fit};height:auto" font-family="{FONT}" font-size="12" fill="currentColor"'
            f' role="img" aria-label="{clean(label)}">{"" if themed else AS_IMAGE}'
            f"<defs>{''.join(self._patterns.values())}</defs>"
            f'<rect{size} rx="4" fill="{BACKGROUND}"/>{"".join(self._body)}</svg>'
        )
        if not tips:
            markup = UNSEEN.sub("", TITLED.sub("/>", markup))
        if not themed:  # no player can reach an image
            markup = HIDDEN.sub("", markup)
        key = key or "p" + hashlib.sha1(markup.encode()).hexdigest()[:8]
        return markup.replace(KEY, key).replace(BACKGROUND, ground)


def moving(periods: Iterable[tuple[float, float]], still: float | None = None) -> dict[str, Any]:
    """Attributes of an element that a player shows only in these periods, which are fractions of its whole time.

    still: the moment that a picture shows without a player.
    """
    found = list(periods)
    when = {"data_when": " ".join(f"{start:.4f} {min(end, 2):.4f}" for start, end in found)}
    is_there = still is not None and any(start <= still < end for start, end in found)
    return when if is_there else {**when, "visibility": "hidden"}


def clean(text: str) -> str:
    """Text escaped for XML and HTML, in elements and in attributes."""
    return escape(NOT_XML.sub("\ufffd", text))


def scaled(pixels: float) -> str:
    """A CSS length: `pixels` with JupyterLab's usual text of 14 pixels, growing with the text and the room."""
    return f"calc({pixels:g} * var(--course-pixel,{PIXEL}))"


def text_width(text: str, size: float = 12) -> float:
    """The approximate width of a text in pixels; fonts differ, so this is rather too much."""
    return 0.62 * size * len(text)


def _attributes(values: dict[str, object]) -> str:
    return "".join(f' {name.replace("_", "-")}="{_short(value)}"' for name, value in values.items())


def _short(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
