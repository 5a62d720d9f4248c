"""Numbers as students write them, and the slips that happen with their units."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from course_lib.classroom.pages import sections

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {
    **{f"{prefix}B": factor for prefix, factor in {**_PREFIXES, **_BINARY}.items()},
    **{f"{prefix}bit": factor / 8 for prefix, factor in {**_PREFIXES, **_BINARY}.items()},
    "byte": 1.0,
    "bytes": 1.0,
    "bits": 1 / 8,
}


class Quantity(NamedTuple):
    """The quantity asked for. units: those that may stand after the number, in terms of the first one."""

    name: str
    units: dict[str, float]
    example: str


class Slip(NamedTuple):
    """A factor by which an answer may be off, and its meaning."""

    factor: float
    text: str


BYTES = Quantity("a number of bytes", _BYTES, "12 MB")
TIMES = Quantity("a factor", {"times": 1.0, "x": 1.0, "×": 1.0, "": 1.0}, "6.5 times")
SAMPLES = Quantity("a number of samples", {"samples": 1.0, "sample": 1.0, "": 1.0}, "16 samples")
_TIME = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "min": 60.0, "h": 3600.0, "sec": 1.0, "seconds": 1.0}
SECONDS = Quantity("a time", _TIME, "1.5 s")
SHARE = Quantity("a share", {"%": 0.01, "percent": 0.01, "per cent": 0.01, "": 1.0}, "25%")

_SAID = {heading[2:]: text for _, heading, text in sections(Path(__file__).with_name("slips.md"))}


def _slips(name: str, *factors: float) -> list[Slip]:
    return [Slip(factor, _SAID[name]) for factor in factors]


USUAL = {
    BYTES.name: [
        *_slips("bits", 8, 1 / 8),
        *_slips("1024", *(1.024**power for power in (-3, -2, -1, 1, 2, 3))),
        *_slips("thousand", 1e-6, 1e-3, 1e3, 1e6),
    ],
    SECONDS.name: [*_slips("thousand", 1e-6, 1e-3, 1e3, 1e6), *_slips("minutes", 60, 1 / 60)],
    SHARE.name: _slips("percent", 100, 0.01),
}


def parse(text: str, quantity: Quantity) -> float:
    """The number in the first of the quantity's units: parse("1,200 kB", BYTES) is 1.2e6.

    Raises ValueError, saying what would work, for text without a number or with another unit.
    """
    digits = r"(?:\d{1,3}(?:[,_]\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,2})?"
    found = re.fullmatch(rf"({digits})\s*([^\d\s,.].*)?", text.strip())
    if not found and (comma := re.match(r"\s*(\d+),(\d+)", text)):
        raise ValueError(f"{text!r} has a comma among its digits; write {comma[1]}.{comma[2]} with a point")
    if not found:
        raise ValueError(f"{text!r} is not {quantity.name}; write for instance {quantity.example!r}")
    number, unit = re.sub("[,_]", "", found[1]), found[2] or ""
    if unit not in quantity.units:
        known = ", ".join(name for name in quantity.units if name)
        problem = f"{unit!r} is not a unit of {quantity.name}" if unit else f"{text!r} has no unit"
        raise ValueError(f"{problem}; write for instance {quantity.example!r}, with one of {known}")
    return float(number) * quantity.units[unit]


def explain(given: float, true: float, quantity: Quantity, slips: tuple[Slip, ...], tolerance: float) -> str:
    """The slip that leads from the true value to the given one; "" if no known one does."""
    for slip in (*slips, *USUAL.get(quantity.name, [])):
        if is_close(given, true * slip.factor, tolerance):
            return slip.text
    return ""


def is_close(given: float, true: float, tolerance: float) -> bool:
    """tolerance: a share of the true value, 0 to 1."""
    return abs(given - true) <= tolerance * abs(true)
