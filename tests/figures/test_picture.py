"""The outputs that a cell stores: a picture where no script runs, a text to read aloud, the numbers in a table."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any

import pytest

from course_lib.figures import (
    Picture,
    chart_plotly,
    gantt,
)
from course_lib.figures.palette import Style
from course_lib.figures.picture import MOST_TIPS, PLOTLY
from tests.figures.charts import CHARTS, ZOOMABLE
from tests.figures.drawn import SVG, boxes, parsed, zoomable
from tests.figures.synthetic import dense, every_kind

PICTURES = {"gantt": gantt(every_kind()), **CHARTS}
every_picture = pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)


class Page(HTMLParser):
    """The elements of a piece of HTML with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data + " "

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def stored(picture: Picture) -> Page:
    return Page(picture._repr_mimebundle_()["text/html"])


def image(picture: Picture) -> str:
    source = stored(picture).all("img")[0]["src"] or ""
    return base64.b64decode(source.removeprefix("data:image/svg+xml;base64,")).decode()


@every_picture
def test_a_cell_stores_an_image_with_its_data_and_the_sentence(picture: Picture) -> None:
    bundle = picture._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert bundle["text/plain"] == picture.summary
    assert stored(picture).all("img")[0]["alt"] == picture.summary
    assert parsed(image(picture)).tag == f"{SVG}svg"
    assert picture.summary in stored(picture).words


@every_picture
def test_what_is_stored_needs_no_script_no_inline_svg_and_no_network(picture: Picture) -> None:
    tags = {tag for tag, _ in stored(picture).elements}
    assert not tags & {"script", "svg", "style", "link", "iframe", "object"}
    everything = picture._repr_mimebundle_()["text/html"] + image(picture)
    assert re.findall(r"https?://[^\"]+", everything) == ["http://www.w3.org/2000/svg"]


@every_picture
def test_the_stored_image_and_the_live_one_have_the_colors_of_the_page(picture: Picture) -> None:
    for svg in (image(picture), picture.svg, picture.inline()):
        assert "color:var(--jp-ui-font-color1,#1a1a1a)" in svg
        assert 'rx="4" fill="var(--jp-layout-color0,#ffffff)"' in svg
    # An image has no variables of the page: dark on white, unless the page says that it is dark.
    dark = re.findall(r"<style>@media\(prefers-color-scheme:dark\)\{svg\{(.*?)\}\}</style>", image(picture))
    assert len(dark) == 1 and "--jp-layout-color0:#111" in dark[0]
    assert "color-scheme:light" in (stored(picture).all("img")[0]["style"] or "")
    assert "prefers-color-scheme" not in picture.inline()


@every_picture
def test_the_picture_is_one_image_to_a_screen_reader(picture: Picture) -> None:
    root = parsed(picture.svg)
    assert (root.attrib["role"], root.attrib["aria-label"]) == ("img", picture.summary)


@every_picture
def test_tooltips_lie_over_the_stored_image_where_the_bars_are(picture: Picture) -> None:
    root = parsed(picture.svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    laid = [place for place in stored(picture).all("i") if place["title"]]
    drawn = sorted(boxes(picture.svg), key=lambda box: -box.width)
    assert len(laid) == min(len(drawn), MOST_TIPS)
    for place in laid:
        percent = [float(number) for number in re.findall(r":([\d.]+)%", place["style"] or "")]
        pixels = [share / 100 * whole for share, whole in zip(percent, (width, height) * 2, strict=True)]
        assert pixels[2] >= drawn[len(laid) - 1].width - 0.1  # the widest
        assert pixels in [pytest.approx(box[:4], abs=0.1) for box in drawn if box.tip == place["title"]]
    assert "<title>" not in image(picture)


def test_a_notebook_does_not_swell_with_tooltips() -> None:
    places = stored(gantt(dense(32, 100))).all("i")
    assert 0 < len(places) <= MOST_TIPS


@every_picture
def test_the_numbers_behind_the_picture_are_folded_under_the_sentence(picture: Picture) -> None:
    page = stored(picture)
    assert [tag for tag, _ in page.elements if tag in ("details", "summary", "table")] == [
        "details",
        "summary",
        "table",
    ]
    assert len(page.all("tr")) == 1 + len(picture.rows)
    assert len(page.all("td")) == sum(map(len, picture.rows))


@pytest.mark.parametrize("name", CHARTS)
def test_no_two_kinds_of_bars_in_a_chart_have_one_pattern(name: str) -> None:
    chart = PICTURES[name].chart
    assert chart is not None
    patterns = [look.shape for look in chart.legend.values() if isinstance(look, Style)]
    assert len(set(patterns)) == len(patterns)


@pytest.mark.parametrize("name", ZOOMABLE)
def test_the_zoomable_figure_lies_on_a_light_card_with_dark_text(name: str) -> None:
    layout = zoomable(PICTURES[name]).layout
    assert (layout.paper_bgcolor, layout.plot_bgcolor, layout.font.color) == ("#ffffff", "#ffffff", "#1a1a1a")


def outputs(picture: Picture, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The output of a cell that ends in the picture."""
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))
    picture._ipython_display_()
    return shown


@pytest.mark.parametrize("name", ZOOMABLE)
def test_a_chart_in_a_cell_is_a_figure_to_touch_and_below_it_its_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = PICTURES[name]
    figure, numbers = outputs(picture, monkeypatch)
    text = json.dumps(figure[PLOTLY], allow_nan=False)
    assert picture.chart is not None
    assert json.loads(text) == json.loads(json.dumps(chart_plotly.stored(picture.chart)))
    assert not re.search(r"https?://", text)
    assert figure[PLOTLY]["config"]["modeBarButtonsToRemove"] == ["sendChartToCloud"]  # nothing is uploaded
    # Where no script runs, the image replaces the figure; the numbers are below both.
    together = Page(figure["text/html"] + numbers["text/html"])
    assert together.elements == [(tag, words) for tag, words in stored(picture).elements if tag != "i"]
    assert picture.summary in Page(numbers["text/html"]).words


@pytest.mark.parametrize("name", [name for name in PICTURES if name not in ZOOMABLE])
def test_timelines_bars_and_areas_in_a_cell_are_the_image_that_is_stored(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outputs(PICTURES[name], monkeypatch) == [PICTURES[name]._repr_mimebundle_()]


@pytest.mark.parametrize("package", ["plotly", "torch"])  # each takes seconds
def test_pictures_are_drawn_without_importing(package: str) -> None:
    program = (
        "import sys; from course_lib.figures import Timing, speed_up\n"
        f"speed_up([Timing(1, 1.0)])._ipython_display_(); sys.exit({package!r} in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
