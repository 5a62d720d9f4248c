"""The look of each kind of span: a color that color-blind readers can tell apart, and a pattern for everyone.

The colors are close to those of Okabe and Ito 2008, "Color Universal Design". Each pattern is drawn on a tile of
8 by 8 pixels in a second shade, and text on a bar is readable over both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

INK = "#1a1a1a"
PAPER = "#ffffff"
LIKELY = "where 90% of such runs lie"  # the name of ranges around estimates in the legend


RISING, FALLING = "M-2,2l4,-4M0,8l8,-8M6,10l4,-4", "M-2,6l4,4M0,0l8,8M6,-2l4,4"
PATTERNS = {  # SVG path data, by the character that looks most like it
    "": "",
    "/": RISING,
    "\\": FALLING,
    "x": RISING + FALLING,
    "|": "M2,0v8M6,0v8",
    "-": "M0,2h8M0,6h8",
    ".": "M2,1v2M6,5v2",
    "+": "M0,4h8M4,0v8",
}


class Style(NamedTuple):
    """The look of a kind of span. label: its name in the legend. fill, shade: colors of the bar and its pattern.

    text: a color that is readable over both."""

    label: str
    fill: str
    shade: str
    shape: str = ""
    text: str = INK

    @property
    def path(self) -> str:
        return PATTERNS[self.shape]


STYLES = {
    "forward": Style("forward", "#8bcbf1", "#8bcbf1"),
    "backward": Style("backward", "#d98600", "#ffc04d", "/"),
    "weight_grad": Style("weight gradient", "#2fb58b", "#7fe0c0", "x"),
    "optimizer": Style("optimizer", "#cc79a7", "#ecc3d9", "|"),
    "other": Style("other", "#c4c4c4", "#8c8c8c", "."),
    "transfer": Style("transfer", "#0072b2", "#00497a", "-", PAPER),
    "wait": Style("wait", PAPER, "#8a8a8a", "\\", "#333333"),  # dark on white, or white on dark
}

# The color of a rank's share, for up to eight ranks; none is that of a kind of span.
RANKS = (
    Style("rank 0", "#ff9d8a", "#ff9d8a"),
    Style("rank 1", "#ffc04d", "#c98a00", "/"),
    Style("rank 2", "#b7cf5a", "#7d9420", "\\"),
    Style("rank 3", "#ecc3d9", "#cc79a7", "|"),
    Style("rank 4", "#f0e442", "#b5a800", "-"),
    Style("rank 5", "#d4d4d4", "#8c8c8c", "."),
    Style("rank 6", "#c3bdff", "#8f86e8", "x"),
    Style("rank 7", "#d9a98a", "#a8703f", "+"),
)

ORIGINS = {
    "measured": "measured (in a real run)",
    "emulated": "emulated (real processes and messages, emulated clock)",
    "modelled": "modelled (calculated, not run)",
}


class Line(NamedTuple):
    """The look of one line of a chart. symbol: one of plotly's marker names.

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
    """The looks of lines, by name. Raises ValueError for more lines than can be told apart."""
    known = list(names)
    if len(known) > len(LINES):
        raise ValueError(f"{len(known)} lines cannot be told apart; draw at most {len(LINES)} in one chart")
    return dict(zip(known, LINES, strict=False))


# The same colors for dots, except the second one, which is for lines drawn over them.
DOTS = (LINES[0], LINES[2], LINES[3], Line("#767676", None, "cross"), Line("#9a7d0a", None, "triangle-down"))
