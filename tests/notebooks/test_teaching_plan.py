"""The teaching plan is about the lessons as they are: their sections, and their minutes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAN = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
LESSONS = sorted((ROOT / "sources" / "notebooks").glob("0[1-8]_*.py"))


def sections(text: str) -> list[tuple[str, int]]:
    """The rows of a lesson's table: the section, and its minutes."""
    rows = re.findall(r"^\| \*?(\d .+?)\*? \| (\d+) \|", text, re.MULTILINE)
    return [(name, int(minutes)) for name, minutes in rows]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_it_has_every_section_and_adds_up_to_the_lesson_s_minutes(lesson: Path) -> None:
    source = lesson.read_text(encoding="utf-8")
    (part,) = re.findall(rf"^## {lesson.stem[:2]} (.*?)(?=^## )", PLAN, re.MULTILINE | re.DOTALL)
    (minutes,) = re.findall(r"\*\*Time:\*\* (\d+) minutes", source)
    headings = re.findall(r"^# ## (\d)\. (.+)$", source, re.MULTILINE)
    assert [name for name, _ in sections(part)] == [" ".join(heading) for heading in headings]
    assert sum(minutes for _, minutes in sections(part)) == int(minutes)
    assert part.startswith(f"{re.findall('^# # (.+)$', source, re.MULTILINE)[0].split(':')[0]} ({minutes} minutes)")
