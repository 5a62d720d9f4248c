"""The explorer of a mesh, by keyboard and by mouse: every move runs eight ranks and redraws the map."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Page, expect

from tests.browser.hands import MOVE, STDERR, drag, pictures, press, says


def test_ranks_are_arranged_by_keyboard_and_by_mouse(lab: Any) -> None:
    lab.write("notebooks/mesh.ipynb", "from course_lib.widgets.mesh import MeshExplorer\nMeshExplorer()")
    notebook = lab.open("notebooks/mesh.ipynb")
    notebook.run_all()
    page: Page = notebook.page
    assert page.locator(STDERR).all_inner_texts() == []
    shows(page, "dp 2 x pp 2 x tp 2")
    press(page, "dp x pp x tp", "ArrowLeft")
    shows(page, "dp 2 x pp 4 x tp 1")
    drag(page, "precision", 1.0)
    says(page, "dp 2 x pp 4 x tp 1, 4 micro-batches, 1f1b, bfloat16, paced")
    says(page, "Every rank sent what was predicted, to the byte.")


def shows(page: Page, words: str) -> None:
    """Wait for the map of this mesh."""
    expect(pictures(page).first).to_have_attribute(
        "aria-label", re.compile(f"^8 ranks as a block of {words};"), timeout=MOVE
    )
