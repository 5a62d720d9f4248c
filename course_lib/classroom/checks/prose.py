"""The mistakes of a lesson in words, and most of them whole: its checks.md.

    # split_batch                                       a part

    ## samples_lost                                     one of its mistakes
    - `stop]` → `stop - 1]`                             what is other in it than in the right solution

    The last sample of every share is on no rank.       the idea behind it

    Does a slice include its stop?                      a question that leads out of it

A long one goes on in the next line, before the arrow, and `nothing` stands for text that is taken out. A mistake that
takes more than that, or whose run fails, is in checks.py. The page is read when it is first needed, so ranks do not
read it. What a check says of any part stands in texts.md here.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

from course_lib.classroom import rooms
from course_lib.classroom.pages import sections

TEXTS = {heading[2:]: text for _, heading, text in sections(Path(__file__).with_name("texts.md"))}
PLACE = re.compile(r"- `(.+)` → (?:`(.+)`|nothing)")


class Advice(NamedTuple):
    """The words about a mistake, and its places: pairs of old and new text, one after the other."""

    idea: str
    question: str
    places: tuple[str, ...] = ()


@functools.cache
def words() -> dict[tuple[str, str], Advice]:
    """The words about each mistake, by part and name. Raises ValueError, with file and line, for an unreadable page."""
    said: dict[tuple[str, str], Advice] = {}
    part = ""
    for place, heading, text in (one for file in rooms.files("checks.md") for one in sections(file)):
        marks, _, name = heading.partition(" ")
        *changes, idea, question = ("", "", *text.split("\n\n"))
        places = [PLACE.fullmatch(line) for line in "".join(changes).split("\n") if line]
        if marks == "#" and not text:
            part = name
        elif marks != "##" or not part or not all((idea, question.endswith("?"), *places)) or (part, name) in said:
            raise ValueError(f"{place}: {heading!r} should be a mistake of its own, with an idea and then a question")
        else:
            said[part, name] = Advice(idea, question, sum((place.groups("") for place in places if place), ()))
    return said
