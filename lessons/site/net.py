"""The map of what leads to what: the ideas of net.md, drawn, and what is worth doing next.

    from lessons.site import net
    net.Map()       in a notebook: the ideas, with what you have answered of each

(Standard library only, for `course.py progress`.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import lessons  # it says where its rooms are
from course_lib.classroom.journal import notes
from course_lib.classroom.progress import is_done
from course_lib.classroom.questions.catalog import pages

TABLE = Path(lessons.__file__).parent / "site" / "net.md"
ROW = re.compile(r"^\| (\w+) \| (.+?) \| (.+?) \| (\S+) \| (.+?) \|$", re.MULTILINE)
ACROSS, DOWN = 5, 10.0  # ideas beside each other, at most; rem from one row to the next
NEXT = 3


class Idea(NamedTuple):
    """An idea, or a scenario. before: what to learn first.  place: a page, and a heading there.  asked: questions."""

    name: str
    title: str
    before: list[str]
    place: str
    asked: list[str]


def ideas() -> dict[str, Idea]:
    """The ideas of the table, in its order."""
    found = {}
    for name, title, before, place, asked in ROW.findall(TABLE.read_text(encoding="utf-8")):
        of_room = [page.name for page in pages().values() if page.room == place and page.name != place]
        own = of_room if asked == "-" else asked.split(", ")
        found[name] = Idea(name, title, [] if before == "-" else before.split(", "), place, own)
    return found


def worth_doing(found: Mapping[str, Idea], done: set[str]) -> list[str]:
    """The next three questions: of ideas whose ground is laid, those first of which least was answered."""
    chosen: list[str] = []
    while len(chosen) < NEXT:
        so_far = done | set(chosen)
        left = {name: [one for one in idea.asked if one not in so_far] for name, idea in found.items()}
        is_known = {name: 2 * len(left[name]) <= len(idea.asked) for name, idea in found.items()}
        ready = [name for name, idea in found.items() if left[name] and all(is_known[one] for one in idea.before)]
        if not ready:
            break
        chosen.append(left[min(ready, key=lambda name: len(found[name].asked) - len(left[name]))][0])
    return chosen


def answered() -> set[str]:
    """The questions that the journal has as done."""
    found = notes()
    return {name for name in pages() if is_done([note for note in found if note.question == name])}


def advise() -> None:
    """Print what is worth doing next."""
    where = {question: f"({one.name}, {one.place})" for one in ideas().values() for question in one.asked}
    if chosen := worth_doing(ideas(), answered()):
        print("\nWorth doing next:", *(f"  {pages()[one].title} {where[one]}" for one in chosen), sep="\n")


def rows(found: Mapping[str, Idea]) -> list[list[Idea]]:
    """The ideas in rows, each below all that it needs, and then the scenarios."""
    depth: dict[str, int] = {}
    for name in TopologicalSorter({one.name: one.before for one in found.values()}).static_order():
        depth[name] = max((depth[one] + 1 for one in found[name].before), default=0)
    ground = range(1 + max(depth.values()))
    levels = [[one for one in found.values() if depth[one.name] == n and one.name[0] == "M"] for n in ground]
    levels.append([one for one in found.values() if one.name[0] == "S"])
    return [level[at : at + ACROSS] for level in levels for at in range(0, len(level), ACROSS)]


def draw(done: set[str], address: Callable[[str, str], str]) -> str:
    """The map as HTML. address: where a page's heading is, or a question on it."""
    from jinja2 import Template

    found = ideas()
    places = {
        one.name: (100 * (n + 0.5) / len(row), DOWN * y)
        for y, row in enumerate(rows(found))
        for n, one in enumerate(row)
    }
    template = Template(TABLE.with_suffix(".html").read_text(encoding="utf-8"), trim_blocks=True, autoescape=True)
    named = {"ideas": found.values(), "places": places, "down": DOWN, "titles": pages()}
    return template.render(**named, done=done, address=address)


class Map:
    """The map in a notebook, coloured by the journal."""

    def __repr__(self) -> str:
        return "\n".join(f"{one.name}: {one.title}" for one in ideas().values())

    def _repr_html_(self) -> str:
        style = TABLE.with_suffix(".css").read_text(encoding="utf-8")
        folders = {True: "scenarios/", False: ""}
        return f"<style>{style}</style>" + draw(answered(), lambda page, _: f"{folders[page[0] == 'S']}{page}.ipynb")
