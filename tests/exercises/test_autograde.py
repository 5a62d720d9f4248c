"""An exercise goes the whole way through nbgrader: released, filled in, handed in, graded.

One student hands in. That the solution passes every test is seen elsewhere: nbval runs it, with the hidden ones in it.
"""

from __future__ import annotations

import filecmp
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from traitlets.config import Config

ROOT = Path(__file__).parents[2]
NAME = "02_data_parallelism"  # the one that a student hands in
EXERCISES = sorted(source.stem for source in ROOT.glob("sources/exercises/*.py"))

# Right for every size that the visible check tries, and for no other.
SPLIT_FOR_THE_VISIBLE_CHECK = """
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
ANSWERS = {"split_batch": SPLIT_FOR_THE_VISIBLE_CHECK, "average_gradients": PLAIN_MEAN}  # the rest is right


def notebook(folder: str, name: str = NAME) -> Any:
    return nbformat.read(ROOT / folder / name / f"{name}.ipynb", as_version=4)


def solutions(name: str = NAME) -> dict[str, str]:
    """What stands in the cells that students fill in, by grade_id."""
    cells = (cell for cell in notebook("solutions", name).cells if "nbgrader" in cell.metadata)
    return {cell.metadata.nbgrader.grade_id: cell.source for cell in cells if cell.metadata.nbgrader.solution}


def filled_in(answers: dict[str, str]) -> Any:
    """The exercise with these answers in it."""
    submission = notebook("exercises")
    for cell in submission.cells:
        grade_id = cell.metadata.get("nbgrader", {}).get("grade_id")
        cell.source = answers.get(grade_id, cell.source)
    return submission


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course in which all exercises were released, and one was handed in by a student, and graded."""
    from nbgrader.apps import NbGraderAPI  # seconds, which every worker that only collects tests would spend

    course = tmp_path_factory.mktemp("course")
    shutil.copytree(ROOT / "solutions", course / "source")
    folder = course / "submitted" / "student" / NAME
    folder.mkdir(parents=True)
    nbformat.write(filled_in(solutions() | ANSWERS), folder / f"{NAME}.ipynb")
    nbgrader = NbGraderAPI(config=Config({"CourseDirectory": {"root": str(course)}, "Execute": {"timeout": 300}}))
    for done in (*map(nbgrader.generate_assignment, EXERCISES), nbgrader.autograde(NAME, "student")):
        assert done["success"], done
    return course


@pytest.mark.parametrize("name", EXERCISES)
def test_what_nbgrader_releases_is_the_exercise(name: str, course: Path) -> None:
    released = course / "release" / name / f"{name}.ipynb"
    assert filecmp.cmp(released, ROOT / "exercises" / name / f"{name}.ipynb", shallow=False)


def test_a_submission_gets_what_it_earned(course: Path) -> None:
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{course / 'gradebook.db'}") as gradebook:
        grades = gradebook.find_submission_notebook(NAME, NAME, "student").grades
        assert {grade.name: (grade.score, grade.max_score) for grade in grades} == {
            "check_split_batch": (0, 2),  # by the hidden test
            "check_average_gradients": (0, 3),
            "check_ring_all_reduce": (5, 5),
        }


def test_a_student_reads_what_is_wrong_and_no_wall_of_text(course: Path) -> None:
    graded = nbformat.read(course / "autograded" / "student" / NAME / f"{NAME}.ipynb", as_version=4)
    (cell,) = (c for c in graded.cells if c.metadata.get("nbgrader", {}).get("grade_id") == "check_average_gradients")
    shown, error = cell.outputs
    assert "How much does one sample count if it is in a small share?" in shown.data["text/plain"]
    assert error.ename == "NotPassed"
    assert len(error.traceback) == 1


@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_shows_no_solution_and_no_hidden_test(name: str) -> None:
    text = "".join(cell.source for cell in notebook("exercises", name).cells)
    assert text.count("raise NotImplementedError()") == len(solutions(name)) >= 3
    assert "seed=1" not in text and "HIDDEN" not in text and "SOLUTION" not in text
    for answer in solutions(name).values():
        assert answer not in text
