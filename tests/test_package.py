"""The installed package works without the folder it came from: scripts, styles and the pages of every room."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    command = ["-c", "import setuptools; setuptools.setup()", "-q", "egg_info", f"--egg-base={folder}"]
    subprocess.run([sys.executable, *command, "build_py", f"--build-lib={folder}"], cwd=ROOT, check=True)
    return folder


def test_scripts_styles_and_pages_are_in_the_package(installed: Path) -> None:
    wanted = [
        path
        for room in ("course_lib", "lessons")
        for end in ("js", "css", "md")
        for path in ROOT.glob(f"{room}/**/*.{end}")
    ]
    pages = [
        path.relative_to(ROOT) for path in wanted if "jupyterlab" not in path.parts and path.parent.name != "memos"
    ]
    assert len(pages) > 40
    assert [str(page) for page in pages if not (installed / page).exists()] == []


def test_questions_checks_and_cases_are_found_there(installed: Path) -> None:
    program = """
import lessons
from course_lib.classroom import questions
from lessons.L02_data_parallelism import checks
from lessons.S04_defaults import fleet
assert lessons.__file__.startswith(PLACE), lessons.__file__
assert "samples" in questions.load("Q4").text and len(fleet.FLEET) == 12
assert checks.split_batch.mistakes[0].advice.question.endswith("?")
""".replace("PLACE", repr(str(installed)))
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    outcome = subprocess.run(
        [sys.executable, "-c", program], cwd=installed, env=environment, capture_output=True, text=True
    )
    assert outcome.returncode == 0, outcome.stderr
