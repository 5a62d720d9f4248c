"""Cases with a fault, from the evidence to the debrief: one with the mouse, and one with the keyboard alone."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.browser.test_cards import RUN, button, press, ready

MEASURING, DEBRIEF = 3, 5  # numbers of the cells of S2 and S7
FOCUSED = "[...document.querySelectorAll('.jp-Notebook .jp-Cell')].indexOf(document.activeElement)"  # -1: no cell


def test_a_case_with_the_mouse(lab: Any) -> None:
    notebook = lab.open("notebooks/scenarios/S07_regression.ipynb")
    notebook.run_all()
    expect(notebook.output(DEBRIEF)).to_contain_text("There is no debrief yet", timeout=RUN)
    desk = notebook.output(MEASURING)
    button(desk, "One step of every rank, and where it sits, 5 minutes").click()
    expect(desk).to_contain_text("computes for", timeout=RUN)
    for device, words in (("0", "not as it was planned"), ("3", "as it was planned again")):
        chosen(desk, "what").select_option("replace a device")
        chosen(desk, "where").select_option(device)
        button(desk, "Do it").click()
        expect(desk).to_contain_text(words, timeout=RUN)
    notebook.page.locator(".jp-Notebook .jp-Cell .jp-InputArea-prompt").nth(DEBRIEF).click()
    notebook.page.keyboard.press("Control+Enter")
    expect(notebook.output(DEBRIEF)).to_contain_text("It was a device that is slower than the others", timeout=RUN)
    expect(notebook.output(DEBRIEF)).to_contain_text("device-hours")
    assert notebook.errors == []


def test_a_case_with_the_keyboard_alone(lab: Any) -> None:
    """Run each cell in place, reach its controls with Tab and leave them with Escape."""
    notebook = lab.open("notebooks/scenarios/S02_night_call.ipynb")
    page: Page = notebook.page
    curves = run(notebook, 1).get_by_role("img").first
    expect(curves).to_be_in_viewport(ratio=0.3)  # without a move down the page
    it_can_be_read_to_its_end(notebook)
    desk = run(notebook, MEASURING)
    the_last_call_is_asked(page, desk)
    a_shard_is_left_out(page, desk)
    expect(run(notebook, DEBRIEF)).to_contain_text("It was a shard", timeout=RUN)
    assert notebook.errors == []


def chosen(desk: Locator, name: str) -> Locator:
    return desk.get_by_role("combobox", name=name, exact=True)


def run(notebook: Any, number: int) -> Locator:
    """Go to a cell from an earlier one or its output, and run it; return its output."""
    page: Page = notebook.page
    press(page, "Escape")
    page.wait_for_function(f"() => {FOCUSED} >= 0")  # JupyterLab's own focus, before anything was touched
    before = page.evaluate(FOCUSED)
    assert before <= number
    press(page, *["ArrowDown"] * (number - before), "Control+Enter")
    prompt = page.locator(".jp-Notebook .jp-Cell").nth(number).locator(".jp-InputArea-prompt")
    expect(prompt).to_have_text(re.compile(r"\d"), timeout=RUN)
    return notebook.output(number)


def it_can_be_read_to_its_end(notebook: Any) -> None:
    end = notebook.output(1).get_by_text("From the log")
    in_sight = "end => end.getBoundingClientRect().bottom < innerHeight"
    for _ in range(20):  # the page grows while pictures arrive
        if end.evaluate(in_sight):
            break
        press(notebook.page, "PageDown")
        notebook.page.wait_for_timeout(200)
    expect(end).to_be_in_viewport()


def tab_to(page: Page, control: Locator) -> None:
    """Press Tab until the control has the focus, past JupyterLab's own for cells and headings."""
    expect(control).to_be_visible(timeout=RUN)
    for _ in range(4):
        press(page, "Tab")
        if control.evaluate("control => control === document.activeElement"):
            break
    focused(control)


def focused(control: Locator) -> None:
    """Check that the control has the focus, visibly."""
    expect(control).to_be_focused(timeout=RUN)
    expect(control).to_be_in_viewport(ratio=0.99)
    expect(control).to_have_css("outline-style", "solid")


def a_shard_is_left_out(page: Page, desk: Locator) -> None:
    """With the focus on the first instrument: the way to the change leads over the others."""
    what, do = chosen(desk, "what"), button(desk, "Do it")
    while not what.evaluate("list => list === document.activeElement"):
        press(page, "Tab")
    press(page, "l")  # as in "leave out a shard"
    expect(chosen(desk, "where")).to_have_text(re.compile("^0"), timeout=RUN)
    expect(chosen(desk, "from checkpoint")).to_be_enabled()  # Tab leads over it as soon as there is a choice
    focused(what)
    press(page, "Tab", "4", "Tab", "Tab")
    focused(do)
    press(page, "Enter")
    expect(desk).to_contain_text("as it was planned again", timeout=RUN)
    ready(do)
    focused(do)


def the_last_call_is_asked(page: Page, desk: Locator) -> None:
    first = button(desk, "The last call of each rank, and where it stands, 3 minutes")
    tab_to(page, first)
    press(page, "Enter")
    paid = button(desk, "The last call of each rank, and where it stands, paid")
    expect(paid).to_be_visible(timeout=RUN)
    ready(paid)
    focused(paid)
    last_calls = desk.get_by_role("img", name=re.compile("different call"))
    expect(last_calls.get_by_text("none, number 0")).to_be_visible(timeout=RUN)
    expect(desk.get_by_role("status").last).to_contain_text("after 0 changes and 1 measurement")
