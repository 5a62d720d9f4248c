"""Every part of every exercise has what students and graders need, and costs little code."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

import pytest

from course_lib.classroom.checks.exercise import Exercise
from tests.lessons.bank import RIGHT
from tests.lessons.parts import checks

ROOT = Path(__file__).parents[2]
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("lessons/*/exercise.py"))}
each_part = pytest.mark.parametrize("part", checks.PARTS, ids=lambda part: part.name)


def section(part: Exercise) -> str:
    """The text of an exercise about a part, from its heading to the next one."""
    cell = f'"grade_id": "{part.name}", "solution": true'
    found = [one for text in SOURCES.values() for one in re.split(r"^# (?=## )", text, flags=re.M) if cell in one]
    assert len(found) == 1, f"{len(found)} sections of all exercise.py have a cell with {cell}"
    return found[0]


@each_part
def test_a_part_has_card_contract_hints_check_and_points(part: Exercise) -> None:
    text = section(part)
    assert re.search(r"^# \| you build \| minutes \| difficulty \|\n#.*\n# \| .+ \| \d+ \| [★☆]{3} \|$", text, re.M)
    (contract,) = re.findall(rf'^def {part.name}\(.*\):\n    """(.+?)"""', text, re.M | re.S)
    assert all(re.search(rf"\b{name}\b", contract + text) for name in inspect.signature(part.right).parameters)
    assert len(re.findall(r"^# <details><summary>Hint \d", text, re.M)) == text.count("# </details>") >= 3
    (points,) = re.findall(rf'"grade_id": "check_{part.name}", "grade": true, "locked": true, "points": (\d)', text)
    assert f"checks.{part.name}({part.name})" in text and f".points({points})" in text


@each_part
def test_after_the_check_a_part_says_what_pytorch_does_and_links_to_the_function(part: Exercise) -> None:
    after = section(part).partition(f'"check_{part.name}"')[2]
    assert re.search(r"PyTorch|\btorch\.|`[A-Z]\w+`", after)
    links = re.findall(r"\[`(\w+)`\]\(\.\./\.\./((?:course_lib|lessons)/[\w/]+\.py)\)", after)
    assert links
    for name, path in links:
        assert re.search(rf"^(def|class) {name}\b", (ROOT / path).read_text(encoding="utf-8"), re.M), (name, path)


@each_part
def test_a_part_has_five_mistakes_and_four_solutions(part: Exercise) -> None:
    if part.budget:
        return  # test_open_tasks has its solutions, by level
    assert len(part.mistakes) >= 5, f"checks.md has only {len(part.mistakes)} mistakes of {part.name}"
    right = RIGHT.get(part, [])
    assert len(set(right)) >= 4, f"solutions.py has only {len(set(right))} right solutions of {part.name}"
    assert part.right not in right


def lines_of_code(text: str) -> int:
    """The number of lines without docstrings, comments and empty lines."""
    strings = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    said = {line for node in strings if isinstance(node.value, ast.Constant) for line in lines(node)}
    coded = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return len(coded) - len([line for line in said if text.splitlines()[line - 1].strip()])


def lines(node: ast.Expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


@pytest.mark.parametrize("module", sorted({part.right.__module__ for part in checks.PARTS}))
def test_a_part_costs_at_most_a_hundred_lines(module: str) -> None:
    parts = [part for part in checks.PARTS if part.right.__module__ == module]
    assert lines_of_code(inspect.getsource(sys.modules[module])) <= 100 * len(parts)


def test_a_docstring_a_comment_and_an_empty_line_are_no_code() -> None:
    assert lines_of_code('"""Two\n\nlines."""\n\n# why\nx = 1\n\n\ndef f():\n    """One."""\n    return x\n') == 3
