"""The teaching plan has the sections and minutes of the lessons as they are."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLAN = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
NOTEBOOKS = sorted(ROOT.glob("lessons/L*/lesson.py"))
LESSONS = NOTEBOOKS[1:]  # the first page has no sections
SCENARIOS = sorted(ROOT.glob("lessons/S*/page.py"))


def name_of(page: Path) -> str:
    """The name of the notebook that a page makes."""
    return page.parent.name.removeprefix("L")


def found(pattern: str, text: str, where: str) -> str:
    """The only match of a pattern in a text. where: the text's name, for the message."""
    matches = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    assert len(matches) == 1, f"{where} has {len(matches)} of what {pattern!r} finds, and needs one"
    return str(matches[0])


def sections(text: str) -> list[tuple[str, int]]:
    """The rows of a lesson's table: each section with its minutes."""
    rows = re.findall(r"^\| \*?(\d+ .+?)\*? \| (\d+) \|", text, re.MULTILINE)
    return [(name, int(minutes)) for name, minutes in rows]


@pytest.mark.parametrize("lesson", LESSONS, ids=name_of)
def test_it_has_every_section_and_adds_up_to_the_lesson_s_minutes(lesson: Path) -> None:
    source = lesson.read_text(encoding="utf-8")
    part = found(rf"^## {name_of(lesson)[:2]} (.*?)(?=^## )", PLAN, "notebooks/README.md")
    minutes = found(r"\*\*Time:\*\* (\d+) minutes", source, str(lesson))
    headings = re.findall(r"^# ## (\d+)\. (.+)$", source, re.MULTILINE)
    assert [name for name, _ in sections(part)] == [" ".join(heading) for heading in headings]
    assert sum(minutes for _, minutes in sections(part)) == int(minutes)
    assert part.startswith(f"{re.findall('^# # (.+)$', source, re.MULTILINE)[0].split(':')[0]} ({minutes} minutes)")


@pytest.mark.parametrize("lesson", NOTEBOOKS, ids=name_of)
def test_the_main_page_the_plan_and_the_lesson_name_the_same_minutes(lesson: Path) -> None:
    source, number = lesson.read_text(encoding="utf-8"), name_of(lesson)[:2]
    said = found(r"(?:\*\*Time:\*\*|This page takes) (\d+) minutes", source, str(lesson))
    listed = found(rf"\(notebooks/{name_of(lesson)}\.ipynb\) \| (\d+) \|", README, "README.md")
    planned = found(rf"^## {number} [^\n]* \((\d+) minutes\)$", PLAN, "notebooks/README.md")
    assert int(listed) == int(planned) == int(said)


@pytest.mark.parametrize(("lesson", "following"), list(pairwise(NOTEBOOKS)), ids=name_of)
def test_each_lesson_ends_with_a_link_to_the_one_that_follows(lesson: Path, following: Path) -> None:
    _, _, end = lesson.read_text(encoding="utf-8").rpartition("**Next:**")
    assert f"({name_of(following)}.ipynb)" in end


@pytest.mark.parametrize("case", SCENARIOS, ids=name_of)
def test_the_main_page_the_plan_and_the_scenario_name_the_same_minutes(case: Path) -> None:
    source, number = case.read_text(encoding="utf-8"), int(name_of(case)[1:3])
    (title, minutes) = re.findall(r"^# # Scenario \d+: (.+)$|\*\*Time:\*\* (\d+) minutes", source, re.MULTILINE)
    name = title[0][0].upper() + title[0][1:]
    assert f"| [S{number} {name}](notebooks/scenarios/{name_of(case)}.ipynb) | {minutes[1]} |" in README
    assert f"| S{number} {name} | {minutes[1]} |" in PLAN


@pytest.mark.parametrize("case", SCENARIOS, ids=name_of)
def test_a_scenario_says_where_it_has_happened(case: Path) -> None:
    prose = case.with_name("case.md")
    assert re.search(r"(et al\.|Team) 20\d\d", case.read_text(encoding="utf-8") + prose.read_text(encoding="utf-8"))
