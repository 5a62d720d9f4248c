"""One question card of each kind, answered with the mouse and with the keyboard alone."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

RUN = 90_000  # milliseconds that a run may take on a busy machine
CELL = "from course_lib.widgets.cards import Card\nCard({!r}, plain={})"
ORDER = ["split", "forward", "backward", "all_reduce", "update", "clear"]


@pytest.fixture
def ask(lab: Any) -> Any:
    """Open a notebook with one card, and run it. Returns the page."""

    def open_card(name: str, plain: bool = False) -> Page:
        lab.write(f"notebooks/{lab.workspace}.ipynb", CELL.format(name, plain))
        notebook = lab.open(f"notebooks/{lab.workspace}.ipynb")
        notebook.run_all()
        return notebook.page

    return open_card


def button(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def feedback(page: Page) -> Locator:
    return page.get_by_role("group", name="What came of it")


def order(page: Page) -> list[str]:
    return [text.split(":")[0] for text in page.get_by_role("option").all_inner_texts()]


def test_a_choice_with_the_mouse(ask: Any) -> None:
    page = ask("Q4")
    page.get_by_role("radio", name="64 samples, and the whole model").click()
    button(page, "Commit to this answer").click()
    expect(page.get_by_role("radio").first).to_be_disabled()
    expect(page.get_by_role("status").filter(has_text="You have decided: b")).to_be_visible()
    button(page, "Run it").click()
    expect(feedback(page)).to_contain_text("Right. You answered: b", timeout=RUN)
    assert feedback(page).locator("svg[role=img]").count() == 1
    button(page, "Try another answer").click()
    expect(feedback(page)).to_have_count(0)


def test_a_choice_with_the_keyboard_alone(ask: Any) -> None:
    page = ask("Q4")
    page.get_by_role("radio").first.focus()
    press(page, "ArrowDown", "ArrowDown")
    expect(page.get_by_role("radio").nth(2)).to_be_checked()
    press(page, "Tab")
    expect(button(page, "Commit to this answer")).to_be_focused()
    press(page, "d", "d", "Enter")  # neither deletes the cell nor leaves the card
    expect(button(page, "Run it")).to_be_focused()
    press(page, "Space")
    expect(feedback(page)).to_contain_text("Not this one. You answered: c", timeout=RUN)
    expect(button(page, "Try another answer")).to_be_focused()


def test_a_number(ask: Any) -> None:
    page = ask("bytes_sent")
    box = page.get_by_role("textbox", name="Your answer:")
    box.focus()
    page.keyboard.type("5.6")
    press(page, "Tab", "Enter")
    expect(page.get_by_role("alert").filter(has_text="has no unit; write for instance")).to_be_visible()
    box.focus()
    page.keyboard.type(" MB")
    press(page, "Tab", "Enter")
    expect(button(page, "Run it")).to_be_visible()
    press(page, "Enter")
    expect(feedback(page)).to_contain_text("what all 8 ranks send together", timeout=RUN)


def test_an_order_with_the_mouse(ask: Any) -> None:
    page = ask("Q2")
    for place, name in enumerate(ORDER):
        row = page.get_by_role("option", name=f"{name}:")
        target = page.get_by_role("option").nth(place)
        start, end = row.bounding_box(), target.bounding_box()
        assert start is not None
        assert end is not None
        page.mouse.move(start["x"] + 60, start["y"] + start["height"] / 2)
        page.mouse.down()
        page.mouse.move(end["x"] + 60, end["y"] + end["height"] / 2, steps=12)
        page.mouse.up()
    assert order(page) == ORDER
    button(page, "Commit to this answer").click()
    button(page, "Run it").click()
    expect(feedback(page)).to_contain_text("Right.", timeout=RUN)


def test_an_order_with_the_keyboard_alone(ask: Any) -> None:
    page = ask("Q2")
    page.get_by_role("option").first.focus()
    for place, name in enumerate(ORDER):
        now = order(page).index(name)
        press(page, "Home", *["ArrowDown"] * now, *["Alt+ArrowUp"] * (now - place))
    assert order(page) == ORDER
    press(page, "d", "d")
    assert order(page) == ORDER
    said = page.locator("[aria-live=assertive]").filter(has_text="now")
    assert "of 6" in said.inner_text()
    press(page, "Home", "Alt+ArrowDown", "Alt+ArrowUp", "Tab", "Tab", "Tab", "Enter")
    expect(button(page, "Run it")).to_be_focused()
    press(page, "Enter")
    expect(feedback(page)).to_contain_text("Right.", timeout=RUN)


def test_an_order_with_buttons_for_who_cannot_drag(ask: Any) -> None:
    page = ask("Q2")
    first, second = order(page)[:2]
    page.get_by_role("option").first.click()
    button(page, "Move down").click()
    assert order(page)[:2] == [second, first]
    button(page, "Move up").click()
    assert order(page)[:2] == [first, second]


def test_a_text(ask: Any) -> None:
    page = ask("data_distribution")
    page.get_by_role("textbox", name="Your answer:").focus()
    page.keyboard.type("Shares of 3, 3, 2 and 2, weighted.")
    press(page, "Tab", "Enter")
    expect(button(page, "Run it")).to_be_visible()
    press(page, "Enter")
    expect(feedback(page)).to_contain_text("A good answer:", timeout=RUN)
    page.get_by_role("checkbox").first.focus()
    press(page, "Space")
    expect(page.get_by_role("checkbox").first).to_be_checked()


def test_what_was_decided_is_there_when_the_notebook_is_opened_anew(ask: Any) -> None:
    page = ask("Q4")
    page.get_by_role("radio").nth(3).click()
    button(page, "Commit to this answer").click()
    expect(button(page, "Run it")).to_be_visible()
    page = ask("Q4")
    expect(page.get_by_role("radio").nth(3)).to_be_checked()
    expect(button(page, "Run it")).to_be_visible()


def test_a_card_without_anywidget(ask: Any) -> None:
    page = ask("Q2", plain=True)
    up = page.get_by_role("button", name="Up: split")
    for _ in range(3):
        up.click()
    button(page, "Commit to this answer").click()
    button(page, "Run it").click()
    expect(feedback(page)).to_contain_text("split → update → backward", timeout=RUN)
