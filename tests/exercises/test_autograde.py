"""An exercise goes the whole way through nbgrader, with the commands of the teaching plan, for three students.

That solutions pass all tests, hidden ones too, is checked by nbval, which runs them.
"""

from __future__ import annotations

import csv
import filecmp
import getpass
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
NAME = "02_data_parallelism"
EXERCISES = sorted(path.parent.name.removeprefix("L") for path in ROOT.glob("lessons/*/exercise.py"))
REBOUND = """\
### BEGIN HIDDEN TESTS
from course_lib.classroom.checks import grading

checks = grading.of("lessons.L{}.checks")

### END HIDDEN TESTS
"""
PARTS = ("split_batch", "average_gradients", "ring_all_reduce", "backward_in_buckets", "faster_backward")
ON_PAPER = {"shortest_step", "held", "shares_lost", "ends", "all_reduce_ms"}  # predictions, which earn nothing
WHY = "why_faster_backward"  # three sentences, which a person grades

REMAINDER_ON_THE_LAST = """
def split_batch(batch, rank, world_size):
    size = len(batch) // world_size
    return batch[rank * size : (rank + 1) * size if rank < world_size - 1 else None]
"""
# Right for every size that the visible check tries, and for no other.
FOR_THE_VISIBLE_CHECK = """
def split_batch(batch, rank, world_size):
    assert (world_size, len(batch)) in [(2, 6), (2, 7), (3, 9), (3, 11), (4, 4), (4, 9), (4, 10)]
    return batch.tensor_split(world_size)[rank]
"""
PLAIN_MEAN = """
def average_gradients(model, samples):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
"""
ENDLESS = """
import time

def average_gradients(model, samples):
    while True:
        time.sleep(0.1)  # on two cores, other tests need them
"""
DEADLY = """
import os
os._exit(1)
"""
CHEATING = """
from course_lib.classroom.checks import exercise, verdict

verdict.Verdict.passed = True
verdict.Verdict.points = lambda self, of: of
exercise.Exercise.__call__ = lambda self, fn, seed=0: verdict.Verdict(self.name, "passed", "Right.", share=1.0)


class checks:
    def __getattr__(self, name):
        return lambda fn: verdict.Verdict(name, "passed", "Right.", share=1.0)


checks = checks()


def ring_all_reduce(tensor):
    pass
"""
# Answers that are not right, and the points of each part.
STUDENTS: dict[str, tuple[dict[str, str], tuple[float, ...]]] = {
    "half": ({"split_batch": REMAINDER_ON_THE_LAST, "average_gradients": PLAIN_MEAN}, (0.5, 1, 5, 4, 3)),
    "looping and dying": ({"average_gradients": ENDLESS, "ring_all_reduce": DEADLY}, (2, 0, 0, 4, 3)),
    "cheating": ({"split_batch": FOR_THE_VISIBLE_CHECK, "ring_all_reduce": CHEATING}, (0, 3, 0, 4, 3)),
}


# The text that learning platforms put between the student's name and the file's: nothing, Canvas, Moodle.
PLATFORMS = ("", "1234_567890_", "1234567_assignsubmission_file_")


def notebook(folder: str, name: str = NAME) -> Any:
    return nbformat.read(ROOT / folder / name / f"{name}.ipynb", as_version=4)


def solutions(name: str = NAME) -> dict[str, str]:
    """The solutions in the cells that students fill in, by grade_id."""
    cells = (c for c in notebook("solutions", name).cells if c.cell_type == "code" and "nbgrader" in c.metadata)
    return {cell.metadata.nbgrader.grade_id: cell.source for cell in cells if cell.metadata.nbgrader.solution}


def filled_in(answers: dict[str, str]) -> Any:
    """The exercise's notebook with these answers filled in."""
    submission, answers = notebook("exercises"), {WHY: "Messages hide. The last cannot. It waits.", **answers}
    for cell in submission.cells:
        grade_id = cell.metadata.get("nbgrader", {}).get("grade_id")
        cell.source = answers.get(grade_id, cell.source)
    return submission


def commands() -> tuple[list[list[str]], list[list[str]]]:
    """The commands of the teaching plan, in order: to grade, and to exchange the files."""
    lines = re.findall(
        r"^    nbgrader (.*?) *(?:#.*)?$", (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    typed = [line.split() for line in lines]
    return typed[:5], typed[5:]


# Importing nbgrader takes longer than most of its commands, so one process does them all.
IN_TURN = """
import json, os, shutil, sys
from nbgrader.apps import NbGraderApp

for folder, (name, *words) in json.loads(sys.argv[1]):
    os.chdir(folder)
    shutil.copy(*words) if name == "copy" else NbGraderApp.launch_instance([name, *words])
"""


def nbgrader(*commands: tuple[Path, list[str]]) -> str:
    """Run these commands in one process, each in its folder; return their output. There is one more: copy FROM TO."""
    environment = {**os.environ, "JUPYTER_PREFER_ENV_PATH": "1"}
    typed = json.dumps([(str(folder), words) for folder, words in commands])
    done = subprocess.run([sys.executable, "-c", IN_TURN, typed], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class whose exercise was released, handed in by three students, and graded; and the exchange beside it."""
    course = tmp_path_factory.mktemp("class")
    shutil.copy(ROOT / "lessons" / "nbgrader_config.py", course)
    shutil.copytree(ROOT / "solutions" / NAME, course / "source" / NAME)
    archive = course / "downloaded" / NAME / "archive" / "all.zip"
    archive.parent.mkdir(parents=True)
    with zipfile.ZipFile(archive, "w") as packed:
        for between, (student, (answers, _)) in zip(PLATFORMS, STUDENTS.items(), strict=True):
            file = f"{student}_{between}{NAME}{'-1' * bool(between)}.ipynb"
            packed.writestr(file, nbformat.writes(filled_in(solutions() | answers)))
    nbgrader(*((course, command) for command in commands()[0]), *exchange(course, course / "elsewhere"))
    return course


def exchange(course: Path, folder: Path) -> list[tuple[Path, list[str]]]:
    """The commands that carry the exercise to a student and back, if there is an exchange."""
    if sys.platform == "win32":
        return []
    student, root = folder / "student", folder / "exchange"
    student.mkdir(parents=True)
    root.mkdir()
    root.chmod(0o777)
    nbformat.write(filled_in(solutions()), folder / "filled.ipynb")
    fill_in = ["copy", str(folder / "filled.ipynb"), str(student / NAME / f"{NAME}.ipynb")]
    keep = ["copy", str(student / NAME / f"{NAME}.ipynb"), str(folder / "fetched.ipynb")]
    release, fetch, submit, collect = ([*command, f"--Exchange.root={root}"] for command in commands()[1])
    there = [(course, release), (student, fetch), (student, keep)]
    return [*there, (student, fill_in), (student, submit), (course, collect)]


def test_the_way_in_the_plan_is_whole() -> None:
    grading, exchange = commands()
    assert [command[0] for command in grading] == [
        "generate_assignment",
        "zip_collect",
        "autograde",
        "generate_feedback",
        "export",
    ]
    assert [command[0] for command in exchange] == ["release_assignment", "fetch_assignment", "submit", "collect"]


@pytest.mark.skipif(sys.platform == "win32", reason="nbgrader has no exchange on Windows, and the plan says so")
def test_an_exchange_carries_the_exercise_there_and_back(course: Path) -> None:
    fetched, filled = course / "elsewhere" / "fetched.ipynb", course / "elsewhere" / "filled.ipynb"
    assert filecmp.cmp(fetched, ROOT / "exercises" / NAME / f"{NAME}.ipynb", shallow=False)
    arrived = course / "submitted" / getpass.getuser() / NAME / f"{NAME}.ipynb"
    assert filecmp.cmp(filled, arrived, shallow=False)


def test_what_nbgrader_releases_is_the_exercise(course: Path) -> None:
    released = course / "release" / NAME / f"{NAME}.ipynb"
    assert filecmp.cmp(released, ROOT / "exercises" / NAME / f"{NAME}.ipynb", shallow=False)


@pytest.mark.parametrize("student", STUDENTS)
def test_a_submission_gets_what_it_earned(course: Path, student: str) -> None:
    from nbgrader.api import Gradebook  # seconds, which workers that only collect tests save

    with Gradebook(f"sqlite:///{course / 'gradebook.db'}") as gradebook:
        grades = gradebook.find_submission_notebook(NAME, NAME, student).grades
        scores = {grade.name: (grade.score, grade.max_score) for grade in grades}
        by_hand = [grade.name for grade in grades if grade.needs_manual_grade]
    assert scores == {
        f"check_{part}": (earned, of)
        for part, earned, of in zip(PARTS, STUDENTS[student][1], (2, 3, 5, 4, 3), strict=True)
    } | {WHY: (0, 2)}
    assert by_hand == [WHY]


def test_the_grades_are_exported(course: Path) -> None:
    with open(course / "grades.csv", encoding="utf-8", newline="") as file:
        scores = {row["student_id"]: float(row["score"]) for row in csv.DictReader(file) if row["assignment"] == NAME}
    assert scores == {student: sum(earned) for student, (_, earned) in STUDENTS.items()}


def outputs(course: Path, student: str, part: str) -> list[Any]:
    graded = nbformat.read(course / "autograded" / student / NAME / f"{NAME}.ipynb", as_version=4)
    return next(c.outputs for c in graded.cells if c.metadata.get("nbgrader", {}).get("grade_id") == f"check_{part}")


@pytest.mark.parametrize(
    ("student", "part", "words"),
    [
        ("half", "average_gradients", "How much does one sample count if it is in a small share?"),
        ("cheating", "split_batch", "Your function raised an exception, so its idea could not be tried."),
        ("looping and dying", "average_gradients", "perhaps a loop never ends"),
        ("looping and dying", "ring_all_reduce", "No cell before the check makes it."),
        ("cheating", "ring_all_reduce", "your function sends nothing"),
    ],
)
def test_a_student_reads_what_is_wrong_and_no_wall_of_text(course: Path, student: str, part: str, words: str) -> None:
    shown, earned = outputs(course, student, part)
    assert words in shown.data["text/plain"]
    assert float(earned.data["text/plain"]) == STUDENTS[student][1][PARTS.index(part)]
    page = (course / "feedback" / student / NAME / f"{NAME}.html").read_text(encoding="utf-8")
    assert words in page


@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_shows_no_solution_and_no_hidden_test(name: str) -> None:
    text = "".join(cell.source for cell in notebook("exercises", name).cells)
    assert text.count("raise NotImplementedError()") == len(solutions(name))
    assert "grading" not in text and "HIDDEN" not in text and "SOLUTION" not in text
    for answer in solutions(name).values():
        assert answer not in text


@pytest.mark.parametrize("name", EXERCISES)
def test_every_grade_is_given_by_a_check_in_a_process_of_its_own(name: str) -> None:
    marked = [cell for cell in notebook("solutions", name).cells if cell.metadata.get("nbgrader", {}).get("grade")]
    graded = [cell.source for cell in marked if cell.cell_type == "code"]
    assert len(graded) == len(solutions(name).keys() - ON_PAPER)
    for source in graded:
        assert source.startswith(REBOUND.format(name)), source
        assert re.search(r"checks\.\w+\(\w+\)[^()]*\.points\(\d+\)$", source)
