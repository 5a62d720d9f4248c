"""The words about mistakes: the checks.md of a lesson.

    # split_batch                                       a part

    ## padded                                           one of its mistakes, by the name of its program
    To make shares equal, samples are used twice.       the idea behind it

    How much does such a sample count?                  a question that leads out of it

It is read when it is first needed, so ranks do not read it. What a check says of any part stands in texts.md here.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

from course_lib.classroom import rooms
from course_lib.classroom.pages import sections

TEXTS = {heading[2:]: text for _, heading, text in sections(Path(__file__).with_name("texts.md"))}


class Advice(NamedTuple):
    idea: str
    question: str


@functools.cache
def words() -> dict[tuple[str, str], Advice]:
    """The words about each mistake, by part and name. Raises ValueError, with file and line, for an unreadable page."""
    said: dict[tuple[str, str], Advice] = {}
    part = ""
    for place, heading, text in (one for file in rooms.files("checks.md") for one in sections(file)):
        marks, _, name = heading.partition(" ")
        idea, _, question = text.partition("\n\n")
        if marks == "#" and not text:
            part = name
        elif marks != "##" or not part or not idea or not question.endswith("?") or (part, name) in said:
            raise ValueError(f"{place}: {heading!r} should be a mistake of its own, with an idea and then a question")
        else:
            said[part, name] = Advice(idea, question)
    return said
