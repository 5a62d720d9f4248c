"""A student's hands and eyes on a page: move a control with a key or the mouse, read, look at a picture.

`where` is the page, or a part of it, such as one cell.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

RUN = 600  # seconds that a whole lesson may take on a busy machine
MOVE = 60_000  # milliseconds that a move may take there
STDERR = ".jp-Notebook [data-mime-type='application/vnd.jupyter.stderr']"
OURS = ".jp-OutputArea-output"  # everything that the course adds to a page
BAD = ("serious", "critical")
RULES: dict[Literal["light", "dark"], dict[str, Any]] = {
    "light": {},
    "dark": {"runOnly": ["color-contrast"]},
}  # the theme no longer changes


def cell(page: Page, text: str) -> Locator:
    """The code cell that has this text in it."""
    return page.locator(".jp-CodeCell").filter(has=page.locator(".jp-InputArea").filter(has_text=text))


def press(where: Page | Locator, name: str, key: str, times: int = 1) -> None:
    """Focus the control with this name, and press a key."""
    control = slider(where, name)
    control.focus()
    for _ in range(times):
        control.press(key)


def slider(where: Page | Locator, name: str) -> Locator:
    return where.get_by_role("slider", name=name, exact=True)


def drag(where: Page | Locator, name: str, share: float) -> None:
    """Drag a slider's handle to this share of its length, and release it."""
    control = slider(where, name)
    control.scroll_into_view_if_needed()
    mouse = control.page.mouse
    box = control.bounding_box()
    assert box is not None
    low, high, now = (float(control.evaluate(f"slider => slider.{what}")) for what in ("min || 0", "max", "value"))
    handle, track, middle = box["height"], box["width"] - box["height"], box["y"] + box["height"] / 2
    mouse.move(box["x"] + handle / 2 + track * (now - low) / (high - low), middle)
    mouse.down()
    mouse.move(box["x"] + handle / 2 + track * share, middle, steps=5)
    mouse.up()


def says(where: Page | Locator, words: str) -> None:
    """Wait until the explorer's sentences have these words."""
    expect(where.locator(".widget-html [role=status]").filter(has_text=words)).to_be_visible(timeout=MOVE)


def pictures(where: Page | Locator) -> Locator:
    return where.locator(".widget-html svg[role=img]")


def violations(page: Page) -> list[str]:
    """The serious violations that axe-core finds in the course's elements, in the light and in the dark theme."""
    found: list[str] = []
    for scheme, rules in RULES.items():
        page.emulate_media(color_scheme=scheme)
        page.locator(f"body[data-jp-theme-light={'true' if scheme == 'light' else 'false'}]").wait_for(state="attached")
        results: Any = Axe().run(page, OURS, {"resultTypes": ["violations"], **rules}).response
        for violation in results["violations"]:
            if violation["impact"] in BAD:
                places = [node["html"][:200] for node in violation["nodes"][:3]]
                found.append(f"{scheme}: {violation['help']}, {len(violation['nodes'])} times: {places}")
    page.emulate_media(color_scheme="light")
    page.locator("body[data-jp-theme-light=true]").wait_for(state="attached")
    return found


def go_through(lab: Any, lesson: str, touch: Callable[[Page], None] | None = None) -> Page:
    """Open a lesson, look at its stored outputs, run its cards and explorers, and check that everyone can read them.

    (Its other cells are run and compared by nbval.)  touch: acts on the stored outputs.
    """
    notebook = lab.open(f"notebooks/{lesson}.ipynb")
    page: Page = notebook.page
    file = lab.server.folder / f"notebooks/{lesson}.ipynb"
    before = file.read_text(encoding="utf-8")
    stored_pictures_are_there(page, before)
    assert violations(page) == []
    notebook.save()
    assert file.read_text(encoding="utf-8") == before  # who only looks at a lesson changes no file
    breaks = page.locator(f"{OURS} pre").evaluate_all("all => all.map(printed => getComputedStyle(printed).wordBreak)")
    assert set(breaks) == {"normal"}  # printed text breaks between words
    if touch:
        touch(page)
    notebook.run_cells(r"Card\(|xplorer\(", RUN)
    assert page.locator(STDERR).all_inner_texts() == []
    assert violations(page) == []
    nothing_is_clipped(page)
    return page


def stored_pictures_are_there(page: Page, notebook: str) -> None:
    """Check that all stored pictures show before anything is run, also the explorers'. notebook: the file's text."""
    stored = page.locator(f"{OURS} img[alt]")
    cells = json.loads(notebook)["cells"]
    seen = [one for one in cells if not one["metadata"].get("jupyter", {}).get("outputs_hidden")]
    number = sum(json.dumps(one).count("<img ") for one in seen)
    # JupyterLab shows a plotly figure in place of its image.
    number -= sum(json.dumps(one).count("application/vnd.plotly.v1+json") for one in seen)
    expect(stored).to_have_count(number, timeout=MOVE)
    for picture in stored.all():
        assert picture.evaluate("picture => picture.decode().then(() => picture.naturalWidth > 0)")
        assert picture.get_attribute("alt")


def nothing_is_clipped(page: Page) -> None:
    """Check that no output is wider than its place, and that long lines of code wrap."""
    code = page.locator(".jp-CodeCell .cm-content").locator("visible=true")
    assert "cm-lineWrapping" in (code.first.get_attribute("class") or "")
    for _ in range(MOVE // 100):  # figures adapt to the width a moment later
        if not too_wide_or_small(page):
            break
        page.wait_for_timeout(100)
    assert too_wide_or_small(page) == []


def too_wide_or_small(page: Page) -> list[str]:
    too_wide = "all => all.filter(one => one.scrollWidth > one.clientWidth + 2).map(one => one.textContent)"
    smallest = smallest_label(page)
    return page.locator(OURS).evaluate_all(too_wide) + [f"a label of {smallest:.1f} pixels"] * (smallest < 11)


def fits_one_screen(explorer: Locator) -> float:
    """Check that an explorer fits on one screen; return its height in pixels."""
    shown = explorer.locator(".course-live")
    shown.scroll_into_view_if_needed()  # JupyterLab removes distant cells from the page
    height = shown.evaluate("all => all.getBoundingClientRect().height")
    screen = explorer.page.locator(".jp-WindowedPanel-outer").evaluate("panel => panel.clientHeight")
    assert height <= screen
    return height


def smallest_label(where: Page | Locator) -> float:
    """The smallest label in all shown pictures, stored ones included, in pixels; 0 if there is none."""
    sizes = """found => found.filter(picture => picture.getBoundingClientRect().width).map(picture => {
        const drawn = picture.tagName === "IMG" ? atob(picture.src.split(",")[1]) : picture.outerHTML;
        const fonts = [...drawn.matchAll(/font-size="([\\d.]+)"/g)].map(font => Number(font[1]));
        return Math.min(...fonts) * picture.getBoundingClientRect().width / picture.getAttribute("width");
    })"""
    return min(where.locator(f"{OURS} img, {OURS} svg[role=img]").evaluate_all(sizes), default=0.0)


def unrun(page: Page) -> Locator:
    """The prompts of code cells that were not run, because a cell before them failed."""
    return page.locator(".jp-CodeCell .jp-InputArea-prompt").filter(has_text="[ ]:")
