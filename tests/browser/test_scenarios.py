"""Cases with a fault, from the evidence to the debrief: one with the mouse, and one with the keyboard alone."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.browser.test_cards import RUN, button, feedback, press, ready

PLAN, MEASURING, CHANGE, DEBRIEF = 3, 4, 6, 8  # numbers of the cells of S7
FOCUSED = "[...document.querySelectorAll('.jp-Notebook .jp-Cell')].indexOf(document.activeElement)"  # -1: no cell


def test_a_case_with_the_mouse(lab: Any) -> None:
    notebook = lab.open("notebooks/scenarios/S07_regression.ipynb")
    notebook.run_all()
    expect(notebook.output(DEBRIEF)).to_contain_text("There is no debrief yet")
    card = notebook.output(PLAN)
    card.get_by_role("radio", name="one step of every rank, 5 minutes").click()
    button(card, "Commit to this answer").click()
    button(card, "Run it").click()
    expect(feedback(card)).to_contain_text("Right.", timeout=RUN)

    instruments = notebook.output(MEASURING)
    for name, minutes in (("Who sits where, 1 minute", 1), ("Each device alone, 20 minutes", 21)):
        button(instruments, name).click()
        expect(instruments.get_by_role("status")).to_contain_text(f"{minutes} minute", timeout=RUN)
    expect(instruments).to_contain_text("1.6 ms for a layer")

    card = notebook.output(CHANGE)
    for name, words in (("twice as many buckets", "Not this one."), ("replace the slowest", "Right.")):
        card.get_by_role("radio", name=name).click()
        button(card, "Commit to this answer").click()
        button(card, "Run it").click()
        expect(feedback(card)).to_contain_text(words, timeout=RUN)
        button(card, "Try another answer").click()
        expect(feedback(card)).to_have_count(0, timeout=RUN)  # the page below has moved up
    notebook.page.locator(".jp-Notebook .jp-Cell .jp-InputArea-prompt").nth(DEBRIEF).click()
    notebook.page.keyboard.press("Control+Enter")
    expect(notebook.output(DEBRIEF)).to_contain_text("It was one slow device.", timeout=RUN)
    expect(notebook.output(DEBRIEF)).to_contain_text("81 minutes of the cluster, for 2 measurements and 2 changes.")
    assert notebook.errors == []


def test_a_case_with_the_keyboard_alone(lab: Any) -> None:
    """Run each cell in place, reach its controls with Tab and leave them with Escape."""
    notebook = lab.open("notebooks/scenarios/S02_night_call.ipynb")
    page: Page = notebook.page
    run(notebook, 1)
    it_can_be_read_to_its_end(notebook)
    for number, place in ((2, 0), (4, 1), (5, 3)):
        card = run(notebook, number)
        tab_to(page, card.get_by_role("radio").first)
        decide_and_run(page, card, place, "Right.")
    one_step_of_every_rank_is_measured(page, run(notebook, 7))
    card = run(notebook, 9)
    tab_to(page, card.get_by_role("radio").first)
    decide_and_run(page, card, 0, "Not this one.")
    press(page, "Enter")
    focused(button(card, "Commit to this answer"))
    press(page, "Shift+Tab")
    focused(card.get_by_role("radio").first)
    decide_and_run(page, card, 1, "Right.")
    debrief = run(notebook, 11)
    expect(debrief).to_contain_text("It was a slow link between the machines.")
    expect(debrief).to_contain_text("65 minutes of the cluster, for 1 measurement and 2 changes.")
    assert notebook.errors == []


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


def decide_and_run(page: Page, card: Locator, place: int, words: str) -> None:
    """Decide and run, with the focus on the first option, then on the button of each next step."""
    press(page, *["ArrowDown"] * place, *["Space"] * (not place), "Tab")
    focused(button(card, "Commit to this answer"))
    for name in ("Run it", "Try another answer"):
        press(page, "Enter")
        ready(button(card, name))
        focused(button(card, name))
    expect(feedback(card)).to_contain_text(words)


def one_step_of_every_rank_is_measured(page: Page, instruments: Locator) -> None:
    one = button(instruments, "One step of every rank, 5 minutes")
    tab_to(page, button(instruments, "Who sits where, 1 minute"))
    press(page, "Tab", "Tab", "Tab", "Enter")
    ready(one)
    focused(one)
    expect(instruments.get_by_role("status")).to_contain_text("5 minutes of the cluster")
    expect(instruments.locator("svg[role=img]").first).to_be_in_viewport()
    inside = instruments.locator(":focus")
    for _ in range(9):  # the remaining buttons, and pictures that unfold
        press(page, *["Tab"] * inside.count())
    expect(inside).to_have_count(0)
    while page.evaluate(FOCUSED) < 0:  # in the empty cell that JupyterLab adds
        press(page, "Shift+Tab")
