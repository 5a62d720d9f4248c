"""The pages for the web in a real browser: alive without a kernel, from a server and from a disk, and for everybody.

Two lessons are built. Any request that leads elsewhere and any error in the console fails a test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import BrowserContext, Locator, Page, expect

from course_lib.classroom import questions
from lessons.site.gather import gather

ROOT = Path(__file__).parents[2]
LESSON = "04_layerwise_model_parallelism.html"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "lessons.site", made, "index", "00", "04"], cwd=ROOT, check=True)
    return made


@pytest.fixture(scope="session")
def served(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Keep the log of the tests short."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=os.fspath(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(params=["from a disk", "from a server"])
def address(request: pytest.FixtureRequest, folder: Path) -> str:
    return folder.as_uri() if request.param == "from a disk" else str(request.getfixturevalue("served"))


@pytest.fixture
def page(browser: BrowserContext, folder: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page without answers, in which nothing may go wrong or lead elsewhere."""
    page, wrong = browser.new_page(), list[str]()
    inside = (folder.as_uri(), "http://127.0.0.1:", "data:", "blob:")
    page.on("request", lambda one: None if one.url.startswith(inside) else wrong.append(one.url))
    page.on("requestfailed", lambda one: wrong.append(f"failed: {one.url}"))
    page.on("console", lambda one: wrong.append(one.text) if one.type in ("error", "warning") else None)
    page.on("pageerror", lambda one: wrong.append(str(one)))
    yield page
    page.evaluate("localStorage.clear()")
    page.close()
    assert wrong == []


def come(page: Page, name: str) -> Locator:
    """The live widget below this one of the page's elements, once it is alive."""
    found = page.locator(f".live{name}").first
    found.scroll_into_view_if_needed()
    expect(found.locator(".course-live")).to_be_visible()
    return found


def test_an_explorer_moves_plays_and_pins(page: Page, address: str) -> None:
    page.goto(f"{address}/{LESSON}")
    explorer = come(page, "[id^=w]")
    says = explorer.locator("p[role=status]")
    controls = explorer.locator("input[type=range], input[type=checkbox]")
    assert controls.count() > 1
    first, seen = says.inner_text(), {says.inner_text()}
    for control in controls.all():
        control.press("Space" if control.get_attribute("type") == "checkbox" else "ArrowLeft")
        if control.input_value() == "0":
            control.press("ArrowRight")
        expect(says).not_to_have_text(list(seen)[-1])
        seen.add(says.inner_text())
    assert len(seen) == controls.count() + 1, first
    explorer.get_by_role("button", name="Pin").click()
    expect(says).to_contain_text("exactly as long as the pinned one")
    controls.first.press("ArrowRight")
    expect(says).to_contain_text("than the pinned one")
    bars = explorer.locator("svg .pinned")
    widths = bars.evaluate_all("all => all.map(one => one.getBBox().x + one.getBBox().width)")
    assert 100 < max(widths) <= 840  # on the axis of the other
    explorer.get_by_role("button", name="Unpin").click()
    expect(bars).to_have_count(0)
    explorer.get_by_role("button", name="Play").click()
    when = explorer.locator(".course-doing b")
    begun = when.inner_text()
    expect(when).not_to_have_text(begun)
    explorer.get_by_role("button", name="Pause").click()


def test_a_card_is_answered_and_the_map_knows(page: Page, address: str) -> None:
    page.goto(f"{address}/{LESSON}")
    card = come(page, "#Q6")
    letters = {one.right: number for number, (_, one) in enumerate(questions.load("Q6").form.reveal())}
    for verdict, words in ((False, "Not this one."), (True, "Right.")):
        card.get_by_role("radio").nth(letters[verdict]).check()
        for step in ("Commit to this answer", "Run it"):
            card.get_by_role("button", name=step).click()
        expect(card).to_contain_text(words)
        card.get_by_role("button", name="Try another answer").click()
    page.reload()
    expect(come(page, "#Q6").get_by_role("status")).to_have_text("You have answered this before.")
    page.goto(f"{address}/index.html")
    idea = page.locator("[data-asks~=Q6]")
    expect(idea).to_have_attribute("data-state", "begun")
    expect(idea).to_contain_text("1 of 3 answered")
    idea.get_by_role("link", name="Q6").press("Enter")
    expect(page.locator("#Q6")).to_be_in_viewport()


def test_a_text_is_compared_point_by_point(page: Page, folder: Path) -> None:
    page.goto(f"{folder.as_uri()}/{LESSON}")
    card = come(page, "#why_partition")
    card.get_by_role("button").click()
    expect(card).to_contain_text("Write a sentence or two first")
    card.get_by_role("textbox").fill("Because it does not fit.")
    card.get_by_role("button", name="Commit").click()
    card.get_by_role("button", name="Run it").click()
    expect(card).to_contain_text("A good answer")
    card.get_by_role("checkbox").first.check()
    assert json.loads(page.evaluate("localStorage['course-answers']"))["why_partition"]["done"]


def test_the_search_finds_a_section(page: Page, address: str) -> None:
    page.goto(f"{address}/index.html")
    page.get_by_role("searchbox").fill("deadlock watchdog")
    page.locator("#hits").get_by_role("link", name="Two polite ranks").click()
    expect(page.get_by_role("heading", name="Two polite ranks")).to_be_in_viewport()


@pytest.mark.parametrize("name", ["bytes_per_weight", "same_plan"])
def test_numbers_are_judged_as_the_course_does(page: Page, folder: Path, name: str) -> None:
    form: Any = questions.load(name).form
    _, packs = gather(questions.load(name), "key")
    measured = packs["key"]["measured"]
    unit = next(iter(form.quantity.units))
    factors = (1, 1.005, 1.02, 8, 1000, 1 / 1000, 1.024)
    answers = [f"{measured * factor:.6g} {unit}" for factor in factors] + ["", "many", "12 parsecs", "1,200"]

    def expected(answer: str) -> list[Any]:
        try:
            outcome = form.run(form.read(answer))
        except ValueError:
            return [None]
        return [outcome.right]

    page.goto(f"{folder.as_uri()}/index.html")
    judged = page.evaluate(
        """([answers, pack]) => answers.map(one => {
            const { refuses, of } = course.outcomes.number;
            return refuses(one, pack) ? [null] : [of(one, pack).right];
        })""",
        [answers, packs["key"]],
    )
    assert judged == [expected(answer) for answer in answers]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_it_on_any_screen(page: Page, served: str, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    for name in ("index.html", LESSON):
        page.goto(f"{served}/{name}")
        for one in page.locator(".live").all():
            one.scroll_into_view_if_needed()
        assert Axe().run(page).response["violations"] == []
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.set_viewport_size({"width": 1280, "height": 800})


def test_first_paint_is_small(folder: Path) -> None:
    own = (folder / "site.css", folder / "site.js")
    for file in folder.glob("*.html"):
        assert sum(one.stat().st_size for one in (file, *own)) < 250_000
