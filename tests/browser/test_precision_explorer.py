"""The explorer of mixed precision in a real JupyterLab: its loss curve grows, and a move begins a new one."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

from tests.browser.hands import STDERR, drag, press, says

EXPLORER = "from course_lib.widgets import mixed_precision\nmixed_precision.MixedPrecisionExplorer()"


def points(page: Page) -> int:
    """Of the curve at the setting, the last one in the picture of losses."""
    curve = page.locator("svg[aria-label^='Loss over'] path[fill=none]").last
    return (curve.get_attribute("d") or "").count("L") + 1


def test_a_move_begins_a_training_whose_curve_grows(lab: Any) -> None:
    lab.write("notebooks/precision.ipynb", EXPLORER)
    notebook = lab.open("notebooks/precision.ipynb")
    notebook.run_all()
    page = notebook.page
    assert page.locator(STDERR).all_inner_texts() == []
    says(page, "float16 with no loss scale")
    press(page, "loss scale", "ArrowRight", times=2)
    says(page, "float16 with a loss scale of 2¹⁶")
    begun = points(page)
    says(page, "as far as float32")
    says(page, "Step 150 of 150")
    assert begun < points(page)
    drag(page, "weights", 0.0)
    says(page, "the loss is not a number")
    assert page.locator("svg[aria-label^='Loss over']").get_by_text("✗ float16").count() == 1
    drag(page, "format", 0.5)
    says(page, "bfloat16 with a loss scale of 2¹⁶: of the finished gradient 0% vanish")
