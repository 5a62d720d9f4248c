"""A case that asks for a plan, in a real JupyterLab: by keyboard alone, and with the mouse."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect

from course_lib.classroom.scenarios.targets import waiting
from lessons.S01_single_node.case import CASE
from tests.browser.hands import MOVE, OURS, cell, violations


def test_a_plan_is_put_together_with_keys_alone_and_defended_with_the_mouse(lab: Any) -> None:
    notebook = lab.open("notebooks/scenarios/S01_single_node.ipynb")
    notebook.run_all()
    page = notebook.page
    card = cell(page, 'Card("S1_better"')
    card.get_by_label("replicas (dp)").focus()
    page.keyboard.press("2")
    for key in ("1", "4", "2", "z", "1", "", ""):  # the lists that follow, up to sequence parallelism
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
    waits = waiting("PCIe 4", CASE.variant().then.estimate("dp=2 pp=4 schedule=zb_h1 zero=1"))
    expect(card.get_by_text(f"waiting for PCIe 4: at most 10.0%; it has {waits:.1%}: reached")).to_be_visible()

    defence = cell(page, 'Card("S1_defend"')
    defence.get_by_role("textbox").last.fill("Because it fits.")
    for name in ("Commit to this answer", "Run it"):
        defence.get_by_role("button", name=name).click()
    expect(defence.get_by_text("your plan: data 2 x tensor 1 x pipeline 4")).to_be_visible(timeout=MOVE)
    assert violations(page) == []

    page.set_viewport_size({"width": 700, "height": 900})
    for output in (cell(page, "case.evidence()"), card, defence):  # pictures scroll, words do not
        assert output.locator(OURS).last.evaluate("output => output.scrollWidth - output.clientWidth") <= 2
