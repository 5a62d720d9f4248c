"""The teaching plan is about the lessons as they are: their sections, and their minutes."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLAN = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
LESSONS = sorted((ROOT / "sources" / "notebooks").glob("0[1-9]_*.py"))
NOTEBOOKS = sorted((ROOT / "sources" / "notebooks").glob("*.py"))
SCENARIOS = sorted((ROOT / "sources" / "notebooks" / "scenarios").glob("S*.py"))
IN_WORDS = {"ten": 10}


def sections(text: str) -> list[tuple[str, int]]:
    """The rows of a lesson's table: the section, and its minutes."""
    rows = re.findall(r"^\| \*?(\d+ .+?)\*? \| (\d+) \|", text, re.MULTILINE)
    return [(name, int(minutes)) for name, minutes in rows]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_it_has_every_section_and_adds_up_to_the_lesson_s_minutes(lesson: Path) -> None:
    source = lesson.read_text(encoding="utf-8")
    (part,) = re.findall(rf"^## {lesson.stem[:2]} (.*?)(?=^## )", PLAN, re.MULTILINE | re.DOTALL)
    (minutes,) = re.findall(r"\*\*Time:\*\* (\d+) minutes", source)
    headings = re.findall(r"^# ## (\d+)\. (.+)$", source, re.MULTILINE)
    assert [name for name, _ in sections(part)] == [" ".join(heading) for heading in headings]
    assert sum(minutes for _, minutes in sections(part)) == int(minutes)
    assert part.startswith(f"{re.findall('^# # (.+)$', source, re.MULTILINE)[0].split(':')[0]} ({minutes} minutes)")


@pytest.mark.parametrize("lesson", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_main_page_the_plan_and_the_lesson_name_the_same_minutes(lesson: Path) -> None:
    source, number = lesson.read_text(encoding="utf-8"), lesson.stem[:2]
    (said,) = re.findall(r"\*\*Time:\*\* (\d+) minutes|This page takes (\w+) minutes", source)
    (listed,) = re.findall(rf"\(notebooks/{lesson.stem}\.ipynb\) \| (\d+) \|", README)
    (planned,) = re.findall(rf"^## {number} .* \((\d+) minutes\)$", PLAN, re.MULTILINE)
    assert int(listed) == int(planned) == (int(said[0]) if said[0] else IN_WORDS[said[1]])


@pytest.mark.parametrize(("lesson", "following"), list(pairwise(NOTEBOOKS)), ids=lambda path: path.stem)
def test_each_lesson_ends_with_a_link_to_the_one_that_follows(lesson: Path, following: Path) -> None:
    _, _, end = lesson.read_text(encoding="utf-8").rpartition("**Next:**")
    assert f"({following.stem}.ipynb)" in end


@pytest.mark.parametrize("case", SCENARIOS, ids=lambda path: path.stem)
def test_the_main_page_the_plan_and_the_scenario_name_the_same_minutes(case: Path) -> None:
    source, number = case.read_text(encoding="utf-8"), int(case.stem[1:3])
    (title, minutes) = re.findall(r"^# # Scenario \d+: (.+)$|\*\*Time:\*\* (\d+) minutes", source, re.MULTILINE)
    name = title[0][0].upper() + title[0][1:]
    assert f"| [S{number} {name}](notebooks/scenarios/{case.stem}.ipynb) | {minutes[1]} |" in README
    assert f"| S{number} {name} | {minutes[1]} |" in PLAN


@pytest.mark.parametrize("case", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_says_where_it_has_happened(case: Path) -> None:
    prose = ROOT / "sources" / "scenarios" / f"{case.stem}.md"
    assert re.search(r"(et al\.|Team) 20\d\d", case.read_text(encoding="utf-8") + prose.read_text(encoding="utf-8"))
