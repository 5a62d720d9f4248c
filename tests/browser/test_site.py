"""The pages for the web in a real browser: alive without a kernel, from a server and from a disk, and for everybody.

The first pages are the course's own, the last is a small one with one of each widget. A request that leads elsewhere,
an error in the console or a violation that axe finds fails a test.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import BrowserContext, Locator, Page, expect

from lessons.site import build, packs, pages
from lessons.site.widgets import Widget

REAL = ("00_start_here.html", "01_one_machine_is_not_enough.html")  # two lessons of the course, as they are
LESSON = "04_layerwise_model_parallelism.html"  # the map leads there
EXPLORER = """
from course_lib import Pace
from course_lib.classroom.runs import pipeline_step
from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import HALF, Explorer, View
from course_lib.figures import gantt
from course_lib.schedules import SCHEDULES

def look(stages, slow):
    run = pipeline_step(SCHEDULES["gpipe"](stages, 2), Pace({"forward": 0.1, "backward": 0.2 + 0.4 * slow}))
    return [View(f"{stages} stages", gantt(run, width=HALF))]

Explorer([Slider("stages", (2, 3), 2), Slider("slow", (0, 1), 0)], look)
"""
ORDER = """
from course_lib.classroom.questions.forms import Ordering
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Question

def execute(order):
    return Outcome(order.index("F0") < order.index("B0"), " ".join(order))

order = Ordering(dict.fromkeys(["B0", "F0", "F1"], "an event"), execute, "", lambda name: int(name[1]))
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    cells = [
        nbformat.v4.new_markdown_cell("# A small lesson\n\nIt has one of each.\n\n## Two polite ranks\n\nEach waits."),
        nbformat.v4.new_code_cell(EXPLORER),
        *(nbformat.v4.new_code_cell(f"Card({name!r})") for name in ("Q6", "why_partition", "same_plan")),
        nbformat.v4.new_code_cell("ordered"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), made / "small.ipynb")
    page = pages.Page(made / "small.ipynb", "lesson", LESSON)
    page.widgets[len(cells) - 1] = Widget(ORDER, "Question('Q8', 0, 'In which order?', order)", "Q8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs, "CACHE", made / "cache")
        packs.CACHE.mkdir()
        home, *lessons = itertools.islice(pages.pages(), 1 + len(REAL))
        assert [one.address for one in lessons] == list(REAL)
        for one in [one for each in (*lessons, page) for one in each.widgets.values()]:
            packs.gather(one)
        build.build(made, [home, *lessons, page])
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


@pytest.fixture
def page(browser: BrowserContext, folder: Path) -> Iterator[Page]:
    """A page in which nothing may go wrong or lead elsewhere."""
    page, wrong = browser.new_page(), list[str]()
    inside = (folder.as_uri(), "http://127.0.0.1:", "data:", "blob:")
    page.on("request", lambda one: None if one.url.startswith(inside) else wrong.append(one.url))
    aborted = "net::ERR_ABORTED"  # as when one leaves while a pack is on its way
    page.on("requestfailed", lambda one: None if one.failure == aborted else wrong.append(f"failed: {one.url}"))
    page.on("console", lambda one: wrong.append(one.text) if one.type in ("error", "warning") else None)
    page.on("pageerror", lambda one: wrong.append(str(one)))
    yield page
    page.close()
    assert wrong == []


def alive(page: Page, name: str) -> Locator:
    found = page.locator(f".live{name}")
    found.scroll_into_view_if_needed()
    expect(found.locator(".course-live")).to_be_visible()
    return found


def answer(card: Locator, words: str) -> None:
    card.get_by_role("button", name="Commit").click()
    expect(card).to_contain_text(words)
    card.get_by_role("button", name="Try another answer").click()


def explore(page: Page) -> None:
    """Move each control, pin, compare, and play."""
    explorer = alive(page, " >> nth=0")
    says = explorer.locator("p[role=status]")
    explorer.get_by_role("button", name="Pin").click()
    expect(says).to_contain_text("2 stages It takes 100% of the time of the pinned one")
    explorer.get_by_role("slider", name="stages").press("ArrowRight")
    expect(says).to_contain_text("3 stages It takes 133% of the time of the pinned one")
    explorer.get_by_role("button", name="Unpin").click()
    explorer.get_by_role("slider", name="slow").press("ArrowRight")
    expect(says).to_contain_text("3 stages It takes 233% of the time of the last one")
    assert explorer.locator("svg .thin").count() > 4
    explorer.get_by_role("button", name="Play").click()
    when = explorer.locator(".course-doing b")
    begun = when.inner_text()
    expect(when).not_to_have_text(begun)


def answer_all(page: Page) -> None:
    choice, text, number, order = (alive(page, f"#{name}") for name in ("Q6", "why_partition", "same_plan", "Q8"))
    choice.get_by_role("button", name="Commit").click()
    expect(choice).to_contain_text("Decide on an answer first")
    for option in choice.get_by_role("radio").all():
        option.check()
        answer(choice, "You answered: ")
    text.get_by_role("textbox").fill("Because it does not fit.")
    answer(text, "A good answer")
    for given, words in (("1,2", "no number"), ("12 parsecs", "no number"), ("7.5", "Not this one. You answered: 7.5")):
        number.get_by_role("textbox").fill(given)
        number.get_by_role("button", name="Commit").click()
        expect(number).to_contain_text(words)
    answer(order, "Not this one. You answered: B0 → F0 → F1")
    order.get_by_role("option").first.press("Alt+ArrowDown")
    answer(order, "Right. You answered: F0 → B0 → F1")


def use_everything(page: Page) -> None:
    """Move every control of a page, play what plays, and answer every choice."""
    for one in page.locator(".live").all():
        one.scroll_into_view_if_needed()
        expect(one.locator(".course-live, .course-player, .js-plotly-plot").first).to_be_visible()
        for slider in one.get_by_role("slider").all():
            was, text = slider.input_value(), one.inner_text()
            slider.press("ArrowLeft" if was == slider.get_attribute("max") else "ArrowRight")
            expect(slider).not_to_have_value(was)
            expect(one).not_to_have_text(text)
        for play in one.get_by_role("button", name="Play").all():
            play.click()
        for option in one.get_by_role("radio").all():
            option.check()
            answer(one, "You answered: ")


def for_everybody(page: Page, address: str) -> None:
    """No flaw that axe finds, in light and dark, and no page wider than a phone."""
    for name in ("index.html", *REAL, LESSON):
        page.goto(f"{address}/{name}")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert Axe().run(page).response["violations"] == []
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.set_viewport_size({"width": 1280, "height": 800})


def test_a_walk_through_the_site(page: Page, served: str) -> None:
    page.goto(f"{served}/{LESSON}")
    explore(page)
    answer_all(page)
    page.reload()
    expect(alive(page, "#Q6").get_by_role("status")).to_have_text("You have answered this before.")
    page.get_by_role("searchbox").fill("polite ranks")
    page.locator("#hits").get_by_role("link", name="A small lesson: Two polite ranks").click()
    expect(page.get_by_role("heading", name="Two polite ranks")).to_be_in_viewport()
    page.get_by_role("link", name="What leads to what").click()
    idea = page.locator("[data-asks~=Q6]")
    expect(idea).to_have_attribute("data-state", "begun")
    expect(idea).to_contain_text("2 of 3 answered")
    idea.get_by_role("link", name="Q6").press("Enter")
    expect(page.locator("#Q6")).to_be_in_viewport()
    for name in REAL:
        page.goto(f"{served}/{name}")
        use_everything(page)
    for_everybody(page, served)


def test_the_same_from_a_disk(page: Page, folder: Path) -> None:
    page.goto(f"{folder.as_uri()}/{LESSON}")
    alive(page, " >> nth=0").get_by_role("slider", name="stages").press("ArrowRight")
    expect(page.locator(".live p[role=status]").first).to_contain_text("3 stages")
    page.get_by_role("searchbox").fill("Each waits")
    expect(page.locator("#hits a", has_text="Two polite ranks").last).to_be_visible()
    page.goto(f"{folder.as_uri()}/{REAL[1]}")
    use_everything(page)


def test_first_paint_is_small(folder: Path) -> None:
    own = (folder / "site.css", folder / "site.js")
    assert all(sum(one.stat().st_size for one in (file, *own)) < 250_000 for file in folder.glob("*.html"))
