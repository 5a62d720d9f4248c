"""Lessons 00 to 03 as a student goes through them: open, run all, turn the knobs, look."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import Notebook
from tests.browser.hands import (
    MOVE,
    OURS,
    RUN,
    STDERR,
    cell,
    drag,
    fits_one_screen,
    go_through,
    pictures,
    press,
    says,
    slider,
    smallest_label,
    unrun,
    violations,
)


def test_the_first_page_shows_a_deadlock_and_goes_on(lab: Any) -> None:
    notebook = lab.open("notebooks/00_start_here.ipynb")
    notebook.run_all(RUN)
    errors = notebook.page.locator(STDERR)
    expect(errors).to_have_count(1)
    expect(errors).to_contain_text("Nobody can move: 0 waits to receive from 1, 1 waits to receive from 0")
    expect(unrun(notebook.page)).to_have_count(0)  # a number may be painted a moment after the kernel is idle
    assert violations(notebook.page) == []
    pictures_grow_with_the_text(notebook.page)


def pictures_grow_with_the_text(page: Page) -> None:
    before, text = smallest_label(page), page.locator(".jp-Notebook .jp-RenderedMarkdown p").first
    for change, pixels in (("Increase", 15), ("Decrease", 14)):
        page.get_by_role("menuitem", name="Settings", exact=True).click()
        page.locator(".lm-Menu-itemLabel").get_by_text("Theme", exact=True).click()
        page.get_by_role("menuitem", name=f"{change} Content Font Size", exact=True).click()
        expect(text).to_have_css("font-size", f"{pixels}px")
        assert smallest_label(page) == pytest.approx(before * pixels / 14, rel=1e-3)


def test_one_machine_is_not_enough(lab: Any) -> None:
    page = go_through(lab, "01_one_machine_is_not_enough")
    explorer = cell(page, "memory_explorer()")
    says(explorer, "6.7B does not fit")
    high = fits_one_screen(explorer)
    press(explorer, "model", "ArrowLeft")
    says(explorer, "2.7B fits")
    drag(explorer, "device", 0.0)
    says(explorer, "2.7B does not fit")
    explorer.get_by_text("Does 2.7B fit into one laptop-CPU?").wait_for(timeout=MOVE)
    assert fits_one_screen(explorer) == high
    labels_can_be_read_on_a_narrow_page(page)


def labels_can_be_read_on_a_narrow_page(page: Page) -> None:
    page.set_viewport_size({"width": 800, "height": 500})
    assert smallest_label(page) >= 11


def test_data_parallelism(lab: Any) -> None:
    page = go_through(lab, "02_data_parallelism")
    explorer = cell(page, "DataParallelExplorer()")
    step = pictures(explorer).last
    expect(step).to_have_attribute("aria-label", re.compile("^4 ranks"))
    high = fits_one_screen(explorer)
    press(explorer, "ranks", "ArrowRight")
    expect(step).to_have_attribute("aria-label", re.compile("^5 ranks"), timeout=MOVE)
    drag(explorer, "ranks", 0.2)
    expect(step).to_have_attribute("aria-label", re.compile("^2 ranks"), timeout=MOVE)
    says(explorer, "2 ranks, 32 samples, emulated")
    assert fits_one_screen(explorer) == high
    for key in ("ArrowLeft", "ArrowRight"):
        before = step.inner_html()
        press(explorer, "overlap", key)
        expect(step).not_to_have_js_property("innerHTML", before, timeout=MOVE)
    expect(step).to_contain_text("before (thin bars): ")
    a_step_is_pinned(explorer)
    an_answer_is_folded_until_it_is_opened(page)
    pieces_go_around_a_ring(cell(page, "collective_explorer("))
    lesson_is_whole_the_next_day(lab, page)


def a_step_is_pinned(explorer: Locator) -> None:
    """Pin a step with the keyboard, and unpin it with the mouse."""
    explorer.get_by_role("button", name="Pin", exact=True).press("Enter")
    says(explorer, "This step takes exactly as long as the pinned one (ranks 2,")
    press(explorer, "ranks", "ArrowRight")
    says(explorer, "than the pinned one (")
    expect(pictures(explorer).last).to_contain_text("pinned (thin bars)")
    explorer.get_by_role("button", name="Unpin").click()
    expect(pictures(explorer).last).not_to_contain_text("pinned", timeout=MOVE)


def an_answer_is_folded_until_it_is_opened(page: Page) -> None:
    """Open folded code with the keyboard alone; open sentences with the keyboard, and close them with the mouse."""
    folded = page.locator(".jp-CodeCell").filter(has=page.locator(".jp-InputPlaceholder"))
    code = page.locator(".jp-InputArea-editor").filter(has_text="average_gradients(model, samples")
    expect(folded).to_have_count(1)
    expect(code).to_have_count(0)
    cell(page, 'Card("data_distribution")').locator(".jp-InputArea-prompt").click()
    for key in ("ArrowDown", "Shift+Enter", "Space"):  # past the sentences between them
        page.keyboard.press(key)
    expect(code).to_be_visible()
    summary = page.locator("summary").filter(has_text="What it shows")
    inside = summary.locator("xpath=following-sibling::p")
    expect(inside).to_be_hidden()
    summary.press("Enter")
    expect(inside).to_be_visible()
    summary.click()
    expect(inside).to_be_hidden()


def pieces_go_around_a_ring(explorer: Locator) -> None:
    """Play a collective with the mouse, then go step by step with the keyboard."""
    high = fits_one_screen(explorer)
    complete = explorer.locator("g:not([data-fly]) > circle[stroke-width='2.5']").locator("visible=true")
    flying = explorer.locator("g[data-fly]").locator("visible=true")
    assert (complete.count(), flying.count()) == (8, 0)  # half way
    explorer.get_by_role("button", name="Play", exact=True).click()
    time = slider(explorer, "Time")
    expect(time).to_be_visible(timeout=MOVE)
    explorer.page.keyboard.press("End")  # keys act on what plays
    expect(complete).to_have_count(64)
    assert fits_one_screen(explorer) == high  # what is below stays where it was
    time.press("Home")
    expect(complete).to_have_count(0)
    time.press("ArrowRight")
    expect(flying).to_have_count(8)
    drag(explorer, "Time", 1.0)
    expect(flying).to_have_count(0)
    press(explorer, "ranks", "ArrowLeft")
    says(explorer, "7 ranks")
    expect(slider(explorer, "Time")).to_have_count(0)
    for key, way in (("End", "Tree broadcast"), ("ArrowLeft", "Hierarchical all-reduce")):
        press(explorer, "collective", key)
        says(explorer, f"{way}: 7 ranks")
    drag(explorer, "ranks", 0.0)
    says(explorer, "2 ranks")
    assert fits_one_screen(explorer) == high


def lesson_is_whole_the_next_day(lab: Any, page: Page) -> None:
    notebook, number = Notebook(page), page.locator(".course-live").count()
    assert number == 11
    notebook.save()
    notebook.restart()
    ended = page.locator(".course-live.jupyter-widgets-disconnected")
    expect(ended).to_have_count(number, timeout=MOVE)
    said = ended.evaluate_all("all => all.map(one => getComputedStyle(one, '::before').content)")
    assert set(said) == {'"The kernel has ended. Run this cell again to go on."'}
    dead = page.locator(".course-live").locator("input:not(.widget-text input), button")
    assert dead.locator("visible=true").count() == 0
    assert pictures(cell(page, "DataParallelExplorer()")).locator("visible=true").count() == 2
    notebook.wait_until_idle()
    lab.server.end_kernels()
    page = lab.open("notebooks/02_data_parallelism.ipynb", anew=True).page
    expect(page.get_by_text("Run this cell")).to_have_count(number, timeout=MOVE)
    assert page.get_by_text("model not found").count() == 0
    assert cell(page, "DataParallelExplorer()").locator(f"{OURS} img").count() == 2


def test_sharded_data_parallelism(lab: Any) -> None:
    page = go_through(lab, "03_sharded_data_parallelism")
    explorer = cell(page, "sharding_explorer()")
    says(explorer, "6.7B on 8 devices with ZeRO-1 fits")
    high = fits_one_screen(explorer)
    press(explorer, "stage", "ArrowLeft")
    says(explorer, "6.7B on 8 devices with data parallelism does not fit")
    drag(explorer, "stage", 1.0)
    press(explorer, "model", "ArrowRight")
    says(explorer, "13B on 8 devices with ZeRO-3 fits")
    drag(explorer, "recompute", 1.0)
    explorer.get_by_text("computing again").first.wait_for(timeout=MOVE)
    assert fits_one_screen(explorer) == high


def test_a_figure_stays_when_the_theme_changes(lab: Any) -> None:
    """A figure just run keeps its height, which plotly's own resizing would take away."""
    cost = "from course_lib.figures import loss_curves\nloss_curves({'a': [2.0, 1.0]})"
    lab.write("figure.ipynb", cost)
    notebook = lab.open("figure.ipynb")
    notebook.run_all(RUN)
    figure = notebook.page.locator(".js-plotly-plot")
    before = settled(figure)
    assert before["height"] > 200
    notebook.page.emulate_media(color_scheme="dark")
    notebook.page.locator("body[data-jp-theme-light=false]").wait_for(state="attached")
    expect(figure.locator(".xtick text").first).to_have_css("fill", "rgba(255, 255, 255, 0.87)")
    notebook.page.wait_for_timeout(2000)  # only after a while is it certain that it stays
    after = figure.bounding_box()
    notebook.page.emulate_media(color_scheme="light")
    assert after == before


def settled(figure: Locator) -> Any:
    """The place of a figure, once it no longer grows."""
    expect(figure.locator(".nsewdrag").first).to_be_visible(timeout=MOVE)
    boxes = [figure.bounding_box()]
    while len(boxes) < 2 or boxes[-1] != boxes[-2]:
        figure.page.wait_for_timeout(500)
        boxes.append(figure.bounding_box())
    return boxes[-1]
