"""How each kind of span looks: a color that color-blind readers can tell apart, and a pattern for everyone.

The colors are close to those of Okabe and Ito 2008, "Color Universal Design". Each pattern is drawn on a tile of
8 by 8 pixels in a second shade, and text on a bar is readable over both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

INK = "#1a1a1a"
PAPER = "#ffffff"
OPACITY = {False: 0.9, True: 0.35}  # of dots, by whether they are pale
LIKELY = "where 90% of such runs lie"  # what the legend calls the ranges around estimates


class Style(NamedTuple):
    """label: what the legend calls it. fill, shade: of the bar and of its pattern. text: readable over both.

    path: the pattern as SVG path data, empty for a plain bar. shape: the nearest of plotly's patterns.
    """

    label: str
    fill: str
    shade: str
    text: str
    path: str
    shape: str


RISING = "M-2,2l4,-4M0,8l8,-8M6,10l4,-4"
FALLING = "M-2,6l4,4M0,0l8,8M6,-2l4,4"

STYLES = {
    "forward": Style("forward", "#8bcbf1", "#8bcbf1", INK, "", ""),
    "backward": Style("backward", "#d98600", "#ffc04d", INK, RISING, "/"),
    "weight_grad": Style("weight gradient", "#2fb58b", "#7fe0c0", INK, RISING + FALLING, "x"),
    "optimizer": Style("optimizer", "#cc79a7", "#ecc3d9", INK, "M2,0v8M6,0v8", "|"),
    "other": Style("other", "#c4c4c4", "#8c8c8c", INK, "M2,1v2M6,5v2", "."),
    "transfer": Style("transfer", "#0072b2", "#00497a", PAPER, "M0,2h8M0,6h8", "-"),
    "wait": Style("wait", PAPER, "#8a8a8a", INK, FALLING, "\\"),
}

# Whose share it is, for up to eight ranks.
RANKS = tuple(
    Style(f"rank {rank}", *look)
    for rank, look in enumerate(
        (
            ("#8bcbf1", "#8bcbf1", INK, "", ""),
            ("#ffc04d", "#c98a00", INK, RISING, "/"),
            ("#7fe0c0", "#2fb58b", INK, FALLING, "\\"),
            ("#ecc3d9", "#cc79a7", INK, "M2,0v8M6,0v8", "|"),
            ("#f0e442", "#b5a800", INK, "M0,2h8M0,6h8", "-"),
            ("#d4d4d4", "#8c8c8c", INK, "M2,1v2M6,5v2", "."),
            ("#c3bdff", "#8f86e8", INK, RISING + FALLING, "x"),
            (PAPER, "#8a8a8a", INK, "M0,4h8M4,0v8", "+"),
        )
    )
)

ORIGINS = {
    "measured": "measured (in a real run)",
    "emulated": "emulated (real processes and messages, emulated clock)",
    "modelled": "modelled (calculated, not run)",
}


class Line(NamedTuple):
    """How one line of a chart looks; symbol: one of plotly's marker names.

    dash: lengths in pixels, "" for a line without gaps, None for symbols alone.
    """

    color: str
    dash: str | None
    symbol: str


Look = Style | Line | None  # in a legend; None is a thin line

# Each is at least 3:1 against white and against the near-black of a dark theme.
LINES = (
    Line("#0072b2", "", "circle"),
    Line("#d55e00", "7,3", "square"),
    Line("#009e73", "2,3", "diamond"),
    Line("#b5578f", "9,3,2,3", "triangle-up"),
)


def lines_of(names: Iterable[str]) -> dict[str, Line]:
    """How the lines with these names look. Raises ValueError for more than can be told apart."""
    known = list(names)
    if len(known) > len(LINES):
        raise ValueError(f"{len(known)} lines cannot be told apart; draw at most {len(LINES)} in one chart")
    return dict(zip(known, LINES, strict=False))


# More of the kind, for dots; apart from the second, which is left to what lies over them.
DOTS = (LINES[0], LINES[2], LINES[3], Line("#767676", None, "cross"), Line("#9a7d0a", None, "triangle-down"))
