"""`course.py hand-out` gives students all that they need, and no solution."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.exercises.test_autograde import EXERCISES, solutions

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def course() -> Any:
    spec = importlib.util.spec_from_file_location("course_command", ROOT / "course.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hand_out(course: Any, folder: Path, in_step: bool = True) -> None:
    """Run hand-out as on the command line, with an environment that exists already."""
    course.prepare = lambda *extras: None
    course.run = lambda *words: 0 if in_step else 1
    assert course.hand_out(argparse.Namespace(names=[str(folder)])) == 0


@pytest.fixture(scope="module")
def handed_out(course: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("students") / "course"
    hand_out(course, folder)
    return folder


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "COURSE_STATE"}
    program = [sys.executable, str(folder / "course.py"), *words]
    return subprocess.run(program, env=environment, capture_output=True, text=True)


def words_of(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".ipynb":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def test_there_is_no_solution_and_no_hidden_test_in_it(handed_out: Path) -> None:
    cells = [cell for name in EXERCISES for cell in solutions(name).values()]
    answers = [re.split(r"### (?:BEGIN|END) SOLUTION", cell)[1] for cell in cells]
    files = [file for end in ("*.ipynb", "*.py", "*.md") for file in handed_out.rglob(end)]
    assert len(answers) >= 3 and len(files) > 100
    readme = " ".join(words_of(handed_out / "README.md").split())
    assert "`solutions/`, which a copy from your instructor does not have" in readme
    for text in map(words_of, files):
        assert not any(answer in text for answer in answers)
    assert not [path for path in handed_out.rglob("*") if path.name in ("solutions", "tests", "benchmarks")]


def test_everything_that_students_open_is_in_it(handed_out: Path) -> None:
    for folder in ("notebooks", "exercises"):
        there = {
            path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.ipynb") if ".ipynb_checkpoints" not in str(path)
        }
        assert there and all((handed_out / path).exists() for path in there)
    said = {page.relative_to(ROOT) for page in (ROOT / "lessons").glob("*/*.md") if page.parent.name != "instructors"}
    assert said and all((handed_out / page).exists() for page in said)
    assert "There are:\n02_data_parallelism\n" in command(handed_out, "start").stderr
    shown = command(handed_out, "progress")
    assert f"Kept in {handed_out / '.course'}" in shown.stdout, shown.stderr
    assert "exercise 02_data_parallelism: 0 of 5 done" in shown.stdout


def test_the_copy_says_that_it_has_no_tests(handed_out: Path) -> None:
    for word in ("test", "build", "hand-out"):
        assert "This copy of the course is for students" in command(handed_out, word).stderr


def test_nothing_is_copied_over_a_folder_or_out_of_step(course: Any, handed_out: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="Name one folder that does not exist yet"):
        hand_out(course, handed_out)
    with pytest.raises(SystemExit, match="nothing was copied"):
        hand_out(course, tmp_path / "new", in_step=False)
    assert not (tmp_path / "new").exists()
