"""A timeline that is played, with the mouse and with the keyboard alone."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Locator, Page, expect

from course_lib.timeline import Timeline
from tests.browser.hands import MOVE, drag, slider, smallest_label, violations

# In its first forward pass rank 0 is blocked, and the next span is shorter than a pixel.
RUN = """
from course_lib import Span, Timeline
from course_lib.planner import simulate
from course_lib.schedules import SCHEDULES
held_up = [Span(0, "wait", "recv", 0.002, 0.004, peer=1), Span(0, "other", "", 0.004, 0.0040001)]
timeline = Timeline(simulate(SCHEDULES["gpipe"](3, 4), 0.01, 0.02, transfer=0.005).spans + held_up, 3, "modelled")
"""
# It plays ten times as slowly as for students, so that a busy machine is fast enough to stop it on its way.
CELL = f"""{RUN}
from course_lib.classroom.widgets import play
from course_lib.classroom.widgets.player import Player
quick, Player._esm = Player._esm, Player._esm.replace("const RUN = 8000;", "const RUN = 80000;")
assert Player._esm != quick
play(timeline)"""

MESH = """
from course_lib import Span, Timeline
from lessons.L08_combining_mechanisms.figure import mesh_map
from lessons.L08_combining_mechanisms.runs import MeshStep
spans = [Span(rank, "transfer", "all_reduce", 0.01, 0.02, bytes=8000) for rank in (0, 1)]
timeline = Timeline([Span(0, "forward", "", 0.0, 0.04), *spans], 2, "emulated")
transfers = {"tp": {(0, 1): spans[:1], (1, 0): spans[1:]}}
play(mesh_map((1, 1, 2), MeshStep(timeline, {"tp": {(0, 1): 8000, (1, 0): 8000}}, 0.0, transfers)))"""


def shown() -> Timeline:
    names: dict[str, Any] = {}
    exec(RUN, names)
    return names["timeline"]


def events(timeline: Timeline) -> list[float]:
    """The times of all events, in milliseconds, rounded to microseconds."""
    return sorted({round(when * 1e3, 3) for span in timeline.spans for when in (span.start, span.end)})


def at(where: Page | Locator) -> float:
    """The time on the slider, in milliseconds."""
    return float((slider(where, "Time").get_attribute("aria-valuetext") or "").removesuffix(" ms"))


def plays_beyond(where: Page | Locator, when: float) -> None:
    """Wait until the slider says a later time."""
    now = "parseFloat(document.querySelector('.course-player [type=range]').getAttribute('aria-valuetext'))"
    slider(where, "Time").page.wait_for_function(f"() => {now} > {when}")


def test_a_timeline_is_played_with_the_mouse_and_the_keyboard(lab: Any) -> None:
    lab.write("notebooks/player.ipynb", CELL, "1 + 1", MESH)
    notebook = lab.open("notebooks/player.ipynb")
    notebook.run_all()
    page: Page = notebook.page
    player = page.get_by_role("group", name="Player of a timeline")
    expect(player).to_be_visible(timeout=MOVE)
    assert smallest_label(page) >= 11
    arrows_go_from_event_to_event(page, player)
    space_starts_and_stops(page, player)
    it_stops_at_the_end_and_begins_anew(page, player)
    without_motion_it_jumps(page, player)
    the_slider_scrubs(player)
    a_micro_batch_lights_up(page, player)
    a_rank_lights_up(page, page.get_by_role("group", name="Player of a picture"))
    assert violations(page) == []
    a_presenter_plays_the_selected_cell(page, player)


def arrows_go_from_event_to_event(page: Page, player: Locator) -> None:
    times = events(shown())
    slider(player, "Time").focus()
    for when in times[1:]:
        page.keyboard.press("ArrowRight")
        assert at(player) == when
    page.keyboard.press("ArrowLeft")
    assert at(player) == times[-2]
    page.keyboard.press("Home")
    assert at(player) == 0
    live = player.locator("[aria-live=polite]")
    expect(live).to_contain_text("rank 0: forward, F, micro-batch 0, stage 0 (holds 1)")
    expect(live).to_contain_text("rank 2: wait, recv, with rank 1 (holds 0)")
    page.keyboard.press("ArrowRight")
    expect(live).to_contain_text("rank 0: wait, recv, with rank 1")
    for _ in range(times.index(10) - 1):
        page.keyboard.press("ArrowRight")
    expect(live).to_contain_text("rank 1: transfer, recv, with rank 0")
    expect(player.locator(".course-message")).to_have_count(1)


def space_starts_and_stops(page: Page, player: Locator) -> None:
    player.get_by_role("button", name="Play").focus()
    before = at(player)
    page.keyboard.press(" ")
    button = player.get_by_role("button", name="Pause")
    expect(button).to_be_focused()
    expect(player.locator("[aria-live=polite]")).to_have_count(0)
    plays_beyond(player, before)
    page.keyboard.press("d")  # JupyterLab would delete the cell
    page.keyboard.press("d")
    page.keyboard.press(" ")
    expect(player.get_by_role("button", name="Play")).to_be_focused()
    stopped = at(player)
    page.wait_for_timeout(100)
    assert at(player) == stopped
    assert page.locator(".jp-CodeCell").count() == 3


def it_stops_at_the_end_and_begins_anew(page: Page, player: Locator) -> None:
    player.get_by_role("button", name="Play").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press(" ")
    expect(player.get_by_role("button", name="Pause")).to_be_visible()
    expect(player.get_by_role("button", name="Play")).to_be_visible(timeout=MOVE)
    assert at(player) == events(shown())[-1]
    slider(player, "Time").focus()
    page.keyboard.press(" ")
    expect(player.get_by_role("button", name="Pause")).to_be_visible()
    plays_beyond(player, 0)
    page.keyboard.press(" ")
    expect(slider(player, "Time")).to_be_focused()
    assert 0 < at(player) < events(shown())[-1] / 2


def without_motion_it_jumps(page: Page, player: Locator) -> None:
    page.emulate_media(reduced_motion="reduce")
    page.keyboard.press("Home")
    page.keyboard.press(" ")
    times = [at(player)]
    while times[-1] == times[0] and len(times) < MOVE // 100:
        page.wait_for_timeout(100)
        times.append(at(player))
    page.keyboard.press(" ")
    page.emulate_media(reduced_motion="no-preference")
    assert times[-1] > times[0]
    assert set(times) <= set(events(shown()))


def the_slider_scrubs(player: Locator) -> None:
    drag(player, "Time", 0.5)
    middle = events(shown())[-1] / 2
    assert abs(at(player) - middle) < middle / 10
    timeline, now = shown(), at(player) / 1e3
    for rank in range(3):
        ours = [span for span in timeline.of(rank) if span.start <= now < span.end]
        doing = ours[-1].kind if ours else "nothing"
        expect(player.locator(".course-doing")).to_contain_text(f"rank {rank}: {doing}")


def a_micro_batch_lights_up(page: Page, player: Locator) -> None:
    of_it = sum(span.micro_batch == 2 for span in shown().spans)
    holes = re.compile(rf"^M[^M]*(M[^M]*){{{of_it}}}$")  # in the veil
    player.get_by_text(re.compile("^2$")).first.hover(force=True)
    expect(player.locator(".course-veil")).to_have_attribute("d", holes)
    arrows = player.locator(".course-arrow")
    expect(arrows).to_have_count(2 * 2)  # down two ranks, and up again
    page.mouse.move(0, 0)
    expect(player.locator(".course-veil")).to_have_count(0)
    expect(arrows).to_have_count(0)
    player.get_by_label("Light up").focus()
    for _ in range(1 + 3):  # past nothing, to micro-batch 3; letters would have to follow each other within a second
        page.keyboard.press("ArrowDown")
    expect(player.locator(".course-veil")).to_have_attribute("d", holes)
    expect(player.locator(".course-veil")).to_have_count(1)
    expect(arrows).to_have_count(2 * 2)
    page.keyboard.press("End")
    expect(player.get_by_label("Light up")).to_have_value("messages")
    expect(arrows).to_have_count(2 * 2 * 4)  # also of those that nobody had to wait for
    player.get_by_label("Light up").select_option("nothing")
    player.locator("rect").filter(has_text="transfer, recv").first.hover(force=True)
    expect(arrows).to_have_count(1)
    page.mouse.move(0, 0)
    expect(arrows).to_have_count(0)


def a_rank_lights_up(page: Page, mesh: Locator) -> None:
    """Choose ranks with the mouse and with keys, and see when a line is in use."""
    size, lines, pulses = (
        mesh.locator("[data-light] text"),
        mesh.locator(".course-fades"),
        mesh.locator(".course-pulse.course-on"),
    )
    expect(size.locator("visible=true")).to_have_count(0)
    mesh.locator("[data-name='rank 1']").click()
    expect(size.locator("visible=true")).to_have_text("16 kB")
    expect(lines).to_have_css("opacity", "0.15")
    mesh.get_by_label("Light up").press("Home")
    expect(size.locator("visible=true")).to_have_count(0)
    expect(lines).to_have_css("opacity", "1")
    slider(mesh, "Time").press("ArrowRight")
    expect(mesh.locator(".course-doing")).to_contain_text("At 10 ms: tensor ranks on the line.")
    expect(pulses).to_have_count(2)
    slider(mesh, "Time").press("End")
    expect(pulses).to_have_count(0)


def a_presenter_plays_the_selected_cell(page: Page, player: Locator) -> None:
    """Play the selected cell with a presenter's key, without touching the player."""
    prompts = page.locator(".jp-CodeCell .jp-InputArea-prompt")
    for cell, name in ((1, "Play"), (0, "Pause"), (0, "Play")):
        prompts.nth(cell).click()
        page.keyboard.press(" ")  # in the second cell there is nothing to play
        expect(player.get_by_role("button", name=name)).to_be_visible()
