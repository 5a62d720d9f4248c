"""Explorers with long runs: they show the time left, and Stop works in the middle of a run and between two."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Page, expect

from tests.browser.hands import MOVE, drag, press, says, slider

EXPLORER = """
import time
from course_lib import Span, Timeline, launch
from course_lib.figures import gantt
from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import Explorer, View

picture = gantt(Timeline([Span(0, "forward", "", 0.0, 1.0)], 1, "modelled"), width=420)

def wait(rank, length):
    time.sleep(length)

def look(seconds):
    launch(wait, 2, args=(seconds,), timeout=600)
    yield View(f"took {seconds} s", picture, picture, 600 * seconds)
    for missing in reversed(range(600 * seconds)):
        time.sleep(0.2)
        yield View(f"{missing} missing", picture, picture, missing)

Explorer([Slider("seconds", (0, 1, 300), 0)], look)
"""

LEFT, STOPPED = re.compile(r"more to run, about \d+ s left"), re.compile(r"[1-9]\d* missing Stopped\.")


def test_a_long_run_shows_how_long_yet_and_can_be_stopped(lab: Any) -> None:
    lab.write("notebooks/long.ipynb", EXPLORER)
    notebook = lab.open("notebooks/long.ipynb")
    notebook.run_all()
    page: Page = notebook.page
    stop = page.get_by_role("button", name="Stop", exact=True)
    expect(stop).to_be_hidden()
    in_the_middle_of_a_run(page, stop)
    nothing_is_run_that_was_chosen_before(notebook)
    in_the_middle_of_a_run_with_keys(page, stop)
    nothing_is_run_that_was_chosen_before(notebook)
    between_two_runs(page, stop)
    buttons_act_on_the_last_of_quick_moves(page)


def in_the_middle_of_a_run(page: Page, stop: Any) -> None:
    drag(page, "seconds", 1.0)
    expect(stop).to_be_visible(timeout=MOVE)
    page.get_by_role("progressbar", name="Running").wait_for()
    expect(page.locator(".course-picture").first).to_have_css("opacity", "0.4")
    drag(page, "seconds", 0.5)  # the browser holds this back until the kernel is done
    stop.click()
    expect(page.get_by_role("alert")).to_contain_text("Stopped. Move a control to go on.", timeout=MOVE)


def in_the_middle_of_a_run_with_keys(page: Page, stop: Any) -> None:
    press(page, "seconds", "End")
    expect(stop).to_be_visible(timeout=MOVE)
    for key in ("ArrowLeft", "Tab"):
        page.keyboard.press(key)
    expect(stop).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Stopped. Move a control to go on.", timeout=MOVE)


def nothing_is_run_that_was_chosen_before(notebook: Any) -> None:
    """Check that the controls return to the values in the pictures and stay: the kernel has handled every message."""
    page = notebook.page
    notebook.wait_until_idle()
    page.get_by_role("button", name="Pin", exact=True).click()
    says(page, "This step takes exactly as long as the pinned one (seconds 0)")
    page.get_by_role("button", name="Unpin", exact=True).click()
    expect(slider(page, "seconds")).to_have_attribute("aria-valuetext", "0")


def between_two_runs(page: Page, stop: Any) -> None:
    """Stop between two runs, with the keyboard alone."""
    expect(page.locator(".course-picture").first).to_have_css("opacity", "1")
    press(page, "seconds", "ArrowRight")
    says(page, "took 1 s")
    page.get_by_role("progressbar", name=LEFT).wait_for(timeout=MOVE)
    page.keyboard.press("Tab")
    expect(stop).to_be_focused()
    page.keyboard.press("Enter")
    expect(stop).to_have_attribute("aria-disabled", "true", timeout=MOVE)
    expect(stop).to_be_focused()
    expect(page.get_by_role("alert")).to_contain_text(STOPPED, timeout=MOVE)
    press(page, "seconds", "ArrowLeft")
    says(page, "took 0 s")


def buttons_act_on_the_last_of_quick_moves(page: Page) -> None:
    """Move twice while the kernel is busy, so that the browser holds the second move back, but not the buttons."""
    press(page, "seconds", "ArrowRight")
    press(page, "seconds", "ArrowLeft")
    for name in ("Pin", "Play"):
        page.get_by_role("button", name=name, exact=True).click()
    says(page, "took 0 s This step takes exactly as long as the pinned one (seconds 0)")
    expect(page.get_by_role("group", name="Player of a timeline")).to_be_visible()
