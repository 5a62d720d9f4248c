"""How large the numbers of a gradient are, and what a format makes of them.

share |    becomes zero |        float16 holds          | becomes infinite
      |                 |              # #              |
      |                /|/           # # # #            |
      |              / /|/ #       # # # # # #          |
       -40        -25               -10            0   16    powers of two
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from course_lib.figures.axis import percent, ticks
from course_lib.figures.frame import draw_legend, draw_origins, draw_title, new_sheet, on_card
from course_lib.figures.palette import STYLES, Style
from course_lib.figures.picture import Picture, Row
from course_lib.figures.plot import Axis, Plot, Scale, draw_axes
from course_lib.figures.svg import HALO, Sheet

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from course_lib.experiments.ablations import Format

LEFT, RIGHT, HEIGHT = 56.0, 20.0, 190.0
FATES: dict[str, Style] = {
    "zero": STYLES["wait"]._replace(label="becomes zero"),
    "kept": STYLES["forward"]._replace(label="kept"),
    "infinite": STYLES["backward"]._replace(label="becomes infinite"),
}
DIGITS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
AXIS = (-40, 36)  # powers of two that are always drawn, so that pictures can be compared
FEW = 0.001  # a share too small to be seen, which makes no axis longer


def number_range(shares: Mapping[int, float], holds: Format, width: int = 560, title: str | None = None) -> Picture:
    """Draw how large numbers are beside the range of a format, and how many of them it loses.

    shares: for each e the share of numbers with 2^e <= |number| < 2^(e + 1), from `ablations.exponents`.

    Raises ValueError if there is nothing to draw.
    """
    if not shares:
        raise ValueError("shares is empty; give exponents(gradients) of gradients that are not all zero")
    whole = sum(shares.values())
    shares = {exponent: share / whole for exponent, share in shares.items()}  # zeros are zeros in every format
    sheet = new_sheet(width)
    y = draw_title(sheet, title)
    y = draw_origins(sheet, {"measured"}, y)
    y = draw_legend(sheet, FATES, y)
    sheet.height = _draw(sheet, shares, holds, y + 16)
    rows = [_row(exponent, share, holds) for exponent, share in sorted(shares.items())]
    return Picture(sheet, _summary(shares, holds), rows, lambda: _plotly(shares, holds, title))


def _row(exponent: int, share: float, holds: Format) -> Row:
    return {
        "size": f"{power(exponent)} to {power(exponent + 1)}",
        "share": percent(share),
        f"in {holds.name}": FATES[fate(exponent, holds)].label,
    }


def power(exponent: int) -> str:
    """-25 is "2⁻²⁵"."""
    return f"2{str(exponent).translate(DIGITS)}"


def fate(exponent: int, holds: Format) -> str:
    """What becomes of numbers from 2^exponent up to twice that."""
    if exponent < holds.lowest:
        return "zero"
    return "kept" if exponent < holds.highest else "infinite"


def lost(shares: Mapping[int, float], holds: Format) -> dict[str, float]:
    """Which share of the numbers meets which fate."""
    shares_of = dict.fromkeys(FATES, 0.0)
    for exponent, share in shares.items():
        shares_of[fate(exponent, holds)] += share / sum(shares.values())
    return shares_of


def _summary(shares: Mapping[int, float], holds: Format) -> str:
    zero, _, infinite = lost(shares, holds).values()
    seen = _seen(shares)
    return (
        f"The numbers lie between {power(seen[0])} and {power(seen[-1] + 1)}. {holds.name} holds "
        f"{power(holds.lowest)} to {power(holds.highest)}, so {percent(zero)} of them become zero and "
        f"{percent(infinite)} infinite."
    )


def _seen(shares: Mapping[int, float]) -> list[int]:
    return sorted(exponent for exponent, share in shares.items() if share >= FEW)


def _draw(sheet: Sheet, shares: Mapping[int, float], holds: Format, top: float) -> float:
    seen = _seen(shares)
    across = Scale(min(AXIS[0], seen[0]), max(AXIS[1], seen[-1] + 1))
    highest = 1.25 * max(shares.values())  # with room above the bars for what is written there
    plot = Plot(LEFT, sheet.width - RIGHT, top, top + HEIGHT, across, Scale(0, highest))
    with sheet.group(fill="currentColor", fill_opacity=0.1):
        for low, high in ((across.low, holds.lowest), (holds.highest, across.high)):
            left, right = (min(max(plot.at(x, 0)[0], plot.left), plot.right) for x in (low, high))
            if right > left:
                sheet.box(left, top, right - left, HEIGHT)
    tens = [x for x in range(-200, 200, 10) if across.low <= x <= across.high]
    end = draw_axes(
        sheet,
        plot,
        Axis("size of the numbers", tens, lambda x: power(round(x))),
        Axis("share of the numbers", ticks(highest, 4), percent),
    )
    _draw_bars(sheet, plot, {exponent: shares[exponent] for exponent in seen}, holds)
    _draw_edges(sheet, plot, shares, holds)
    return end


def _draw_bars(sheet: Sheet, plot: Plot, shares: Mapping[int, float], holds: Format) -> None:
    for exponent, share in shares.items():
        (x, y), (right, bottom) = plot.at(exponent, share), plot.at(exponent + 1, 0)
        name = fate(exponent, holds)
        tip = f"{power(exponent)} to {power(exponent + 1)}: {percent(share)}, {FATES[name].label} in {holds.name}"
        look = {"fill": sheet.fill(name, FATES[name]), "stroke": "currentColor", "stroke_width": 0.5}
        sheet.box(x, y, right - x, bottom - y, tip=tip, **look)


def _draw_edges(sheet: Sheet, plot: Plot, shares: Mapping[int, float], holds: Format) -> None:
    """Where the format ends, and how much lies beyond."""
    share_of = lost(shares, holds)
    for exponent, name, anchor, aside in ((holds.lowest, "zero", "end", -6), (holds.highest, "infinite", "start", 6)):
        if not plot.x.low < exponent < plot.x.high:
            continue
        x, _ = plot.at(exponent, 0)
        sheet.line(x, plot.top, x, plot.bottom, stroke="currentColor", stroke_width=2, stroke_dasharray="6,3")
        text = f"{percent(share_of[name])} {name}".replace("under ", "<")
        sheet.text(x + aside, plot.top + 16, text, text_anchor=anchor, font_weight="bold", **HALO)
    left = plot.at(max(holds.lowest, plot.x.low), 0)[0]
    right = plot.at(min(holds.highest, plot.x.high), 0)[0]
    sheet.text((left + right) / 2, plot.top - 4, f"what {holds.name} holds", text_anchor="middle", font_size=11)


def _plotly(shares: Mapping[int, float], holds: Format, title: str | None) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    for name, style in FATES.items():
        own = {exponent: share for exponent, share in sorted(shares.items()) if fate(exponent, holds) == name}
        pattern = {"shape": style.shape, "fgcolor": style.shade, "bgcolor": style.fill, "size": 6}
        marker = {"color": style.fill, "pattern": pattern}
        figure.add_bar(x=[e + 0.5 for e in own], y=list(own.values()), name=style.label, marker=marker, width=1)
    figure.update_xaxes(title_text="size of the numbers (powers of two)")
    figure.update_yaxes(title_text="share of the numbers", tickformat=".0%")
    return on_card(figure, title, {"measured"})
