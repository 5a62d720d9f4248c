"""The memo, from the plan to the page that is handed in: with the mouse, with the keyboard, after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from course_lib.planner import Estimate, Plan, estimate
from lessons.S05_memo.memo import brief, one_node
from tests.browser.hands import violations
from tests.browser.test_cards import RUN, button, feedback, press, ready
from tests.browser.test_scenarios import focused, run, tab_to

CARDS = ["S5_plan", "S5_memory", "S5_need", "S5_bottleneck"]
PLAN, MEMORY, NEED, BOTTLENECK, EXPORT = range(5)
CHOICES = {"dp": "4", "tp": "2", "pp": "4", "micro_batch": "2", "zero": "1", "sequence_parallel": "True"}
KEYS = {"dp": "4", "tp": "2", "pp": "4", "micro-batch": "2", "schedule": "", "ZeRO": "1", "recompute": "", "cut": "T"}
TEXT = "Without ZeRO it would not fit. Stages and tensor ranks cut the rest of the state."


@pytest.fixture(scope="module")
def chosen() -> Estimate:
    """The plan that both tests put together."""
    plan = Plan(dp=4, tp=2, pp=4, micro_batch=2, zero=1, sequence_parallel=True)
    return estimate(brief().model, brief().cluster, plan, brief().batch)


@pytest.fixture
def memo(lab: Any, request: pytest.FixtureRequest) -> Any:
    """A separate notebook for each test: JupyterLab asks what to do with an open notebook that has changed."""
    cells = [f"from lessons import Card\nCard({name!r})" for name in CARDS]
    export = "from lessons.S05_memo import memo\n[file.name for file in memo.export('S05_memo')]"
    path = f"notebooks/{request.node.name}.ipynb"
    lab.write(path, *cells, export)
    return lab.open(path)


def test_the_memo_from_start_to_export_with_the_mouse(lab: Any, memo: Any, chosen: Estimate) -> None:
    memo.run_cells("Card")
    a_plan_is_put_together_with_the_mouse(memo.output(PLAN), chosen)
    what_is_typed_is_there_after_a_restart(lab, memo)
    box = memo.output(MEMORY).get_by_role("textbox", name="Your answer:")
    box.fill(TEXT)
    it_is_run_with_the_mouse(memo.output(MEMORY))
    a_section_is_compared(memo.output(MEMORY))
    memo.output(NEED).get_by_role("textbox").fill(f"{chosen.memory.total / 2**30:.1f} GB")
    it_is_run_with_the_mouse(memo.output(NEED))
    expect(feedback(memo.output(NEED))).to_contain_text("powers of 1024", timeout=RUN)
    memo.output(BOTTLENECK).get_by_role("radio").nth(2).click()
    it_is_run_with_the_mouse(memo.output(BOTTLENECK))
    expect(feedback(memo.output(BOTTLENECK))).to_contain_text("Right. You answered: c", timeout=RUN)
    assert violations(memo.page) == []
    memo.run_cells("memo.export")
    expect(memo.output(EXPORT)).to_contain_text("S05_memo.html", timeout=RUN)
    the_page_shows_all_of_it_and_asks_for_nothing(memo.page, lab.server.folder / "notebooks/S05_memo/S05_memo.html")


def test_the_memo_from_start_to_export_with_keys_alone(lab: Any, memo: Any, chosen: Estimate) -> None:
    page: Page = memo.page
    plan = run(memo, PLAN)
    tab_to(page, plan.get_by_label("replicas (dp)"))
    for key in KEYS.values():
        press(page, *[key] * bool(key), "Tab")
    press(page, "Tab")  # past the precision
    it_is_run_with_keys(page, plan)
    expect(feedback(plan)).to_contain_text("Right.", timeout=RUN)
    section = run(memo, MEMORY)
    tab_to(page, section.get_by_role("textbox", name="Your answer:"))
    page.keyboard.type(TEXT)
    press(page, "Tab")
    it_is_run_with_keys(page, section)
    a_section_is_compared(section)
    need = run(memo, NEED)
    need.get_by_role("textbox").focus()  # its border says that it has the focus, not an outline
    page.keyboard.type(f"{chosen.memory.total / 2**30:.1f} GiB")
    press(page, "Tab")
    it_is_run_with_keys(page, need)
    expect(feedback(need)).to_contain_text("Right. You answered", timeout=RUN)
    bottleneck = run(memo, BOTTLENECK)
    tab_to(page, bottleneck.get_by_role("radio").first)
    press(page, "ArrowDown", "ArrowDown", "Tab")
    it_is_run_with_keys(page, bottleneck)
    expect(feedback(bottleneck)).to_contain_text("Right. You answered: c", timeout=RUN)
    expect(run(memo, EXPORT)).to_contain_text("S05_memo.html", timeout=RUN)
    the_page_shows_all_of_it_and_asks_for_nothing(page, lab.server.folder / "notebooks/S05_memo/S05_memo.html")


def a_plan_is_put_together_with_the_mouse(card: Locator, chosen: Estimate) -> None:
    for name, value in CHOICES.items():
        card.locator(f"select[name={name}]").select_option(value)
    expect(card.locator(".course-fields [role=status]")).to_contain_text("32 devices, 32 micro-batches", timeout=RUN)
    it_is_run_with_the_mouse(card)
    expect(feedback(card)).to_contain_text("Right.", timeout=RUN)
    faster = one_node(brief()).step_time.total / chosen.step_time.total
    expect(feedback(card)).to_contain_text(f"{faster:.2f} times as fast as the best plan on one node")


def it_is_run_with_the_mouse(card: Locator) -> None:
    button(card, "Commit to this answer").click()
    button(card, "Run it").click()


def it_is_run_with_keys(page: Page, card: Locator) -> None:
    """Run a card with keys, from the commit button, which has the focus."""
    focused(button(card, "Commit to this answer"))
    press(page, "Enter")
    ready(button(card, "Run it"))
    press(page, "Enter")


def what_is_typed_is_there_after_a_restart(lab: Any, notebook: Any) -> None:
    """Check that typed text is kept after a second, though the box was never left."""
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


def a_section_is_compared(card: Locator) -> None:
    expect(feedback(card)).to_contain_text("Only you can judge the text.", timeout=RUN)
    expect(feedback(card)).to_contain_text("3 of 3")
    expect(card.get_by_role("checkbox")).to_have_count(5)


def the_page_shows_all_of_it_and_asks_for_nothing(page: Page, file: Path) -> None:
    asked: list[str] = []
    printed = page.context.new_page()
    printed.on("request", lambda request: asked.append(request.url))
    printed.goto(file.as_uri())
    assert printed.get_by_role("img").count() == 2
    expect(printed.get_by_role("heading", name="Out of memory")).to_be_visible()
    assert printed.get_by_text(TEXT).count() == 1
    assert printed.get_by_text("3 of 3").count() == 0
    assert asked == [file.as_uri()]
    printed.close()
