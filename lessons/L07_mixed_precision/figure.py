"""The picture of the sizes of a gradient's numbers, and of the range of a format.

share |    becomes zero |        float16 holds          | becomes infinite
      |                 |              # #              |
      |                /|/           # # # #            |
      |              / /|/ #       # # # # # #          |
       -40        -25               -10            0   16    powers of two
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from course_lib.figures.axis import percent, ticks
from course_lib.figures.chart import Axis, Bar, Chart, Label, Mark, Panel, Point, Rule
from course_lib.figures.palette import STYLES, Style
from course_lib.figures.picture import Picture, table

if TYPE_CHECKING:
    from lessons.L07_mixed_precision.runs import Format

FATES: dict[str, Style] = {
    "zero": STYLES["wait"]._replace(label="becomes zero"),
    "kept": STYLES["forward"]._replace(label="kept"),
    "infinite": STYLES["backward"]._replace(label="becomes infinite"),
}
DIGITS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
AXIS = (-40, 36)  # powers of two, always drawn, so that pictures can be compared
FEW = 0.001  # a share too small to be seen, so no axis is extended for it


def number_range(shares: Mapping[int, float], holds: Format, width: int = 560, title: str | None = None) -> Picture:
    """Draw the sizes of numbers beside the range of a format, and the shares that it loses.

    shares: for each e the share of numbers with 2^e <= |number| < 2^(e + 1), from `exponents`.

    Raises ValueError if there is nothing to draw.
    """
    if not shares:
        raise ValueError("shares is empty; give exponents(gradients) of gradients that are not all zero")
    whole = sum(shares.values())
    shares = {exponent: share / whole for exponent, share in shares.items()}  # zeros are zeros in every format
    chart = Chart([_panel(shares, holds)], {"measured"}, title, width, FATES)
    rows = [(_size(e), percent(share), FATES[fate(e, holds)].label) for e, share in sorted(shares.items())]
    return Picture.of(chart, _summary(shares, holds), table(("size", "share", f"in {holds.name}"), rows))


def _size(exponent: int) -> str:
    return f"{power(exponent)} to {power(exponent + 1)}"


def power(exponent: float) -> str:
    """A power of two as text: -25 is "2⁻²⁵"."""
    return f"2{str(round(exponent)).translate(DIGITS)}"


def fate(exponent: int, holds: Format) -> str:
    """The fate of numbers from 2^exponent up to twice that: "zero", "kept" or "infinite"."""
    if exponent < holds.lowest:
        return "zero"
    return "kept" if exponent < holds.highest else "infinite"


def lost(shares: Mapping[int, float], holds: Format) -> dict[str, float]:
    """The share of the numbers that meets each fate."""
    whole = sum(shares.values())
    return {part: sum(one for e, one in shares.items() if fate(e, holds) == part) / whole for part in FATES}


def _summary(shares: Mapping[int, float], holds: Format) -> str:
    zero, _, infinite = lost(shares, holds).values()
    seen = _seen(shares)
    which = "The" if len(seen) == len(shares) else "Nearly all"
    return (
        f"{which} numbers lie between {power(seen[0])} and {power(seen[-1] + 1)}. {holds.name} holds "
        f"{power(holds.lowest)} to {power(holds.highest)}, so {percent(zero)} of them become zero and "
        f"{percent(infinite)} infinite."
    )


def _seen(shares: Mapping[int, float]) -> list[int]:
    return sorted(exponent for exponent, share in shares.items() if share >= FEW)


def _panel(shares: Mapping[int, float], holds: Format) -> Panel:
    seen = _seen(shares)
    low, high = min(AXIS[0], seen[0]), max(AXIS[1], seen[-1] + 1)
    highest = 1.25 * max(shares.values())  # room above the bars for text
    tens = [exponent for exponent in range(-200, 200, 10) if low <= exponent <= high]
    across = Axis("size of the numbers", low, high, tens, power)
    up = Axis("share of the numbers", 0, highest, ticks(highest, 4), percent)
    first, last = max(holds.lowest, low), min(holds.highest, high)
    beyond = [ends for ends in ((low, first), (last, high)) if ends[0] < ends[1]]
    name = Label(f"what {holds.name} holds", down=-4, anchor="middle", size=11, is_bold=False)
    marks: list[Mark] = []
    for exponent in seen:
        part, share = fate(exponent, holds), shares[exponent]
        tip = f"{_size(exponent)}: {percent(share)}, {FATES[part].label} in {holds.name}"
        marks.append(Bar(part, FATES[part], exponent + 0.5, share, 0.0, tip))
    marks += [*_edges(shares, holds, low, high), Point((first + last) / 2, highest, "", name)]
    return Panel(across, up, marks, height=150.0, right=20.0, head=16.0, shaded=beyond)


def _edges(shares: Mapping[int, float], holds: Format, low: int, high: int) -> Iterator[Rule]:
    """Rules where the format ends, with the shares beyond them."""
    share_of = lost(shares, holds)
    for exponent, name, anchor, aside in ((holds.lowest, "zero", "end", -6), (holds.highest, "infinite", "start", 6)):
        if low < exponent < high:
            text = f"{percent(share_of[name])} {name}".replace("under ", "<")
            yield Rule(exponent, Label(text, right=aside, down=16, anchor=anchor))
