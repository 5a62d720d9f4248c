"""The memo, from the plan to the page that is handed in: with the mouse, with the keyboard, after a restart."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.browser.hands import violations
from tests.browser.test_cards import RUN, button, feedback, press, ready

CARDS = ["S5_plan", "S5_memory", "S5_bottleneck"]
PLAN, MEMORY, BOTTLENECK, EXPORT = range(4)
CHOICES = {"dp": "4", "tp": "2", "pp": "4", "micro_batch": "2", "zero": "1", "sequence_parallel": "True"}
TEXT = "Without ZeRO it would not fit. The fullest device needs 29.7 GB, and gradients take 3.2 GiB."


def test_the_memo_from_start_to_export(lab: Any, tmp_path: Path) -> None:
    shutil.rmtree(lab.server.answers, ignore_errors=True)
    cells = [f"from course_lib.widgets.cards import Card\nCard({name!r})" for name in CARDS]
    export = "from course_lib.scenarios import memo\n[file.name for file in memo.export('S05_memo')]"
    lab.write("notebooks/memo.ipynb", *cells, export)
    notebook = lab.open("notebooks/memo.ipynb")
    notebook.run_cells("Card")
    a_plan_is_put_together_with_the_mouse(notebook.output(PLAN))
    what_is_typed_is_there_after_a_restart(lab, notebook)
    a_section_is_compared_with_keys_alone(notebook.page, notebook.output(MEMORY))
    the_bottleneck_is_run_with_keys_alone(notebook.page, notebook.output(BOTTLENECK))
    assert violations(notebook.page) == []
    notebook.run_cells("memo.export")
    expect(notebook.output(EXPORT)).to_contain_text("S05_memo.html", timeout=RUN)
    the_page_shows_all_of_it_and_asks_for_nothing(notebook.page, lab.server.folder / "notebooks/S05_memo/S05_memo.html")


def a_plan_is_put_together_with_the_mouse(card: Locator) -> None:
    for name, value in CHOICES.items():
        card.locator(f"select[name={name}]").select_option(value)
    expect(card.locator(".course-fields [role=status]")).to_contain_text("32 devices, 32 micro-batches", timeout=RUN)
    button(card, "Commit to this answer").click()
    button(card, "Run it").click()
    expect(feedback(card)).to_contain_text("Right.", timeout=RUN)
    expect(feedback(card)).to_contain_text("3.59 times as fast as the best plan on one node")


def what_is_typed_is_there_after_a_restart(lab: Any, notebook: Any) -> None:
    """A second after it was typed, though the box was never left."""
    box = notebook.output(MEMORY).get_by_role("textbox", name="Your answer:")
    box.click()
    notebook.page.keyboard.type(TEXT[:30])
    answers = lab.server.answers / "answers.jsonl"
    for _ in range(RUN // 100):
        if TEXT[:30] not in answers.read_text(encoding="utf-8"):
            notebook.page.wait_for_timeout(100)
    notebook.restart()
    notebook.wait_until_idle()
    notebook.run_cells("Card")
    expect(box).to_have_value(TEXT[:30], timeout=RUN)


def a_section_is_compared_with_keys_alone(page: Page, card: Locator) -> None:
    card.get_by_role("textbox", name="Your answer:").focus()
    press(page, "Control+End")
    page.keyboard.type(TEXT[30:])
    press(page, "Tab", "Enter")
    ready(button(card, "Run it"))
    press(page, "Enter")
    expect(feedback(card)).to_contain_text("29.7 GB: For all that the fullest device holds", timeout=RUN)
    expect(feedback(card)).to_contain_text("3.2 GiB (the gradients on the fullest device)")
    expect(feedback(card)).to_contain_text("3 of 3")
    assert card.get_by_role("checkbox").count() == 5


def the_bottleneck_is_run_with_keys_alone(page: Page, card: Locator) -> None:
    card.get_by_role("radio").first.focus()
    press(page, "ArrowDown", "ArrowDown", "Tab", "Enter")
    ready(button(card, "Run it"))
    press(page, "Enter")
    expect(feedback(card)).to_contain_text("Right. You answered: c", timeout=RUN)


def the_page_shows_all_of_it_and_asks_for_nothing(page: Page, file: Path) -> None:
    asked: list[str] = []
    printed = page.context.new_page()
    printed.on("request", lambda request: asked.append(request.url))
    printed.goto(file.as_uri())
    assert printed.get_by_role("img").count() == 3
    expect(printed.get_by_role("heading", name="Out of memory")).to_be_visible()
    assert printed.get_by_text(TEXT).count() == 1
    assert asked == [file.as_uri()]
    printed.close()
