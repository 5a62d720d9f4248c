"""Pages of the site: notebooks and Markdown as HTML.

A page has its words from the notebook that `course.py build` has made, with the outputs stored there. Pictures become
files of their own and charts become packs, so that the text of a page comes first.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import nbformat
import ziamath
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.anchors import anchors_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from nbformat import NotebookNode
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from lessons.site import packs
from lessons.site.widgets import ROOT, Widget, widget

PLOTLY = "application/vnd.plotly.v1+json"
GLYPH = re.compile(r'<symbol id="([^"]+)".*?</symbol>')
STORED = re.compile(r'<img src="data:image/svg\+xml;base64,([^"]+)"')
TIPS = re.compile(r'<i aria-hidden="true"[^>]*></i>')
PLAIN = re.compile(r'<span class="(?:n|nn|o|p|w)">([^<]*)</span>')  # of these the page has no color
PLACE = re.compile(r"<!--cell (\d+)-->")
ziamath.config.precision = 2
ziamath.config.math.color = "currentColor"


@dataclass
class Page:
    """A page. file: its source in the course; kind: its part of the menu; address: its file in the site.

    sections: address, heading and words of each.
    """

    file: Path
    kind: str
    address: str
    description: str = ""
    body: str = ""
    sections: list[list[str]] = field(default_factory=list)

    @property
    def title(self) -> str:
        return self.sections[0][1]

    @property
    def source(self) -> str:
        return os.path.relpath(self.file, ROOT)

    @cached_property
    def cells(self) -> list[NotebookNode]:
        if self.file.suffix == ".md":
            return [nbformat.v4.new_markdown_cell(self.file.read_text(encoding="utf-8"))]
        return list(nbformat.read(self.file, 4).cells)

    @cached_property
    def solved(self) -> dict[str, NotebookNode]:
        """The cells of an exercise's solution."""
        file = ROOT / "solutions" / self.file.relative_to(ROOT / "exercises")
        return {cell.id: cell for cell in nbformat.read(file, 4).cells}

    @cached_property
    def widgets(self) -> dict[int, Widget]:
        """The live widgets of a lesson or a scenario, by the numbers of their cells."""
        numbers = range(len(self.cells) if self.kind in ("lesson", "scenario") else 0)
        return {number: one for number in numbers if (one := widget(self.cells, number))}


class Site:
    """The folder that pages are written to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pages = folder, {page.file: page for page in pages()}
        for part in ("images", "packs", "sources"):
            shutil.rmtree(folder / part, ignore_errors=True)
            (folder / part).mkdir(parents=True)

    def render(self, page: Page) -> None:
        """Fill in the page's body, description and sections."""
        texts = [c.source if c.cell_type == "markdown" else f"<!--cell {n}-->" for n, c in enumerate(page.cells)]
        parser = markdown()
        tokens = parser.parse("\n\n".join(texts))
        self._link(page, tokens)
        html = parser.renderer.render(tokens, parser.options, {})
        _outline(page, tokens)
        html = re.sub("<(table|pre)>", r'<\1 tabindex="0">', html)  # it scrolls on a phone
        html = html.replace("<th></th>", "<td></td>")  # an empty corner is no heading
        html = PLACE.sub(lambda found: self._cell(page, int(found[1])), html)
        glyphs = {found[1]: found[0] for found in GLYPH.finditer(html)}  # each once, for all formulas
        page.body = f"<svg class='glyphs' aria-hidden='true'>{''.join(glyphs.values())}</svg>{GLYPH.sub('', html)}"

    def _link(self, page: Page, tokens: list[Token]) -> None:
        """Let links and pictures of the course's files lead to their places in the site."""
        for token in (child for block in tokens for child in block.children or []):
            attribute = {"link_open": "href", "image": "src"}.get(token.type)
            if attribute and "://" not in (target := str(token.attrs[attribute])):
                token.attrs[attribute] = self._place(page, *target.partition("#"))

    def _place(self, page: Page, target: str, hash: str, inside: str) -> str:
        file = Path(os.path.normpath(page.file.parent / target)) if target else page.file
        if file.suffix == ".svg":
            return self._picture(file.read_bytes())
        if file in self.pages:
            return f"{self.pages[file].address}{hash}{inside}"
        name = f"sources/{'_'.join(file.relative_to(ROOT).parts)}.txt"  # which a browser shows
        shutil.copy(file, self.folder / name)
        return name

    def _picture(self, data: bytes) -> str:
        name = f"images/{hashlib.sha256(data).hexdigest()[:12]}.svg"
        (self.folder / name).write_bytes(data)
        return name

    def _cell(self, page: Page, number: int) -> str:
        cell = page.cells[number]
        if not cell.source.strip():
            return ""
        if page.kind == "exercise":
            own = page.solved[cell.id].source
            folded = f"<details><summary>A solution</summary>{code(own)}</details>"
            return code(cell.source) + (folded if own != cell.source else "")
        shown = self._outputs(page, number, cell)
        if one := page.widgets.get(number):
            return code(cell.source) + self._live(page, one, shown)
        return code(cell.source) + (shown and f"<div class='out'>{shown}</div>")

    def _live(self, page: Page, one: Widget, stored: str) -> str:
        """A widget, in front of it what is stored of it, to be seen until it is alive."""
        record, name = packs.copy(one, self.folder / "packs"), one.question or one.key
        if record["kind"] == "elsewhere":
            how = f"<p>To answer it, run <code>python3 course.py lab</code> and open <code>{page.source}</code>.</p>"
            return f'<div class="out" id="{name}">{stored}{how}</div>'
        return _alive({**record, "key": one.key}, TIPS.sub("", stored), name)

    def _outputs(self, page: Page, number: int, cell: NotebookNode) -> str:
        each = (self._output(f"{page.file.stem}-{number}-{place}", one) for place, one in enumerate(cell.outputs))
        return STORED.sub(self._image, "".join(each))

    def _output(self, name: str, output: NotebookNode) -> str:
        if "data" not in output:
            text = output.get("text") or "\n".join(output.traceback)
            return f'<pre class="printed" tabindex="0">{escape(text)}</pre>'
        html = str(output.data.get("text/html") or f"<pre>{escape(output.data['text/plain'])}</pre>")
        if PLOTLY in output.data:
            packs.write(self.folder / "packs", name, output.data[PLOTLY])
            return _alive({"kind": "chart", "key": name}, html, name)
        return html

    def _image(self, found: re.Match[str]) -> str:
        return f'<img loading="lazy" src="{self._picture(base64.b64decode(found[1]))}"'


def _alive(record: dict[str, Any], still: str, name: str) -> str:
    return f'<div class="live" id="{name}"><script type="application/json">{packs.dumps(record)}</script>{still}</div>'


def pages() -> Iterator[Page]:
    """The pages of the course, in the order of the menu."""
    yield Page(ROOT / "lessons" / "site" / "index.md", "home", "index.html")
    for file in sorted(ROOT.glob("notebooks/[0-9]*.ipynb")):
        yield Page(file, "lesson", f"{file.stem}.html")
    for file in sorted(ROOT.glob("notebooks/scenarios/S*.ipynb")):
        yield Page(file, "scenario", f"{file.stem}.html")
    for file in sorted(ROOT.glob("exercises/*/[0-9]*.ipynb")):
        yield Page(file, "exercise", f"exercise_{file.stem}.html")
    yield Page(ROOT / "notebooks" / "glossary.md", "more", "glossary.html")
    yield Page(ROOT / "notebooks" / "README.md", "more", "teaching_plan.html")


def markdown() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": True, "highlight": lambda text, *_: code(text)}).enable("table")
    return parser.use(dollarmath_plugin, renderer=_formula).use(anchors_plugin, max_level=3, slug_func=address_of)


def address_of(heading: str) -> str:
    """The address of a heading, which stays when sections are numbered anew."""
    return re.sub(r"[^\w]+", "-", re.sub(r"^\d+\.\s", "", heading).lower()).strip("-")


def _formula(text: str, options: dict[str, Any]) -> str:
    inside = not options["display_mode"]
    drawn = ziamath.Latex(text, size=17, inline=inside)
    place = f'style="vertical-align:{drawn.getyofst():.1f}px"' if inside else 'class="display"'
    return drawn.svg().replace("<svg ", f'<svg {place} role="img" aria-label="{escape(text)}" ', 1)


def code(source: str) -> str:
    marked = PLAIN.sub(r"\1", highlight(source, PythonLexer(), HtmlFormatter(nowrap=True)))
    return f'<pre class="code" tabindex="0"><code>{marked}</code></pre>'


def _outline(page: Page, tokens: list[Token]) -> None:
    """The page's description and sections, with their words for the search."""
    for before, token in zip([None, *tokens], tokens, strict=False):
        plain = "".join(one.content for one in token.children or [] if one.type != "html_inline")
        if before and before.type == "heading_open":
            page.sections.append([str(before.attrs.get("id", "")), plain, ""])
        elif plain and page.sections:
            page.sections[-1][2] += f"{plain} "
            page.description = page.description or textwrap.shorten(plain, 160, placeholder=" …")
