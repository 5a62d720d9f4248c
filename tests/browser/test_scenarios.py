"""A case with a fault, from its evidence to its debrief: with the mouse, and with the keyboard alone."""

from __future__ import annotations

import shutil
from typing import Any

from playwright.sync_api import Locator, Page, expect

RUN = 90_000  # milliseconds that a run may take on a busy machine
CASE = "notebooks/scenarios/S07_regression.ipynb"
PLAN, MEASURING, CHANGE, DEBRIEF = 3, 4, 6, 8  # numbers of the cells
WHAT = "It was one slow device."  # with seed 0


def button(card: Locator, name: str) -> Locator:
    return card.get_by_role("button", name=name, exact=True)


def feedback(card: Locator) -> Locator:
    return card.get_by_role("group", name="What came of it")


def anew(lab: Any, notebook: Any) -> None:
    shutil.rmtree(lab.server.answers, ignore_errors=True)
    notebook.run_all()
    expect(notebook.output(DEBRIEF)).to_contain_text("There is no debrief yet")


def test_a_case_with_the_mouse_and_with_the_keyboard_alone(lab: Any) -> None:
    notebook = lab.open(CASE)
    for answer in (with_the_mouse, with_the_keyboard_alone):
        anew(lab, notebook)
        answer(notebook)
        assert notebook.errors == []


def with_the_mouse(notebook: Any) -> None:
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
    told(notebook, "81 minutes of the cluster, for 2 measurements and 2 changes.")


def with_the_keyboard_alone(notebook: Any) -> None:
    page: Page = notebook.page
    button(notebook.output(MEASURING), "Who sits where, 1 minute").focus()
    for key in ("Tab", "Tab", "Tab", "Enter"):
        page.keyboard.press(key)
    expect(notebook.output(MEASURING).get_by_role("status")).to_contain_text("5 minutes", timeout=RUN)
    expect(notebook.output(MEASURING).locator("svg[role=img]").first).to_be_visible()
    card = notebook.output(CHANGE)
    choose(page, card, 4, "Commit to this answer")
    expect(button(card, "Run it")).to_be_focused()
    expect(button(card, "Run it")).to_have_attribute("aria-disabled", "false")
    page.keyboard.press("Enter")
    expect(feedback(card)).to_contain_text("Right.", timeout=RUN)
    told(notebook, "35 minutes of the cluster, for 1 measurement and 1 change.")


def choose(page: Page, card: Locator, place: int, then: str) -> None:
    card.get_by_role("radio").first.focus()
    for key in (*["ArrowDown"] * place, *["Space"] * (not place), "Tab"):
        page.keyboard.press(key)
    expect(button(card, then)).to_be_focused()
    page.keyboard.press("Enter")


def told(notebook: Any, bill: str) -> None:
    """Run the last cell again."""
    notebook.page.locator(".jp-Notebook .jp-Cell .jp-InputArea-prompt").nth(DEBRIEF).click()
    notebook.page.keyboard.press("Control+Enter")
    expect(notebook.output(DEBRIEF)).to_contain_text(WHAT, timeout=RUN)
    expect(notebook.output(DEBRIEF)).to_contain_text(bill)
