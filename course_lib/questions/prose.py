"""What questions say: sources/questions/ has a file for each lesson, and in it a page for each question.

    # Q4: What does each worker get?      a page: the question's name and title
    runs: replicas                        the file of course_lib/questions that runs its answers

    A minibatch has {samples} samples.    the situation, and what is asked
    What does each worker get?

    ## option: replica                    a section: an option, by the name that the code has for it
    {share} samples, and the whole model

    That is data parallelism: every ...   why it is right or wrong

Other sections: `why`; `why: NAME`, what one outcome of an order means; `slip: NAME`, a way to miss a number; `events`
of an order; `answer` and `checklist` of an open case. {samples} is a field, which the numbers of a question fill; a
brace of the text itself is written twice. (Standard library only; see `progress`.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter

from course_lib.pages import Section, sections

FOLDER = Path(__file__).parents[2] / "sources" / "questions"


@dataclass(frozen=True)
class Page:
    """What one question says. home: the module of course_lib.questions whose QUESTIONS holds it.

    place: file and line of its heading.  sections: by heading; that of the situation is "".
    """

    name: str
    title: str
    lesson: str
    home: str
    place: str
    sections: dict[str, Section]

    @property
    def text(self) -> str:
        return self.sections[""].text

    def fill(self, fields: Mapping[str, object]) -> Page:
        """The page with numbers in it. Raises ValueError for a field without a number and a number without a field."""
        used: set[str] = set()
        filled = {}
        for heading, (place, _, text) in self.sections.items():
            try:
                used.update(name for _, name, _, _ in Formatter().parse(text) if name is not None)
                filled[heading] = Section(place, heading, text.format_map(fields))
            except KeyError as error:
                raise ValueError(f"{place}: {self.name} has no field {{{error.args[0]}}}; {_choose(fields)}") from None
            except ValueError as error:
                raise ValueError(f"{place}: {error}; write a brace that is no field twice") from None
        if unused := fields.keys() - used:
            raise ValueError(
                f"{self.place}: {self.name} never says {{{min(unused)}}}; write it, or drop it in the code"
            )
        return replace(self, sections=filled)

    def only(self, *headings: str) -> dict[str, str]:
        """The texts of these sections, in the order of the page. Raises ValueError if one is missing or left over."""
        for heading in set(headings) - self.sections.keys():
            raise ValueError(f"{self.place}: {self.name} has no '## {heading}'; write it, or drop it in the code")
        for heading in self.sections.keys() - {"", *headings}:
            place = self.sections[heading].place
            raise ValueError(f"{place}: no code knows '## {heading}' of {self.name}; {_choose(headings)}")
        return {heading: section.text for heading, section in self.sections.items() if heading}


def read(folder: Path = FOLDER) -> dict[str, Page]:
    """The pages of all lessons, by name.

    Raises FileNotFoundError if there are none, and ValueError, with file and line, for what cannot be read.
    """
    pages: dict[str, Page] = {}
    page = None
    for section in sections(folder):
        place, heading, text = section
        if title := re.fullmatch(r"# (\w+): (.+)", heading):
            page = _begin(section, *title.groups())
            if page.name in pages:
                raise ValueError(f"{place}: {pages[page.name].place} is {page.name}, too; choose another name")
            pages[page.name] = page
        elif not heading.startswith("## ") or not page or page.lesson != section.page:
            shown = heading or text[:20]
            raise ValueError(f"{place}: {shown!r} should be like '# Q4: Its title' or, below one, like '## answer'")
        elif heading[3:] in page.sections:
            raise ValueError(f"{place}: {page.name} has two sections {heading!r}; rename one, or join them")
        else:
            page.sections[heading[3:]] = section
    return pages


def _begin(section: Section, name: str, title: str) -> Page:
    first, _, situation = section.text.partition("\n\n")
    if not (runs := re.fullmatch(r"runs: (\w+)", first)):
        raise ValueError(f"{section.place}: after the title, say who runs the answers, for instance 'runs: replicas'")
    return Page(name, title, section.page, runs[1], section.place, {"": section._replace(text=situation)})


def items(text: str) -> list[str]:
    """Those of a list."""
    return re.split(r"(?:^|\n)- ", text)[1:]


def _choose(names: Mapping[str, object] | tuple[str, ...]) -> str:
    return f"choose one of {', '.join(names)}" if names else "it has none"
