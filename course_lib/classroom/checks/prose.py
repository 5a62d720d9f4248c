"""The mistakes of a lesson in words, and most of them whole: its checks.md.

    # split_batch                                       a part

    ## samples_lost                                     one of its mistakes
    - `stop]` → `stop - 1]`                             what is other in it than in the right solution

    The last sample of every share is on no rank.       the idea behind it

    Does a slice include its stop?                      a question that leads out of it

A long one goes on in the next line, before the arrow; `\\n` ends a line of code, and `nothing` stands for text that is
taken out. Two more lines may stand there: "- in `a_program`", of checks.py, where that is changed and not the right
solution, and "- its run fails". A mistake that takes more is in checks.py. The page is read when it is first needed, so
ranks do not read it. What a check says of any part stands in texts.md here.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

from course_lib.classroom import rooms
from course_lib.classroom.pages import sections

TEXTS = {heading[2:]: text for _, heading, text in sections(Path(__file__).with_name("texts.md"))}
LINE = re.compile(r"- (?:`(.+)` → (?:`(.+)`|nothing)|in `(\w+)`|its run (fails))")


class Advice(NamedTuple):
    """The words about a mistake, and its places: pairs of old and new text, one after the other.

    base: the program with these places; "" for the right solution.  fails: whether its run fails.
    """

    idea: str
    question: str
    places: tuple[str, ...] = ()
    base: str = ""
    fails: bool = False


@functools.cache
def words() -> dict[tuple[str, str], Advice]:
    """The words about each mistake, by part and name. Raises ValueError, with file and line, for an unreadable page."""
    said: dict[tuple[str, str], Advice] = {}
    part = ""
    for place, heading, text in (one for file in rooms.files("checks.md") for one in sections(file)):
        marks, _, name = heading.partition(" ")
        *changes, idea, question = ("", "", *text.split("\n\n"))
        lines = [LINE.fullmatch(line) for line in "".join(changes).split("\n") if line]
        if marks == "#" and not text:
            part = name
        elif marks != "##" or not part or not all((idea, question.endswith("?"), *lines)) or (part, name) in said:
            raise ValueError(f"{place}: {heading!r} should be a mistake of its own, with an idea and then a question")
        else:
            found = [line.groups("") for line in lines if line]
            places = [text.replace("\\n", "\n") for old, new, *_ in found if old for text in (old, new)]
            base, fails = ("".join(line[i] for line in found) for i in (2, 3))
            said[part, name] = Advice(idea, question, tuple(places), base, bool(fails))
    return said
