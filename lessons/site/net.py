"""The map of what leads to what: the ideas of net.md, drawn, and what is worth doing next.

    from lessons.site import net
    net.Map()       in a notebook: the ideas, with what you have answered of each

(Standard library only, for `course.py progress`.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from html import escape
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


def read(text: str) -> dict[str, Idea]:
    """The ideas of a table, in its order."""
    found = {}
    for name, title, before, place, asked in ROW.findall(text):
        of_room = [page.name for page in pages().values() if page.room == place and page.name != place and page.asks]
        own = of_room if asked == "-" else asked.split(", ")
        found[name] = Idea(name, title, [] if before == "-" else before.split(", "), place, own)
    return found


def ideas() -> dict[str, Idea]:
    return read(TABLE.read_text(encoding="utf-8"))


def flaws(found: Mapping[str, Idea], places: set[str]) -> Iterator[str]:
    """What is wrong with a map, one sentence each. places: pages, and headings on them, that there are."""
    asked = [question for idea in found.values() for question in idea.asked]
    _, *others = found.values()
    yield from (f"{one.name} needs nothing, so nothing leads to it" for one in others if not one.before)
    yield from (
        f"{one.name} needs {need}, which is not there"
        for one in found.values()
        for need in one.before
        if need not in found
    )
    yield from (
        f"{one.name} is taught in {one.place}, which is not there" for one in found.values() if one.place not in places
    )
    for page in pages().values():
        if page.asks and page.name != page.room and asked.count(page.name) != 1:
            yield f"{page.name} is asked about {asked.count(page.name)} ideas and should be about one"
    yield from (f"{question} is no question" for question in asked if question not in pages())
    try:
        TopologicalSorter({one.name: one.before for one in found.values()}).prepare()
    except CycleError as error:
        yield f"{' needs '.join(error.args[1])}: a circle"


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
    found, titles = ideas(), pages()
    for number, question in enumerate(worth_doing(found, answered())):
        idea = next(one for one in found.values() if question in one.asked)
        print(
            "" if number else "\nWorth doing next:\n", f" {titles[question].title} ({idea.name}, {idea.place})", sep=""
        )


# Drawn


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
    """The map as HTML. address: where a page's place is, or a question on it."""
    found = ideas()
    middles = {
        one.name: (100 * (n + 0.5) / len(row), DOWN * y)
        for y, row in enumerate(rows(found))
        for n, one in enumerate(row)
    }
    lines = "".join(
        _line(middles[need], middles[one.name]) for one in found.values() for need in one.before if one.name[0] == "M"
    )
    boxes = "".join(_box(found[name], *middle, done, address) for name, middle in middles.items())
    height = f"height:{max(y for _, y in middles.values()) + DOWN}rem"
    return f'<div class="net" style="{height}"><svg aria-hidden="true">{lines}</svg><ol>{boxes}</ol></div>'


def _line(start: tuple[float, float], end: tuple[float, float]) -> str:
    return f'<line x1="{start[0]:g}%" y1="{start[1] + 2:g}rem" x2="{end[0]:g}%" y2="{end[1]:g}rem"/>'


def _box(idea: Idea, x: float, y: float, done: set[str], address: Callable[[str, str], str]) -> str:
    page = idea.place.partition("#")[0]
    count, state = len(done & set(idea.asked)), " ".join(idea.asked)
    shade = "done" if count == len(idea.asked) else "begun" if count else "new"
    asked = " ".join(
        f'<a href="{address(page, name)}" title="{escape(pages()[name].title)}">{_short(name)}</a>'
        for name in idea.asked
    )
    needs = f"<small>after {', '.join(idea.before)}</small>" if idea.before else ""
    return (
        f'<li style="left:{x:g}%;top:{y:g}rem" data-asks="{state}" data-state="{shade}">'
        f'<a href="{address(*idea.place.partition("#")[::2])}"><b>{idea.name}</b> {idea.title}</a>{needs}'
        f"<small><span>{count} of {len(idea.asked)} answered</span>: {asked}</small></li>"
    )


def _short(question: str) -> str:
    return question.removeprefix("S").lstrip("0123456789_") if question[0] == "S" else question.replace("_", " ")


class Map:
    """The map in a notebook, coloured by the journal."""

    def __repr__(self) -> str:
        return "\n".join(f"{one.name}: {one.title}" for one in ideas().values())

    def _repr_html_(self) -> str:
        style = TABLE.with_suffix(".css").read_text(encoding="utf-8")
        folder = {"S": "scenarios/"}
        return f"<style>{style}</style>" + draw(answered(), lambda page, _: f"{folder.get(page[0], '')}{page}.ipynb")
