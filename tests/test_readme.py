"""README.md's promises are kept."""

from __future__ import annotations

import re
from pathlib import Path

import course

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short_enough_to_be_read() -> None:
    assert len(TEXT.splitlines()) < 175


def test_every_file_it_links_to_exists() -> None:
    linked = {link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link} - {
        "../../deployments/github-pages"
    }
    assert [link for link in sorted(linked) if not (ROOT / link).is_file()] == []


def test_every_command_it_names_works() -> None:
    commands = re.findall(r"course\.py ([a-z-]+(?: (?:--all|[a-z]+\b(?= ?`)|NAME|FOLDER|\d))?)", TEXT)
    assert {"lab", "test"} <= set(commands)
    for command in commands:
        course.parse(command.split())


def test_every_step_it_names_exists() -> None:
    named = re.search(r"course\.py test (\w+)` \(or ([^)]+)\)", TEXT)
    assert named
    assert {named[1], *re.findall(r"`(\w+)`", named[2])} == set(course.test_steps())
