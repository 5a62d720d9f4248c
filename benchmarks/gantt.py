"""Time of a new timeline picture, against plotly: to draw in the kernel, and to show in a browser.

Showing is measured in the page, from handing over the new picture until it has been painted (two animation
frames later). Target: 4,096 spans show within 300 ms.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import plotly
import plotly.graph_objects as go
from playwright.sync_api import Page, sync_playwright

from course_lib.figures import gantt
from course_lib.figures.words import span_in_words
from course_lib.timeline import Span, Timeline

SIZES = ((4, 64), (8, 512), (32, 128), (32, 3125))  # ranks, spans of each
LARGEST_FOR_PLOTLY = 5_000
TURNS = 5
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge")
PAINTED = "await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));"
SHOW = f"""async html => {{
    const start = performance.now();
    document.getElementById("here").innerHTML = html;
    {PAINTED}
    return performance.now() - start;
}}"""
SHOW_PLOTLY = f"""async figure => {{
    const start = performance.now();
    const {{data, layout}} = JSON.parse(figure);
    await Plotly.react("here", data, layout);
    {PAINTED}
    return performance.now() - start;
}}"""


def timeline(ranks: int, spans: int, turn: int) -> Timeline:
    """A timeline of forward, wait, backward and transfer over and over, slightly different each turn."""
    made = []
    for rank in range(ranks):
        now = 0.0
        for i in range(spans):
            kind = ("forward", "wait", "backward", "transfer")[i % 4]
            length = 1e-3 * (1 + (i * 3 + rank + turn) % 7)
            made.append(Span(rank, kind, kind, now, now + length, micro_batch=i // 4))
            now += length
    return Timeline(made, ranks, "modelled")


def in_plotly(timeline: Timeline) -> str:
    """Draw the same bars with plotly, a trace for each kind, each bar with its hover text."""
    figure = go.Figure(layout={"barmode": "overlay"})
    for kind in sorted({span.kind for span in timeline.spans}):
        spans = [span for span in timeline.spans if span.kind == kind]
        figure.add_bar(
            name=kind,
            orientation="h",
            y=[span.rank for span in spans],
            base=[span.start for span in spans],
            x=[span.duration for span in spans],
            hovertext=[span_in_words(span, 0.0) for span in spans],
        )
    return json.dumps(figure.to_plotly_json())


def measure(page: Page, script: str, pictures: list[str]) -> float:
    """Median milliseconds to show each of the pictures in turn; the first does not count."""
    return statistics.median([page.evaluate(script, picture) for picture in pictures][1:])


def draw(size: tuple[int, int], write: Callable[[Timeline], str]) -> tuple[float, list[str]]:
    """Median milliseconds to make a picture, and the pictures."""
    times, pictures = [], []
    for turn in range(TURNS + 1):
        one = timeline(*size, turn)
        start = time.perf_counter()
        pictures.append(write(one))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:]), pictures


def report(page: Page, name: str, size: tuple[int, int], write: Callable[[Timeline], str], script: str) -> None:
    page.set_content('<body><div id="here"></div></body>')
    if script is SHOW_PLOTLY:
        page.add_script_tag(path=str(Path(plotly.__file__).parent / "package_data" / "plotly.min.js"))
    drawing, pictures = draw(size, write)
    showing = measure(page, script, pictures)
    kilobytes = len(pictures[-1].encode()) / 1e3
    print(f"{size[0]:5} {size[0] * size[1]:7,} {name:18} {drawing:9.0f} ms {showing:9.0f} ms {kilobytes:9.0f} kB")


def main() -> int:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        print("There is no Chromium, Chrome or Edge on this machine, so there is nothing to measure in.")
        return 0
    print(f"{'ranks':>5} {'spans':>7} {'way':18} {'draw':>12} {'show':>12} {'size':>12}")
    with sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page()
        for size in SIZES:
            report(page, "SVG, live", size, lambda t: gantt(t).inline(), SHOW)
            report(page, "image, as stored", size, lambda t: gantt(t)._repr_mimebundle_()["text/html"], SHOW)
            if size[0] * size[1] <= LARGEST_FOR_PLOTLY:
                report(page, "plotly", size, in_plotly, SHOW_PLOTLY)
    return 0


if __name__ == "__main__":
    sys.exit(main())
