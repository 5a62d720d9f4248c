"""A case that asks for a plan, in a real JupyterLab: by keyboard alone, and with the mouse."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect

from tests.browser.hands import MOVE, OURS, cell, violations


def test_a_plan_is_put_together_with_keys_alone_and_defended_with_the_mouse(lab: Any) -> None:
    notebook = lab.open("notebooks/scenarios/S01_single_node.ipynb")
    notebook.run_all()
    page = notebook.page
    card = cell(page, 'Card("S1_better"')
    card.get_by_label("replicas (dp)").focus()
    page.keyboard.press("8")
    for _ in range(2):  # past tensor ranks and stages
        page.keyboard.press("Tab")
    for key in ("4", "", "1", "s", ""):  # micro-batch, schedule, ZeRO stage, recomputation, sequence parallelism
        page.keyboard.press("Tab")
        if key:
            page.keyboard.press(key)
    expect(card.get_by_text("8 devices, 8 micro-batches for each replica.")).to_be_visible(timeout=MOVE)
    expect(card.get_by_label("stages on each rank")).to_be_disabled()
    for _ in range(2):  # past the precision, to the button
        page.keyboard.press("Tab")
    for words in ("You have decided", "Right."):
        page.keyboard.press("Enter")
        expect(card.get_by_text(words)).to_be_visible(timeout=MOVE)
    expect(card.get_by_text("bubble: at most 2.0%; it has 0.0%: reached")).to_be_visible()

    defence = cell(page, 'Card("S1_defend"')
    defence.get_by_role("textbox").last.fill("Because it fits.")
    for name in ("Commit to this answer", "Run it"):
        defence.get_by_role("button", name=name).click()
    expect(defence.get_by_text("your plan: data 8 x tensor 1 x pipeline 1")).to_be_visible(timeout=MOVE)
    assert violations(page) == []

    page.set_viewport_size({"width": 700, "height": 900})
    for output in (cell(page, "case.evidence()"), card, defence):  # pictures scroll, words do not
        assert output.locator(OURS).last.evaluate("output => output.scrollWidth - output.clientWidth") <= 2
