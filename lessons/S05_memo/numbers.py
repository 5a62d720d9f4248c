"""Numbers in prose, compared with those of a plan.

    "Adam's state takes 10 GB of each GPU, and a step takes 8.6 s."    each number, its unit, the sentence around it

agrees        with a figure
differs       by a known slip from a figure of the plan that the sentence names, or is the figure of something else
not checked   all other numbers: a guess is no reason to blame anyone
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from course_lib.classroom.questions.units import BYTES, SECONDS, SHARE, TIMES, Quantity, is_close
from course_lib.figures import axis

AGREES, DIFFERS, NOT_CHECKED = "agrees", "differs", "not checked"
FAR = 1_000_000
TOLERANCE, ROUNDED = 0.03, 0.1  # largest error, as a share of the figure: of any number, of a rounded one
RATE = Quantity("a rate", {f"{name}/s": factor for name, factor in BYTES.units.items()}, "25 GB/s")
PARAMETERS = Quantity("a number of parameters", {"billion": 1e9, "B": 1e9, "million": 1e6}, "7 billion")
COUNT = Quantity("a count", {"": 1.0}, "32")
# Factors of common slips, and their meaning.
SLIPS: dict[float, str] = {
    2: "That is a factor of 2: two bytes or four, once or twice, there or there and back.",
    4: "That is a factor of 4: two bytes or eight, one of four or all four.",
    8: "That is a factor of 8: a byte has eight bits, and a node has eight GPUs.",
    10: "That is a factor of ten: look at the decimal point.",
    32: "That is a factor of 32: one GPU or all of them.",
    1000: "That is a factor of a thousand: look at the prefix of the unit.",
}
BINARY = "Close: GB counts in thousands, GiB in powers of 1024. Which of them do you mean?"
_UNITS = {
    name: (quantity, factor)
    for quantity in (RATE, TIMES, SHARE, SECONDS, BYTES, PARAMETERS, COUNT)  # the last name with a unit has it
    for name, factor in quantity.units.items()
    if "bit" not in name or quantity is RATE  # "in 16 bits" is a format, not an amount
} | {"second": (SECONDS, 1.0), "seconds": (SECONDS, 1.0), "minutes": (SECONDS, 60.0)}
_LISTED = "|".join(re.escape(name) for name in sorted(_UNITS, key=len, reverse=True) if name and name not in "x×")
_NUMBER = re.compile(
    rf"(?<![\w.,/-])(?P<digits>\d+(?:,\d{{3}})*(?P<decimals>\.\d+)?)(?:\s?(?P<unit>{_LISTED})(?![\w/])|(?P<times>[x×])(?!\w)|(?![\w-]|\.\d))"
)
_OTHERWISE = re.compile(
    r"\b(without|would|were|if|instead|otherwise|unless|had|alone|naive\w*|whole|single|one (GPU|device|replica)|twice|"
    r"in place of|rather than|than)\b",
    re.IGNORECASE,
)


class Fact(NamedTuple):
    """A figure that prose may quote. value: in the first of the quantity's units.

    words: a pattern of the words that mean the fact in a sentence; "": no word is needed.
    own: whether it is a fact of the plan itself, so that a number meant to be this one, but wrong, differs.
    beside: whether it is a fact of another plan, which a sentence has to mention.
    """

    name: str
    value: float
    quantity: Quantity
    words: str = ""
    own: bool = False
    beside: bool = False


class Remark(NamedTuple):
    number: str
    verdict: str
    text: str = ""


class _WrittenNumber(NamedTuple):
    written: str
    value: float
    quantity: Quantity
    unit: str
    rounding: float
    before: str
    sentence: str
    start: int

    @property
    def is_otherwise(self) -> bool:
        """Whether its sentence is about another plan than the recommended one."""
        return bool(_OTHERWISE.search(self.sentence))

    def is_close(self, fact: Fact) -> bool:
        rounding = min(self.rounding, ROUNDED * abs(fact.value))
        return abs(self.value - fact.value) <= max(rounding, TOLERANCE * abs(fact.value)) * (1 + 1e-9)

    def distance(self, fact: Fact) -> int:
        """Characters to the nearest word for the fact; FAR - 1 if only the sentence before has one, FAR if none has."""
        pattern = re.compile(rf"\b(?:{fact.words})", re.IGNORECASE)
        found = [abs(match.start() - self.start) for match in pattern.finditer(self.sentence)] if fact.words else [0]
        return min(found, default=FAR - bool(pattern.search(self.before)))

    def slip(self, fact: Fact) -> str:
        """The known slip that leads from the fact to the number; "" if there is none."""
        power = round(math.log(_UNITS[self.unit][1], 1000)) if self.quantity is BYTES else 0  # 3 for GB and for GiB
        off = max(self.value, fact.value) / (min(self.value, fact.value) or math.inf)
        meant = {**SLIPS, 1.024**power: BINARY}
        return next((text for factor, text in meant.items() if is_close(off, factor, TOLERANCE)), "")

    def says(self, fact: Fact) -> str:
        """The fact in the unit of the number."""
        return f"{axis.number(fact.value / _UNITS[self.unit][1])} {self.unit}".replace(" x", "x").replace(" %", "%")


def remarks(text: str, facts: Iterable[Fact]) -> list[Remark]:
    """A remark on each number in a text, in order."""
    known = list(facts)
    return [
        _remark(number, [fact for fact in known if fact.quantity.name == number.quantity.name])
        for number in _numbers(text)
    ]


def _numbers(text: str) -> Iterator[_WrittenNumber]:
    sentences = re.split(r"(?<=[.!?;])\s+|\n+", text)
    for before, sentence in zip(["", *sentences], sentences, strict=False):
        for found in _NUMBER.finditer(sentence):
            unit = found["unit"] or found["times"] or ""
            quantity, factor = _UNITS[unit]
            decimals = len(found["decimals"] or ".") - 1
            value = float(found["digits"].replace(",", ""))
            rounding, where = 0.5 * 10**-decimals * factor, (before, sentence, found.start())
            yield _WrittenNumber(found[0], value * factor, quantity, unit, rounding, *where)


def _remark(number: _WrittenNumber, facts: list[Fact]) -> Remark:
    near = sorted(facts, key=number.distance)
    goes_on = number.is_otherwise or bool(_OTHERWISE.search(number.before))
    close = [fact for fact in near if number.is_close(fact) and (goes_on or not fact.beside)]
    if close and number.distance(close[0]) < FAR:
        return Remark(number.written, AGREES, close[0].name)
    own = [fact for fact in near if fact.own and number.distance(fact) < FAR - 1]
    if own and not number.is_otherwise:
        planned = f"{own[0].name}, it has {number.says(own[0])}"
        if close:
            return Remark(number.written, DIFFERS, f"The planner has this for {close[0].name}. If you mean {planned}.")
        for fact in own:
            if slip := number.slip(fact):
                return Remark(number.written, DIFFERS, f"For {fact.name} the planner has {number.says(fact)}. {slip}")
    if close:
        return Remark(number.written, AGREES, close[0].name)
    return Remark(number.written, NOT_CHECKED, f"{own[0].name}: {number.says(own[0])}" if own else "")
