"""`course.py present`, as a room sees it: large type, one section after the other, questions without answers."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect

from course import SETTINGS
from course_lib.classroom import presenting
from tests.browser.conftest import PATIENCE, ROOT, SCREEN, Server, photographed_if_it_fails, running
from tests.browser.hands import MOVE, OURS, cell, smallest_label

PICTURES = """
from course_lib import Span, Timeline
from course_lib.classroom.widgets import play
from course_lib.figures import gantt, loss_curves
display(loss_curves({"a": [2.0, 1.0]}, title="A figure"))
display(gantt(pass_ := Timeline([Span(0, "forward", "", 0.0, 1.0)], 1, "modelled")))
play(pass_)
"""
QUESTION = "Question: what does each worker get?"


@pytest.fixture
def stage(chromium: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """JupyterLab with the options that course.py gives it for lesson 02, or for the page that the test names."""
    shown = getattr(request, "param", "02_data_parallelism.ipynb")
    options = presenting.stage(ROOT, SETTINGS, tmp_path / "stage", ROOT / "notebooks" / shown)
    with running(tmp_path, tmp_path / "stage", options, COURSE_POLL="1") as started:
        yield started


@pytest.fixture
def page(browser: BrowserContext, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A separate page, so that the other tests' page still shows JupyterLab."""
    with photographed_if_it_fails(browser.new_page(), request) as page:
        yield page
    page.close()


def open_lesson(page: Page, stage: Server) -> None:
    """Open the lesson at JupyterLab's own address. There is no status bar to tell that the kernel is ready."""
    page.goto(f"{stage.url}/?token={stage.token}", timeout=PATIENCE)
    page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=PATIENCE)
    deadline = time.monotonic() + PATIENCE / 1000
    while not kernel_is_idle(stage):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def kernel_is_idle(stage: Server) -> bool:
    with contextlib.suppress(OSError):  # the server fails for a kernel that is just starting, or is busy
        return [kernel["execution_state"] for kernel in stage.call("GET", "kernels")] == ["idle"]
    return False


def test_a_lesson_is_projected_section_by_section(stage: Server, page: Page) -> None:
    open_lesson(page, stage)
    it_is_large_and_nothing_else_is_there(page)
    sections_unfold_with_one_key(page)
    and_with_the_mouse(page)
    a_card_shows_the_question_and_runs_every_answer(page)
    what_was_predicted_is_told_after_the_run(page)
    everything_is_large_and_pictures_that_stand_alone_are_wide(page)


def it_is_large_and_nothing_else_is_there(page: Page) -> None:
    text = page.locator(".jp-Notebook .jp-RenderedMarkdown p").first
    assert text.evaluate("text => parseFloat(getComputedStyle(text).fontSize)") >= 28
    for bar in ("#jp-main-statusbar", ".jp-cell-toolbar", ".jp-NotebookPanel-toolbar button", ".jp-SideBar"):
        expect(page.locator(bar).locator("visible=true")).to_have_count(0)


def sections_unfold_with_one_key(page: Page) -> None:
    heading = page.get_by_role("heading", name="1. Many hands")
    text = page.get_by_text("A model learns from a minibatch", exact=False)
    question = page.get_by_role("heading", name=QUESTION)
    expect(heading).to_be_visible()
    expect(question).to_be_hidden()
    page.locator(".jp-Notebook .jp-Cell").first.click()
    page.keyboard.press("PageDown")
    expect(text).to_be_in_viewport()
    expect(question).to_be_visible()
    expect(heading).to_be_in_viewport()


def and_with_the_mouse(page: Page) -> None:
    first = page.get_by_text("A model learns from a minibatch", exact=False)
    question = page.get_by_role("heading", name=QUESTION)
    arrow = page.locator(".jp-MarkdownCell").filter(has_text="1. Many hands").locator(".jp-collapseHeadingButton")
    arrow.click()
    expect(question).to_be_hidden()
    arrow.click()
    expect(question).to_be_visible()
    expect(first).to_be_in_viewport()


def what_was_predicted_is_told_after_the_run(page: Page) -> None:
    answer = page.get_by_role("paragraph").filter(has_text="Every sample goes to exactly one worker")
    cell(page, 'Card("Q4")').locator(".jp-InputArea-prompt").click()
    page.keyboard.press("PageDown")
    expect(page.get_by_role("paragraph").filter(has_text="Which samples does each of them get?")).to_be_visible()
    expect(answer).to_be_hidden()
    code = cell(page, "batches.split(torch.arange(12), 4)")
    code.locator(".jp-InputArea-prompt").click()
    page.keyboard.press("Control+Enter")
    expect(answer).to_be_visible(timeout=MOVE)


def a_card_shows_the_question_and_runs_every_answer(page: Page) -> None:
    for key in ("PageDown", "Shift+Enter", "Shift+Enter", "Shift+Enter"):
        page.keyboard.press(key)
    card = cell(page, 'Card("Q4")')
    expect(card.get_by_role("button", name="Run it", exact=True)).to_be_visible(timeout=MOVE)
    assert card.get_by_role("radio").count() == 0
    question = card.locator("b", has_text="What does each worker get?")
    assert question.evaluate("text => parseFloat(getComputedStyle(text).fontSize)") >= 18
    assert card.get_by_role("group", name="What came of it").count() == 0
    card.get_by_role("button", name="Run it", exact=True).click()
    expect(card.get_by_role("group", name="What came of it")).to_have_count(4, timeout=MOVE)
    pictures_grow_with_the_text_and_with_a_key(page, card)


def everything_is_large_and_pictures_that_stand_alone_are_wide(page: Page) -> None:
    page.set_viewport_size({"width": 1920, "height": 1080})
    said = ".jp-Notebook .course-live :is(button, p, li, td, summary, svg[role=img] text)"
    size = "one => parseFloat(getComputedStyle(one).fontSize) * (one.getScreenCTM?.().d ?? 1)"
    expect(page.locator(said).first).to_be_attached()
    page.wait_for_function(  # JupyterLab lays the page out anew in its own time
        f"Math.min(...[...document.querySelectorAll('{said}')].map({size})) >= 28", timeout=MOVE
    )
    page.keyboard.press("Enter")
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(PICTURES)
    page.keyboard.press("Control+Enter")
    alone = page.locator(f"{OURS}:has(> div img)")
    expect(alone).to_have_count(2, timeout=MOVE)  # charts, too
    share = "output => output.querySelector('img').getBoundingClientRect().width / output.clientWidth"
    assert 0.9 < alone.first.evaluate(share) < 1.001
    page.set_viewport_size(SCREEN)
    moving = page.locator(".course-player").last
    page.wait_for_function(
        "part => part.querySelector('svg').clientWidth <= part.clientWidth", arg=moving.element_handle()
    )


@pytest.mark.parametrize("stage", ["scenarios/S02_night_call.ipynb"], indirect=True)
def test_a_room_investigates_a_case_and_sees_its_debrief_without_an_answer(stage: Server, page: Page) -> None:
    open_lesson(page, stage)
    it_is_large_and_nothing_else_is_there(page)
    expect(page.get_by_role("heading", name="Scenario 2: a call in the night")).to_be_visible()
    for command in ("expand-all-headings", "run-all-cells"):
        page.evaluate(f"jupyterapp.commands.execute('notebook:{command}')")
    evidence = cell(page, "case.evidence()")
    expect(evidence.get_by_text("What everybody sees")).to_be_visible(timeout=MOVE)
    assert smallest_label(evidence) >= 11
    instruments = cell(page, "Measuring(case)")
    instruments.get_by_role("button", name=re.compile("^The last call of each rank")).click()
    expect(instruments.get_by_text("none, number 0").first).to_be_visible(timeout=MOVE)
    page.keyboard.press("Escape")  # so that the keys for sections work again, as the teaching plan says
    expect(instruments).to_be_focused()
    debrief = cell(page, "case.debrief()").get_by_text("It was a shard whose samples count a thousand times too much")
    expect(debrief).to_be_visible(timeout=MOVE)


def pictures_grow_with_the_text_and_with_a_key(page: Page, card: Locator) -> None:
    before = smallest_label(card)
    assert before >= 15
    page.locator(".jp-Notebook .jp-InputArea-prompt").first.click()
    page.keyboard.press("Alt+ArrowUp")
    expect(page.locator(".jp-Notebook .jp-RenderedMarkdown p").first).to_have_css("font-size", "29px")
    assert smallest_label(card) >= before
