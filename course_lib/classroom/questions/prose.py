"""The prose of questions: a room's questions.md, or a case's case.md, has a page for each of them.

    # Q4: What does each worker get?      a page: the question's name and title

    A minibatch has {samples} samples.    the situation, and what is asked
    What does each worker get?

    ## option: replica                    a section: an option, by the name that the code has for it
    {share} samples, and the whole model

    That is data parallelism: every ...   why it is right or wrong

    ## found                              what a run showed, with fields that `asking` fills; `found: NAME` is that
    Each worker computes {own} samples.   of one option, or of one outcome of an order, and below it what that means

The module of the same name beside it runs the answers. A page that is named like its room says what concerns a whole
case, and asks nothing; nor does one with nothing below its title, a task that the notebook itself keeps notes of.

Other sections: `why`; `slip: NAME`, a way to miss a number; `events` of an order; `answer` and `checklist` of an open
case.
{samples} is a field, a Python expression that is filled with the numbers of the question, the names of its module, and
the words of `figures.axis`: {samples // workers}, {best.mfu:.0%}, {in_words(workers)}. A brace of the text itself is
written twice. Lines are joined, blank lines separate paragraphs, a list begins with "- ", and code stands between lines
of ```.
(Standard library only; see `progress`.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from course_lib.classroom.pages import sections


class Section(NamedTuple):
    """place: file and line of its heading."""

    place: str
    text: str


@dataclass(frozen=True)
class Page:
    """The prose of one question. file: where it stands; place: the file and the line of its heading, in words.

    sections: by heading; that of the situation is "".  found: the sections about the result of a run.
    names: values that their fields may use, beside those of the run.
    """

    name: str
    title: str
    file: Path
    place: str
    sections: dict[str, Section]
    found: dict[str, Section] = field(default_factory=dict)
    names: Mapping[str, object] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.sections[""].text

    @property
    def room(self) -> str:
        return self.file.parent.name

    @property
    def asks(self) -> bool:
        """Whether the page asks a question."""
        return bool(self.text)

    def fill(self, given: Mapping[str, object], **names: object) -> Page:
        """The page with its fields filled with what is given. names: more values that they may use.

        Raises ValueError for a field without a number.
        """
        from course_lib.classroom.questions.fields import EXPRESSIONS  # not from the standard library alone

        known = {**names, **given}
        sections = {}
        for heading, (place, text) in self.sections.items():
            try:
                sections[heading] = Section(place, EXPRESSIONS.vformat(text, (), known))
            except Exception as error:
                known_here = f"{_choose(given)}, and write a brace that is no field twice"
                raise ValueError(f"{place}: {self.name}: {error}; {known_here}") from None
        return replace(self, sections=sections, names=names)

    def only(self, *headings: str) -> dict[str, str]:
        """The texts of these sections, in the order of the page. Raises ValueError if one is missing or left over."""
        for heading in set(headings) - self.sections.keys():
            raise ValueError(f"{self.place}: {self.name} has no '## {heading}'; write it, or drop it in the code")
        for heading in self.sections.keys() - {"", *headings}:
            place = self.sections[heading].place
            raise ValueError(f"{place}: no code knows '## {heading}' of {self.name}; {_choose(headings)}")
        return {heading: section.text for heading, section in self.sections.items() if heading}


def read(*files: Path) -> dict[str, Page]:
    """The pages of these files, by name. Raises ValueError, with file and line, for an unreadable one."""
    pages: dict[str, Page] = {}
    for page in (page for file in files for page in _pages(file)):
        if page.name in pages:
            raise ValueError(f"{page.place}: {pages[page.name].place} is {page.name}, too; choose another name")
        pages[page.name] = page
    return pages


def items(text: str) -> list[str]:
    """The items of a list."""
    return re.split(r"(?:^|\n)- ", text)[1:]


def _pages(file: Path) -> list[Page]:
    pages: list[Page] = []
    for place, heading, text in sections(file):
        if title := re.fullmatch(r"# (\w+): (.+)", heading):
            pages.append(Page(title[1], title[2], file, place, {"": Section(place, text)}))
        elif not heading.startswith("## ") or not pages:
            raise ValueError(
                f"{place}: {heading or text[:20]!r} should be like '# Q4: Its title' or, below one, like '## answer'"
            )
        elif heading[3:] in pages[-1].sections:
            raise ValueError(f"{place}: {pages[-1].name} has two sections {heading!r}; rename one, or join them")
        else:
            kept = pages[-1].found if heading.startswith("## found") else pages[-1].sections
            kept[heading[3:]] = Section(place, text)
    return pages


def _choose(names: Mapping[str, object] | tuple[str, ...]) -> str:
    return f"choose one of {', '.join(names)}" if names else "it has none"
