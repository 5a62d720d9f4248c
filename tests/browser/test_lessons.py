"""The lessons as a student goes through them: open, run all, turn the knobs, look."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Locator, Page

RUN = 600  # seconds that a whole lesson may take on a busy machine
MOVE = 60_000  # milliseconds that a move may take there
STDERR = ".jp-Notebook [data-mime-type='application/vnd.jupyter.stderr']"
PROMPTS = ".jp-CodeCell:not(:has(.cm-line:only-child > br:only-child)) .jp-InputArea-prompt"


def slider(page: Page, name: str) -> Locator:
    return page.get_by_role("slider", name=name)


def step(page: Page) -> Locator:
    """The explorer's picture of what every rank did, the last of its pictures."""
    return page.locator(".jp-OutputArea-output .widget-html svg[role=img]").last


def wait_for_ranks(page: Page, ranks: int) -> None:
    """Until that picture shows so many ranks: a row for each, and a sentence that says so."""
    page.locator(f".widget-html svg[aria-label^='{ranks} ranks, '][aria-label*='paced']").wait_for(timeout=MOVE)
    assert step(page).get_by_text("rank ", exact=False).filter(has_text="rank").count() >= ranks


def press(page: Page, name: str, key: str, times: int = 1) -> None:
    control = slider(page, name)
    control.focus()
    for _ in range(times):
        page.keyboard.press(key)


def drag(page: Page, name: str, share: float) -> None:
    """Take a slider by its handle and let go at this share of its length."""
    control = slider(page, name)
    control.scroll_into_view_if_needed()
    box = control.bounding_box()
    assert box is not None
    low, high, now = (int(control.evaluate(f"slider => slider.{what}")) for what in ("min || 0", "max", "value"))
    handle, track = box["height"], box["width"] - box["height"]
    start = box["x"] + handle / 2 + track * (now - low) / (high - low)
    page.mouse.move(start, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + handle / 2 + track * share, box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()


def unrun(page: Page) -> int:
    """How many code cells have no number, because a cell before them failed."""
    return page.locator(".jp-CodeCell .jp-InputArea-prompt").filter(has_text="[ ]:").count()


@pytest.fixture
def lesson(lab: Any) -> Any:
    notebook = lab.open("notebooks/02_data_parallelism.ipynb")
    notebook.run_all(RUN)
    return notebook


def test_the_first_page_shows_a_deadlock_and_goes_on(lab: Any) -> None:
    notebook = lab.open("notebooks/00_start_here.ipynb")
    notebook.run_all(RUN)
    errors = notebook.page.locator(STDERR)
    assert errors.count() == 1
    assert "Nobody can move: 0 waits to receive from 1, 1 waits to receive from 0" in errors.inner_text()
    assert unrun(notebook.page) == 0


def test_the_lesson_runs_and_its_explorer_answers_keys_and_mouse(lesson: Any) -> None:
    page = lesson.page
    assert page.locator(STDERR).all_inner_texts() == []
    assert unrun(page) == 0
    wait_for_ranks(page, 4)
    press(page, "ranks", "ArrowRight")
    wait_for_ranks(page, 5)
    drag(page, "ranks", 0.2)
    wait_for_ranks(page, 2)
    assert page.get_by_role("status").filter(has_text="2 ranks, 32 samples, paced").count() == 1


def test_pictures_are_there_before_anything_is_run(lab: Any) -> None:
    page = lab.open("notebooks/02_data_parallelism.ipynb").page
    explorer = page.locator(".jp-CodeCell").filter(has_text="DataParallelExplorer()").locator("img")
    explorer.last.scroll_into_view_if_needed()
    assert explorer.count() == 3
    for picture in explorer.all():
        assert picture.evaluate("picture => picture.complete && picture.naturalWidth > 0")
        assert picture.get_attribute("alt")


def test_the_tensor_lesson_cuts_matrices_on_real_ranks(lab: Any) -> None:
    notebook = lab.open("notebooks/04_tensor_parallelism.ipynb")
    notebook.run_all(RUN)
    page = notebook.page
    assert page.locator(STDERR).all_inner_texts() == []
    assert unrun(page) == 0
    status = page.get_by_role("status")
    press(page, "ranks", "ArrowLeft")
    status.filter(has_text="2 ranks, columns, rows, hidden size 64, paced").wait_for(timeout=MOVE)
    drag(page, "cut of A, B", 0.5)
    status.filter(has_text="2 ranks, rows, columns, hidden size 64, paced").wait_for(timeout=MOVE)
    page.locator("svg[aria-label*='hold A by rows and B by columns']").wait_for(timeout=MOVE)
    press(page, "cut of A, B", "ArrowRight")
    status.filter(has_text="Wrong: gradient of x is off by").wait_for(timeout=MOVE)
