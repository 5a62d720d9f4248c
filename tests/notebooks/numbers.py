"""The numbers in a text that can be wrong, and need a proof.

They are digits, numbers in words with a unit (`UNITS`), multiples and fractions. Not included are code and formulas,
which cells and other tests prove; fields, which hold values of the run; digits in names: rank 0, section 2, 16 bits;
and sentences with author and year of a publication (`SOURCE`).
"""

from __future__ import annotations

import re

WORD = r"two|three|four|five|six|seven|eight|nine|ten|twelve|sixteen|twenty|hundred|thousand|million|billion"
UNITS = r"bytes|[kMGT]i?B|seconds|minutes|days|weeks|months|years|times|FLOPs|parameters|turns|messages|digits"
SHARE = r"half|thirds?|quarters?|fifths?|sixth|sevenths?|eighths?|tenth"
DIGITS = r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!(?:\.\d)?[\w,]*[A-Za-z])"  # but not those in a name: A100, 6.7B
NUMBER = re.compile(
    rf"{DIGITS}|\b(?:(?:{WORD}) (?:{UNITS})|(?:an?|one|{WORD}) (?:{SHARE})|twice|half|percent|centuries)\b",
    re.IGNORECASE,
)
NAMES = "rank|replica|stage|section|part|number|micro-batch|micro-batche|step|layer|sample"
NAMED = rf"\b(?:{NAMES})s? \d+(?:(?:,| and| to) \d+)*"
NOT_PROSE = re.compile(
    r"\{\{.*?\}\}(?: [mb]illion)?|"
    rf"`[^`]*`|\$\$.*?\$\$|\$[^$]*\$|\]\([^)]*\)|\*\*Time:\*\*[^<]*|ZeRO-\d|\d+[- ]bits?\b|{NAMED}",
    re.IGNORECASE,
)
SENTENCE = re.compile(r".+?(?:(?<!al)[.?!](?=[*)]* [^a-z])|$)")
SOURCE = re.compile(r"(?:et al\.|[A-Z]\w+ and [A-Z]\w+|Llama Team) \(?\d{4}")


def dots(text: re.Match[str] | str) -> str:
    return "·" * len(text if isinstance(text, str) else text[0])
