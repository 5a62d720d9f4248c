"""Round numbers for axes, and quantities as people write them."""

from __future__ import annotations

import math

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def ticks(limit: float, count: int) -> list[float]:
    """About `count` round numbers (steps of 1, 2 or 5 times a power of ten) from 0 up to `limit`."""
    if limit <= 0:
        return [0.0]
    rough = limit / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [i * step for i in range(math.floor(limit / step * (1 + 1e-9)) + 1)]


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in which a time is written: how many seconds it has, and its name."""
    if seconds == 0:
        return UNITS[0]
    return next(((size, name) for size, name in UNITS if seconds >= size), UNITS[-1])


def number(value: float) -> str:
    """Three significant digits, without an exponent and without zeros that say nothing."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(seconds: float) -> str:
    """A time with its unit: 0.0123 is "12.3 ms"."""
    size, name = time_unit(seconds)
    return f"{number(seconds / size)} {name}"


def data_size(count: int) -> str:
    """A number of bytes with its unit: 4096 is "4.1 kB"."""
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{number(count / size)} {name}"
    return f"{count} B"


def percent(share: float) -> str:
    """A share from 0 to 1 in whole percent; something is never called nothing, nor everything."""
    if 0 < share < 0.005:
        return "under 1%"
    if 0.995 <= share < 1 - 1e-9:
        return "over 99%"
    return f"{share:.0%}"
