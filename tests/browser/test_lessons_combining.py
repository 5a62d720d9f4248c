"""Lessons 07 to 09 as a student goes through them: fewer bits, all mechanisms at once, and a plan for a cluster."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.browser.hands import MOVE, cell, drag, fits_one_screen, go_through, pictures, press, says, slider


def test_mixed_precision(lab: Any) -> None:
    page = go_through(lab, "07_mixed_precision", losses_are_read_off_together)
    a_move_begins_a_training_whose_curve_grows(cell(page, "MixedPrecisionExplorer()"))


def figure(page: Page, title: str) -> Locator:
    """Wait for the stored figure with this title, which reacts to the mouse without being run."""
    drawn = page.locator(".js-plotly-plot").filter(has_text=title)
    drawn.evaluate("drawn => drawn.scrollIntoView({block: 'center'})")
    expect(drawn.locator(".nsewdrag").first).to_be_visible(timeout=MOVE)
    return drawn


def rest_on_first(figure: Locator, trace: str) -> None:
    """Rest the mouse on the first point of the trace with this name."""
    place: Any = figure.evaluate(
        """(drawn, name) => {
            const {x, y} = drawn._fullData.find(trace => trace.name === name), {xaxis, yaxis} = drawn._fullLayout;
            return {x: xaxis.d2p(x[0]), y: yaxis.d2p(y[0])};
        }""",
        trace,
    )
    area = figure.locator(".nsewdrag").first
    for aside in (1, 0):  # the figure may have moved, as outputs above it grow
        area.hover(position={"x": place["x"] + aside, "y": place["y"]}, force=True)


def losses_are_read_off_together(page: Page) -> None:
    losses = figure(page, "The same training, three times")
    rest_on_first(losses, "float32")
    for name in ("float32", "bfloat16", "float16"):
        expect(losses.locator(".hoverlayer .hovertext, .hoverlayer .legend").filter(has_text=name)).to_be_visible()


# The numbers of points, from now on, of the last curve in the picture of losses.
LENGTHS = """explorer => {
    globalThis.lengths = new Set();
    new MutationObserver(() => {
        const curve = [...explorer.querySelectorAll("svg[aria-label^='Loss over'] path[fill=none]")].at(-1);
        if (curve) lengths.add(curve.getAttribute("d").split("L").length);
    }).observe(explorer, { childList: true, subtree: true });
}"""


def a_move_begins_a_training_whose_curve_grows(explorer: Locator) -> None:
    losses = explorer.locator("svg[aria-label^='Loss over']")
    says(explorer, "float16 with no loss scale")
    height = fits_one_screen(explorer)
    explorer.evaluate(LENGTHS)
    press(explorer, "loss scale", "ArrowRight", times=2)
    says(explorer, "float16 with a loss scale of 2¹⁶")
    says(explorer, "as far as float32")
    says(explorer, "Step 150 of 150")
    assert explorer.evaluate("() => lengths.size") > 2
    drag(explorer, "weights", 0.0)
    says(explorer, "the loss is not a number")
    expect(losses.get_by_text("✗ float16")).to_have_count(1)
    drag(explorer, "format", 0.5)
    says(explorer, "bfloat16 with a loss scale of 2¹⁶: of the finished gradient 0% vanish")
    assert fits_one_screen(explorer) == height


def test_combining_mechanisms(lab: Any) -> None:
    page = go_through(lab, "08_combining_mechanisms")
    ranks_are_arranged_anew(cell(page, "MeshExplorer()"))
    lines_on_the_map_show_what_is_on_its_way(cell(page, "MeshExplorer()"))


def ranks_are_arranged_anew(explorer: Locator) -> None:
    shows_mesh(explorer, "dp 2 x pp 2 x tp 2")
    height = fits_one_screen(explorer)
    press(explorer, "dp x pp x tp", "ArrowLeft")
    shows_mesh(explorer, "dp 2 x pp 4 x tp 1")
    drag(explorer, "precision", 1.0)
    says(explorer, "dp 2 x pp 4 x tp 1, 4 micro-batches, 1f1b, bfloat16, emulated")
    says(explorer, "Every rank sent what was predicted, to the byte.")
    assert fits_one_screen(explorer) == height


def lines_on_the_map_show_what_is_on_its_way(explorer: Locator) -> None:
    """Open and move the player with the mouse; go by steps and by arrows with the keyboard."""
    dots = explorer.locator(".course-pulse.course-on")
    assert dots.count() == 0
    explorer.get_by_role("button", name="Play", exact=True).click()
    time = slider(explorer, "Time")
    expect(time).to_be_visible(timeout=MOVE)
    fits_one_screen(explorer)
    time.press("Home")
    expect(dots).to_have_count(0)
    for _ in range(12):  # until the first forward pass is done
        if not dots.count():
            time.press("ArrowRight")
    expect(dots).to_have_count(2)  # in both replicas the first stage sends to the second
    drag(explorer, "Time", 0.99)
    expect(dots).not_to_have_count(0)
    explorer.get_by_label("Light up").focus()
    for _ in range(1 + 1):  # past nothing, to micro-batch 1; letters would have to follow each other within a second
        explorer.page.keyboard.press("ArrowDown")
    expect(explorer.locator(".course-arrow")).to_have_count(2 * (3 + 3))  # down four stages, and up again


def shows_mesh(explorer: Locator, words: str) -> None:
    """Wait for the map of this mesh."""
    label = re.compile(f"^8 ranks as a grid of {words};")
    expect(pictures(explorer).first).to_have_attribute("aria-label", label, timeout=MOVE)


def test_planning(lab: Any) -> None:
    page = go_through(lab, "09_planning", every_plan_can_be_read)
    explorer = cell(page, "refresh_explorer()")
    says(explorer, "times as fast as before")
    height = fits_one_screen(explorer)
    press(explorer, "nodes", "ArrowRight")
    explorer.get_by_text("A step on 64 B200-180GB").wait_for(timeout=MOVE)
    drag(explorer, "network", 0.0)
    explorer.get_by_text("A step on 64 B200-180GB with Ethernet 25").wait_for(timeout=MOVE)
    assert fits_one_screen(explorer) == height


def every_plan_can_be_read(page: Page) -> None:
    """Name, hide and zoom in on plans with the mouse; read them as a table with the keyboard."""
    plans = figure(page, "Plans for 70 billion parameters")
    name = plans.locator(".legendtext").first.text_content() or ""
    rest_on_first(plans, name)
    expect(plans.locator(".hoverlayer .hovertext")).to_contain_text(re.compile("[GT]iB"))
    plans.locator(".legendtoggle").first.click()
    expect(plans.locator(".legend .traces").first).to_have_css("opacity", "0.5")
    before = range_of(plans)
    plans.locator(".nsewdrag").first.hover(position={"x": 100, "y": 100})
    page.mouse.down()
    plans.locator(".nsewdrag").first.hover(position={"x": 250, "y": 200}, force=True)
    page.mouse.up()
    assert range_of(plans) != before
    table = cell(page, "plan_map(found").locator("details")
    expect(table.locator("table")).to_be_hidden()
    table.locator("summary").press("Enter")
    expect(table.locator("table")).to_be_visible()


def range_of(figure: Locator) -> list[float]:
    return figure.evaluate("drawn => [...drawn._fullLayout.xaxis.range]")
