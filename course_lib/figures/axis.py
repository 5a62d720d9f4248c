"""Round numbers for axes, and quantities in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

Units = Sequence[tuple[float, str]]  # size and name of each unit, the largest first

TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
LONG_TIMES = ((365.25 * 86_400, "years"), (86_400, "days"), (3_600, "hours"), *TIMES)
DATA = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
MEMORY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def ticks(limit: float, count: int) -> list[float]:
    """About `count` round numbers (steps of 1, 2 or 5 times a power of ten) from 0 up to `limit`."""
    if limit <= 0:
        return [0.0]
    rough = limit / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [i * step for i in range(math.floor(limit / step * (1 + 1e-9)) + 1)]


def unit_of(value: float, units: Units) -> tuple[float, str]:
    """The largest unit that a quantity reaches, or the smallest: its size and its name."""
    return next((unit for unit in units if (value or 1) >= unit[0]), units[-1])


def doubled(most: float, usual: float) -> tuple[float, str]:
    """The end of an axis that usually has this length, doubled until it has room for the most; and words that say so.

    usual: 0 for an axis that just fits.
    """
    times = 2 ** max(0, math.ceil(math.log2(most / usual) - 1e-9)) if usual and most else 1
    return usual * times or most, f"axis {times} times as long as usual" if times > 1 else ""


def number(value: float) -> str:
    """A number with three significant digits, without an exponent or trailing zeros."""
    if not (value and math.isfinite(value)):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def counted(count: float, noun: str) -> str:
    """A number with its noun: "1 rank", "4 ranks"."""
    return f"{number(count)} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def in_words(count: int) -> str:
    """A small number of things as a word: 7 is "seven"; above twenty in digits."""
    words = (
        "zero one two three four five six seven eight nine ten eleven twelve "
        "thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty"
    )
    return dict(enumerate(words.split())).get(count, str(count))


def listed(parts: Sequence[str]) -> str:
    """Parts joined as "one, another and a third"."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def thousands(value: float) -> str:
    """A number with commas: 20000 is "20,000"."""
    return f"{value:,.9g}"


def duration(seconds: float) -> str:
    """A time with its unit: 0.0123 is "12.3 ms"."""
    return _in_units(seconds, TIMES)


def long_time(seconds: float) -> str:
    """A time that may last days or years: 200000 is "2.31 days"."""
    return _in_units(seconds, LONG_TIMES)


def data_size(count: float) -> str:
    """A number of bytes with its unit: 4096 is "4.1 kB"."""
    return _in_units(count, DATA)


def memory_size(count: float) -> str:
    """A number of bytes in powers of 1024, as memory is sold: 2**30 is "1 GiB"."""
    return _in_units(count, MEMORY)


def _in_units(value: float, units: Units) -> str:
    size, name = unit_of(value, units)
    return f"{number(value / size)} {name}"


def powers(low: float, high: float) -> list[float]:
    """Round numbers for a logarithmic axis: powers of ten, and if there are few, 2 and 5 times them."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    marks = (10.0**exponent * factor for exponent in exponents for factor in factors)
    return [mark for mark in marks if low * (1 - 1e-9) <= mark <= high * (1 + 1e-9)]


def percent(share: float) -> str:
    """A share from 0 to 1 in whole percent; 0% and 100% only if it is exactly that."""
    if 0 < share < 0.005:
        return "under 1%"
    if 0.995 <= share < 1 - 1e-9:
        return "over 99%"
    return f"{share:.0%}"
