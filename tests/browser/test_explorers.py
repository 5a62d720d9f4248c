"""The explorers of what is calculated: a key and a mouse move the picture, and the lessons store one."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from tests.browser.test_lessons import MOVE, STDERR, drag, press

STATUS = ".jp-OutputArea-output .widget-html [role=status]"
LESSONS = {"one_machine": "01_one_machine_is_not_enough", "refresh": "08_planning"}


@pytest.fixture
def explorer(lab: Any, request: pytest.FixtureRequest) -> Page:
    """A notebook with the explorer named by the test's parameter, and nothing else."""
    lab.write("notebooks/explorer.ipynb", f"from course_lib.widgets import {request.param} as m\nm.explorer()")
    notebook = lab.open("notebooks/explorer.ipynb")
    notebook.run_all()
    page: Page = notebook.page
    assert page.locator(STDERR).all_inner_texts() == []
    return page


def wait_for(page: Page, words: str) -> None:
    """Until the explorer's sentences say so."""
    page.locator(STATUS).filter(has_text=words).wait_for(timeout=MOVE)


@pytest.mark.parametrize("explorer", ["one_machine"], indirect=True)
def test_a_larger_model_does_not_fit_and_a_smaller_one_does(explorer: Page) -> None:
    wait_for(explorer, "6.7B does not fit")
    press(explorer, "model", "ArrowLeft")
    wait_for(explorer, "2.7B fits")
    drag(explorer, "device", 0.0)
    wait_for(explorer, "2.7B does not fit")
    assert explorer.get_by_text("Does 2.7B fit into one laptop-CPU?").count() == 1


@pytest.mark.parametrize("explorer", ["refresh"], indirect=True)
def test_a_refresh_is_planned_anew_at_every_move(explorer: Page) -> None:
    wait_for(explorer, "times as fast as before")
    press(explorer, "nodes", "ArrowRight")
    explorer.get_by_text("A step on 64 B200-180GB").wait_for(timeout=MOVE)
    drag(explorer, "network", 0.0)
    explorer.get_by_text("A step on 64 B200-180GB with Ethernet 25").wait_for(timeout=MOVE)
    assert explorer.locator(STATUS).count() == 1


@pytest.mark.parametrize("module", LESSONS)
def test_a_lesson_shows_its_explorer_before_anything_is_run(lab: Any, module: str) -> None:
    page = lab.open(f"notebooks/{LESSONS[module]}.ipynb").page
    pictures = page.locator(".jp-CodeCell").filter(has_text=f"{module}.explorer()").locator("img")
    pictures.last.scroll_into_view_if_needed()
    assert pictures.count() == 2
    for picture in pictures.all():
        assert picture.evaluate("picture => picture.complete && picture.naturalWidth > 0")
        assert picture.get_attribute("alt")
