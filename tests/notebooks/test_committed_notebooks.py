"""What holds for every notebook in the repository, whoever made it and however."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from sources import build

PRODUCTS = build.products(build.ROOT)
RUN = [product.target for product in PRODUCTS if product.kind != "exercise"]


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


@pytest.mark.parametrize("path", RUN, ids=name)
def test_what_an_emulated_clock_says_is_left_to_nbval_to_compare(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        if "nbval-ignore-output" in cell.metadata.get("tags", []):
            shown = " ".join(build.texts(cell.outputs))
            assert "emulated" not in shown or "measured" in shown, cell.source


@pytest.mark.parametrize("path", [product.target for product in PRODUCTS], ids=name)
def test_opens_with_the_kernel_everybody_has(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata == build.METADATA
