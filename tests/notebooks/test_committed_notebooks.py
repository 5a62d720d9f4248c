"""What holds for every notebook in the repository, whoever made it and however."""

from __future__ import annotations

import filecmp
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from sources import build

PRODUCTS = build.products(build.ROOT)
RUN = [product.target for product in PRODUCTS if product.kind != "exercise"]
SOLUTIONS = [product.target for product in PRODUCTS if product.kind == "solution"]


def name(path: Path) -> str:
    return path.relative_to(build.ROOT).as_posix()


def test_every_notebook_has_a_source() -> None:
    assert build.strays(build.ROOT) == []


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: name(product.target))
def test_is_in_step_with_its_source(product: build.Product) -> None:
    assert build.out_of_step(product) == []


@pytest.mark.parametrize("path", RUN, ids=name)
def test_stores_no_error_no_machine_path_and_no_empty_box(path: Path) -> None:
    assert build.flaws(nbformat.read(path, as_version=4)) == []


@pytest.mark.parametrize("path", [product.target for product in PRODUCTS], ids=name)
def test_opens_with_the_kernel_everybody_has(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata == build.METADATA


@pytest.mark.parametrize("solution", SOLUTIONS, ids=name)
def test_exercise_is_what_nbgrader_makes_of_the_solution(solution: Path, tmp_path: Path) -> None:
    shutil.copytree(solution.parent, tmp_path / "source" / solution.stem)
    command = [sys.executable, "-m", "nbgrader", "generate_assignment", solution.stem, f"--course-dir={tmp_path}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    released = tmp_path / "release" / solution.stem / solution.name
    exercise = build.ROOT / "exercises" / solution.stem / solution.name
    assert filecmp.cmp(released, exercise, shallow=False)
