"""One question card of each kind, answered with the mouse and with the keyboard alone."""

from __future__ import annotations

import shutil
from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import PATIENCE

RUN = 90_000  # milliseconds that a run may take on a busy machine
CARDS = ["Card('Q4')", "Card('bytes_sent')", "Card('Q2')", "Card('data_distribution')", "Card('S1_better')"]
CHOICE, NUMBER, ORDER, TEXT, PLAN = range(len(CARDS))
BUSY, BUTTON = len(CARDS), len(CARDS) + 1  # the cells after them: while the first runs, the kernel handles no message
SLOW = """import time
from course_lib.classroom.widgets.answers import Button

def count():
    button.label, button.leads_on = f"pressed {button.clicks} times", False
    time.sleep(1)

button = Button(count, "not pressed")
button.leads_on = True
button"""
# Clicks when the result has come, and again as soon as the button can be pressed.
AT_ONCE = """button => {
    let seen = 0;
    new MutationObserver((_, observer) => {
        if (button.textContent !== "Try another answer") return;
        button.click();
        if (++seen === 2) observer.disconnect();
    }).observe(button, { attributes: true });
}"""
RIGHT = ["split", "forward", "backward", "all_reduce", "update", "clear"]


def nothing_is_answered_yet(lab: Any, notebook: Any) -> None:
    """Check that every card is new."""
    shutil.rmtree(lab.server.answers, ignore_errors=True)
    notebook.run_all()


def button(card: Locator, name: str) -> Locator:
    return card.get_by_role("button", name=name, exact=True)


def ready(focused: Locator) -> None:
    """Wait until a button takes a press: while the kernel handles the previous one, presses are dropped."""
    expect(focused).to_be_focused()
    expect(focused).to_have_attribute("aria-disabled", "false")


def feedback(card: Locator) -> Locator:
    return card.get_by_role("group", name="What came of it")


def order(card: Locator) -> list[str]:
    return [text.split(":")[0] for text in card.get_by_role("option").all_inner_texts()]


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def drag(page: Page, row: Locator, to: Locator) -> None:
    row.evaluate("row => row.parentElement.scrollIntoView({block: 'center'})")  # the whole list is visible
    start, end = row.bounding_box(), to.bounding_box()
    assert start is not None
    assert end is not None
    page.mouse.move(start["x"] + 60, start["y"] + start["height"] / 2)
    page.mouse.down()
    page.mouse.move(end["x"] + 60, end["y"] + end["height"] / 2, steps=12)
    page.mouse.up()


def test_cards_with_the_mouse_and_with_the_keyboard_alone(lab: Any) -> None:
    """One notebook, with a card in each cell."""
    cells = [f"from lessons import Card\n{card}" for card in CARDS]
    lab.write("notebooks/cards.ipynb", *cells, "import time; time.sleep(0.5)", SLOW)
    notebook = lab.open("notebooks/cards.ipynb")
    nothing_is_answered_yet(lab, notebook)
    with_the_mouse(notebook)
    nothing_is_answered_yet(lab, notebook)
    with_the_keyboard_alone(notebook)


def with_the_mouse(notebook: Any) -> None:
    a_choice_is_decided_run_and_tried_again(notebook.output(CHOICE))
    an_order_is_dragged(notebook.page, notebook.output(ORDER))
    an_order_is_moved_with_buttons(notebook.output(ORDER))
    a_text_is_run_and_ticked_off(notebook.page, notebook.output(TEXT))
    what_was_decided_is_there_when_the_page_is_loaded_and_the_card_made_anew(notebook, notebook.output(NUMBER))


def a_choice_is_decided_run_and_tried_again(card: Locator) -> None:
    card.get_by_role("radio", name="64 samples, and the whole model").click()
    button(card, "Commit to this answer").click()
    expect(card.get_by_role("radio").first).to_be_disabled()
    expect(card.get_by_role("status")).to_contain_text("You have decided: b")
    button(card, "Run it").click()
    expect(feedback(card)).to_contain_text("Right. You answered: b", timeout=RUN)
    assert feedback(card).locator("svg[role=img]").count() == 1
    expect(feedback(card)).to_be_in_viewport(ratio=0.99)
    button(card, "Try another answer").click()
    expect(feedback(card)).to_have_count(0)


def an_order_is_dragged(page: Page, card: Locator) -> None:
    for place, name in enumerate(RIGHT):
        drag(page, card.get_by_role("option", name=f"{name}:"), card.get_by_role("option").nth(place))
    assert order(card) == RIGHT
    button(card, "Commit to this answer").click()
    button(card, "Run it").click()
    expect(feedback(card)).to_contain_text("Right.", timeout=RUN)


def an_order_is_moved_with_buttons(card: Locator) -> None:
    """Move events with buttons, for students who cannot drag."""
    button(card, "Try another answer").click()
    card.get_by_role("option").first.click()
    button(card, "Move down").click()
    assert order(card)[:2] == ["forward", "split"]
    button(card, "Move up").click()
    assert order(card)[:2] == ["split", "forward"]


def a_text_is_run_and_ticked_off(page: Page, card: Locator) -> None:
    card.get_by_role("textbox", name="Your answer:").click()
    page.keyboard.insert_text("Shares of 3, 3, 2 and 2.")
    button(card, "Commit to this answer").click()
    button(card, "Run it").click()
    expect(feedback(card)).to_contain_text("A good answer:", timeout=RUN)
    card.get_by_role("checkbox").last.click()
    expect(card.get_by_role("checkbox").last).to_be_checked()


def what_was_decided_is_there_when_the_page_is_loaded_and_the_card_made_anew(notebook: Any, card: Locator) -> None:
    card.get_by_role("textbox", name="Your answer:").fill("5.6 MB")
    button(card, "Commit to this answer").click()
    expect(button(card, "Run it")).to_be_visible()
    notebook.save()
    notebook.page.reload(timeout=PATIENCE)
    for again in (notebook.wait_until_idle, notebook.run_all):
        again()
        expect(card.get_by_role("textbox", name="Your answer:")).to_have_value("5.6 MB", timeout=RUN)
        expect(button(card, "Run it")).to_be_visible()
    expect(notebook.output(CHOICE).get_by_role("status")).to_contain_text("It was right.", timeout=RUN)


def with_the_keyboard_alone(notebook: Any) -> None:
    a_choice_is_made_with_keys(notebook.page, notebook.output(CHOICE))
    what_was_chosen_last_counts_though_the_kernel_is_busy(notebook, notebook.output(CHOICE))
    a_plan_is_taken_whole_though_the_kernel_is_busy(notebook, notebook.output(PLAN))
    a_key_that_comes_too_early_decides_and_runs_but_takes_nothing_away(notebook.page, notebook.output(CHOICE))
    what_a_button_stood_for_says_whether_a_key_that_comes_too_early_counts(notebook.output(BUTTON))
    a_number_is_typed(notebook.page, notebook.output(NUMBER))
    an_order_is_made_with_keys(notebook.page, notebook.output(ORDER))
    a_text_is_written_and_compared(notebook.page, notebook.output(TEXT))
    assert notebook.page.locator(".jp-CodeCell").count() == len(CARDS) + 2


def a_choice_is_made_with_keys(page: Page, card: Locator) -> None:
    card.get_by_role("radio").first.focus()
    press(page, "ArrowDown", "ArrowDown")
    expect(card.get_by_role("radio").nth(2)).to_be_checked()
    press(page, "Tab")
    expect(button(card, "Commit to this answer")).to_be_focused()
    press(page, "d", "d", "Enter")  # these keys neither delete the cell nor leave the card
    ready(button(card, "Run it"))
    press(page, "Space")
    expect(feedback(card)).to_contain_text("Not this one. You answered: c", timeout=RUN)
    expect(feedback(card)).to_be_in_viewport(ratio=0.99)
    expect(button(card, "Try another answer")).to_be_focused()


def what_was_chosen_last_counts_though_the_kernel_is_busy(notebook: Any, card: Locator) -> None:
    """Check that the last choice counts, though a browser may send it only after the click on the button."""
    page = notebook.page
    button(card, "Try another answer").click()
    expect(card.get_by_role("radio").first).to_be_enabled()
    keep_busy(page)
    card.get_by_role("radio").first.focus()
    press(page, "ArrowDown", "ArrowDown", "ArrowDown", "Tab", "Enter")
    expect(card.get_by_role("status")).to_contain_text("You have decided: d", timeout=RUN)
    expect(card.get_by_role("radio").nth(3)).to_be_checked()
    button(card, "Run it").click()
    expect(feedback(card)).to_contain_text("You answered: d", timeout=RUN)


def keep_busy(page: Page) -> None:
    page.locator(".jp-Notebook .jp-Cell .jp-InputArea-prompt").nth(BUSY).click()
    press(page, "Control+Enter")


def a_plan_is_taken_whole_though_the_kernel_is_busy(notebook: Any, card: Locator) -> None:
    keep_busy(notebook.page)
    card.get_by_label("replicas (dp)").focus()
    press(notebook.page, "1", "Tab", "2", "Tab", "4")
    button(card, "Commit to this answer").press("Enter")
    expect(card.get_by_role("status").last).to_contain_text("You have decided: data 1 x tensor 2 x pipeline 4")


def a_key_that_comes_too_early_decides_and_runs_but_takes_nothing_away(page: Page, card: Locator) -> None:
    """Press twice before the kernel has handled the first press, and again as soon as it has run."""
    button(card, "Try another answer").click()
    card.get_by_role("radio").nth(1).click()
    button(card, "Commit to this answer").focus()
    ready(button(card, "Commit to this answer"))
    button(card, "Commit to this answer").evaluate(AT_ONCE)
    press(page, "Enter", "Enter")
    expect(feedback(card)).to_contain_text("Right. You answered: b", timeout=RUN)
    ready(button(card, "Try another answer"))


def what_a_button_stood_for_says_whether_a_key_that_comes_too_early_counts(output: Locator) -> None:
    """Check that the page knows the button's next step before it can be pressed."""
    pressed = output.get_by_role("button")
    pressed.press("Enter")
    expect(pressed).to_have_text("pressed 1 times")
    pressed.press("Enter")
    expect(pressed).to_have_text("pressed 2 times", timeout=RUN)


def a_number_is_typed(page: Page, card: Locator) -> None:
    box = card.get_by_role("textbox", name="Your answer:")
    box.focus()
    page.keyboard.type("5.6")
    press(page, "Tab", "Enter")
    expect(card.get_by_role("alert")).to_contain_text("has no unit; write for instance")
    box.focus()
    press(page, "End")
    page.keyboard.type(" MB")
    press(page, "Tab", "Enter")
    ready(button(card, "Run it"))
    press(page, "Enter")
    expect(feedback(card)).to_contain_text("what all 8 ranks send together", timeout=RUN)


def an_order_is_made_with_keys(page: Page, card: Locator) -> None:
    card.get_by_role("option").first.focus()
    for place, name in enumerate(RIGHT):
        now = order(card).index(name)
        press(page, "Home", *["ArrowDown"] * now, *["Alt+ArrowUp"] * (now - place))
    press(page, "d", "d")
    assert order(card) == RIGHT
    expect(card.locator("[aria-live=assertive]")).to_contain_text("of 6")
    press(page, "Tab", "Tab", "Tab", "Enter")
    ready(button(card, "Run it"))
    press(page, "Enter")
    expect(feedback(card)).to_contain_text("Right.", timeout=RUN)


def a_text_is_written_and_compared(page: Page, card: Locator) -> None:
    card.get_by_role("textbox", name="Your answer:").focus()
    page.keyboard.type("Shares of 3, 3, 2 and 2, weighted.")
    press(page, "Tab", "Enter")
    ready(button(card, "Run it"))
    press(page, "Enter")
    expect(feedback(card)).to_contain_text("A good answer:", timeout=RUN)
    box = card.get_by_role("checkbox").first
    box.focus()
    press(page, "Space")
    expect(box).to_be_checked()
    words = box.locator("xpath=following-sibling::span").inner_text()
    assert card.get_by_text(words).count() == 1
    saved_with_keys(page)


def saved_with_keys(page: Page) -> None:
    clean = page.locator(".lm-DockPanel-tabBar .lm-mod-current:not(.jp-mod-dirty)")
    expect(clean).to_have_count(0)
    press(page, "Control+s")
    expect(clean).to_have_count(1)
