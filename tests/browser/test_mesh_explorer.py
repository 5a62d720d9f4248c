"""The explorer of a mesh, by keyboard and by mouse: every move runs eight ranks and redraws the map."""

from __future__ import annotations

from typing import Any

from tests.browser.test_lessons import MOVE, STDERR, drag, press

MAP = ".jp-OutputArea-output .widget-html svg[aria-label^='8 ranks as a block of {}']"


def test_ranks_are_arranged_by_keyboard_and_by_mouse(lab: Any) -> None:
    lab.write("notebooks/mesh.ipynb", "from course_lib.widgets.mesh import MeshExplorer\nMeshExplorer()")
    notebook = lab.open("notebooks/mesh.ipynb")
    notebook.run_all()
    page = notebook.page
    assert page.locator(STDERR).all_inner_texts() == []
    page.locator(MAP.format("dp 2 x pp 2 x tp 2")).wait_for(timeout=MOVE)
    press(page, "dp x pp x tp", "ArrowRight")
    page.locator(MAP.format("dp 2 x pp 1 x tp 4")).wait_for(timeout=MOVE)
    drag(page, "dp x pp x tp", 0.0)
    page.locator(MAP.format("dp 8 x pp 1 x tp 1")).wait_for(timeout=MOVE)
    status = page.get_by_role("status")
    status.filter(has_text="dp 8 x pp 1 x tp 1, 4 micro-batches, 1f1b, 32 bits, paced").wait_for(timeout=MOVE)
    press(page, "precision", "ArrowRight")
    status.filter(has_text="bfloat16, paced").wait_for(timeout=MOVE)
    assert status.filter(has_text="Every rank sent what was predicted, to the byte.").count() == 1
