"""Pages of the site: notebooks, Markdown and the sources that they link to, as HTML.

A page has its words from the notebook that `course.py build` has made, with the outputs stored there. Pictures become
files of their own and charts become packs, so that the text of a page comes first.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape, unescape
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

PLOTLY = "application/vnd.plotly.v1+json"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
GLYPH = re.compile(r'<symbol id="([^"]+)".*?</symbol>')
STORED = re.compile(r'<img src="data:image/svg\+xml;base64,([^"]+)"')
HERE = re.compile(r"<!--cell (\d+)-->")
LONGEST_DESCRIPTION = 160
ziamath.config.precision = 2
ziamath.config.math.color = "currentColor"


@dataclass
class Page:
    """A page. file: its source in the course; kind: its part of the menu; address: its file in the site.

    sections: address, heading and words of each.  beside: what a cell, by its number, is shown with in place of its
    outputs alone; it gets their HTML.
    """

    file: Path
    kind: str
    address: str
    title: str = ""
    description: str = ""
    body: str = ""
    sections: list[tuple[str, str, str]] = field(default_factory=list)
    beside: dict[int, Callable[[str], str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.address.removesuffix(".html")

    @property
    def label(self) -> str:
        """The title in menus, with the number of a lesson or an exercise."""
        return f"{self.file.stem[:2]} {self.title}" if self.kind in ("lesson", "exercise") else self.title


class Site:
    """The folder that pages are written to. root: the course.  keep: packs a value under a name."""

    def __init__(self, root: Path, folder: Path, keep: Callable[[str, Any], object]) -> None:
        self.root, self.folder, self.keep = root, folder, keep
        self.pages: dict[Path, Page] = {page.file: page for page in pages(root)}
        (folder / "images").mkdir(parents=True, exist_ok=True)

    def render(self, page: Page) -> None:
        """Fill in the page's body, title, description and sections."""
        if page.kind == "source":
            page.title = page.file.relative_to(self.root).as_posix()
            page.body = f"<h1>{page.title}</h1>{code(page.file.read_text(encoding='utf-8'))}"
            return
        cells = self.cells(page)
        text = "\n\n".join(
            cell.source if cell.cell_type == "markdown" else f"<!--cell {number}-->"
            for number, cell in enumerate(cells)
        )
        parser = markdown()
        tokens = parser.parse(text)
        self._link(page, tokens)
        html = parser.renderer.render(tokens, parser.options, {})
        _outline(page, tokens)
        html = html.replace("<table>", '<table tabindex="0">')  # it scrolls on a phone
        html = HERE.sub(lambda found: self._cell(page, int(found[1]), cells[int(found[1])]), html)
        glyphs = {found[1]: found[0] for found in GLYPH.finditer(html)}  # each once, for all formulas
        page.body = f"<svg class='glyphs' aria-hidden='true'>{''.join(glyphs.values())}</svg>{GLYPH.sub('', html)}"

    def cells(self, page: Page) -> list[NotebookNode]:
        text = page.file.read_text(encoding="utf-8")
        if page.file.suffix == ".md":
            return [nbformat.v4.new_markdown_cell(text)]
        found: list[NotebookNode] = nbformat.reads(text, 4).cells
        if page.kind == "exercise":
            solved = page.file.parents[2] / "solutions" / page.file.relative_to(page.file.parents[1])
            of_solution = {cell.id: cell for cell in nbformat.read(solved, 4).cells}
            for cell in found:
                cell.solution = of_solution[cell.id]
        return found

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
        if file not in self.pages and file.is_file():
            name = "_".join(file.relative_to(self.root).with_suffix("").parts)
            self.pages[file] = Page(file, "source", f"{name}.html")
        return f"{self.pages[file].address}{hash}{inside}"

    def _picture(self, data: bytes) -> str:
        name = f"images/{hashlib.sha256(data).hexdigest()[:12]}.svg"
        (self.folder / name).write_bytes(data)
        return name

    def _cell(self, page: Page, number: int, cell: NotebookNode) -> str:
        if not cell.source.strip():
            return ""
        shown = code(cell.source)
        if page.kind == "exercise":
            return shown + self._solution(page, number, cell)
        outputs = self._outputs(page, number, cell)
        return shown + page.beside.get(number, "<div class='out'>{}</div>".format if outputs else str)(outputs)

    def _solution(self, page: Page, number: int, cell: NotebookNode) -> str:
        solved = cell.solution
        own = code(solved.source) if solved.source != cell.source else ""
        outputs = self._outputs(page, number, solved)
        if not own + outputs:
            return ""
        heading = "A solution" if own else "What it shows with the solution"
        return f"<details><summary>{heading}</summary>{own}<div class='out'>{outputs}</div></details>"

    def _outputs(self, page: Page, number: int, cell: NotebookNode) -> str:
        each = (self._output(f"{page.name}-{number}-{place}", one) for place, one in enumerate(cell.outputs))
        return STORED.sub(self._image, "".join(each))

    def _output(self, name: str, output: NotebookNode) -> str:
        if output.output_type == "stream":
            return f'<pre class="printed" tabindex="0">{escape(ANSI.sub("", output.text))}</pre>'
        if output.output_type == "error":
            return f'<pre class="printed" tabindex="0">{escape(ANSI.sub("", chr(10).join(output.traceback)))}</pre>'
        html = str(output.data.get("text/html") or f"<pre>{escape(output.data.get('text/plain', ''))}</pre>")
        if PLOTLY in output.data:
            self.keep(name, output.data[PLOTLY])
            record = script_json({"kind": "chart", "key": name})
            return f'<div class="live"><script type="application/json">{record}</script>{html}</div>'
        return html

    def _image(self, found: re.Match[str]) -> str:
        data = base64.b64decode(found[1])
        size = re.search(rb' height="([\d.]+)"', data)
        return f'<img loading="lazy" src="{self._picture(data)}" height="{float(size[1]) if size else 0:.0f}"'


def pages(root: Path) -> Iterator[Page]:
    """The pages of a course, in the order of the menu."""
    yield Page(root / "lessons" / "site" / "index.md", "home", "index.html")
    for file in sorted(root.glob("notebooks/[0-9]*.ipynb")):
        yield Page(file, "lesson", f"{file.stem}.html")
    for file in sorted(root.glob("notebooks/scenarios/S*.ipynb")):
        yield Page(file, "scenario", f"{file.stem}.html")
    for file in sorted(root.glob("exercises/*/[0-9]*.ipynb")):
        yield Page(file, "exercise", f"exercise_{file.stem}.html")
    for name, address in (("glossary", "glossary"), ("README", "teaching_plan")):
        yield Page(root / "notebooks" / f"{name}.md", "more", f"{address}.html")


def markdown() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    parser.use(dollarmath_plugin, renderer=_formula).use(anchors_plugin, max_level=3, slug_func=address_of)
    for block in ("fence", "code_block"):
        parser.add_render_rule(block, lambda self, tokens, place, *_: code(tokens[place].content))
    return parser


def address_of(heading: str) -> str:
    """The address of a heading, which stays when sections are numbered anew."""
    return re.sub(r"[^\w]+", "-", re.sub(r"^\d+\.\s", "", heading).lower()).strip("-")


def _formula(text: str, options: dict[str, Any]) -> str:
    inside = not options["display_mode"]
    drawn = ziamath.Latex(text, size=17, inline=inside)
    svg = drawn.svg().replace("<svg ", f'<svg role="img" aria-label="{escape(text)}" ', 1)
    lowered = f' style="vertical-align:{drawn.getyofst():.1f}px"' if inside else ' class="display"'
    return svg.replace("<svg ", f"<svg{lowered} ", 1)


def code(source: str) -> str:
    marked = highlight(source, PythonLexer(), HtmlFormatter(nowrap=True))
    return f'<pre class="code" tabindex="0"><code>{marked}</code></pre>'


def words(html: str) -> str:
    return " ".join(unescape(re.sub(r"<svg.*?</svg>|<[^>]+>", " ", html, flags=re.DOTALL)).split())


def _outline(page: Page, tokens: list[Token]) -> None:
    """The page's title, description and sections, with their words for the search."""
    for place, token in enumerate(tokens):
        if token.type == "heading_open" and token.attrs.get("id"):
            page.sections.append((str(token.attrs["id"]), words(tokens[place + 1].content.replace("`", "")), ""))
        elif token.type == "inline" and page.sections and tokens[place - 1].type != "heading_open":
            at, heading, text = page.sections[-1]
            plain = "".join(child.content for child in token.children or [] if child.type != "html_inline")
            page.sections[-1] = at, heading, f"{text} {plain}".strip()
            page.description = page.description or plain
    page.title = page.sections[0][1]
    page.description = page.description[:LONGEST_DESCRIPTION].rpartition(" ")[0]


def script_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
