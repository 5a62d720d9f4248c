"""The widgets of a page, found in its source. Only the statements that lead to one are run for it."""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

import lessons
from course_lib.classroom import rooms
from course_lib.classroom.questions.catalog import pages
from course_lib.classroom.questions.prose import Page
from lessons.site.gather import Gathered, gather

ROOT = Path(lessons.__file__).parents[1]
ENGINES = [ROOT / "requirements.lock", Path(__file__).with_name("gather.py")]  # every pack depends on them
CALLS = re.compile(r"[Ee]xplorer$|\bplay$|\bMeasuring$|\bCard$")


@dataclass(frozen=True)
class Widget:
    """A widget. program: the statements that lead to it.  call: the expression that makes it.

    question: the name of a card's question.
    """

    program: str
    call: str
    question: str = ""

    @cached_property
    def key(self) -> str:
        """The name of what it shows, which changes with everything that this depends on."""
        texts = [self.program, self.call, *map(_text, sorted({*ENGINES, *files_behind(self.program)}))]
        if self.question:  # a case has a page of its own
            names = {self.question, pages()[self.question].room} & pages().keys()
            texts += [text for name in sorted(names) for text in _prose(pages()[name])]
        return "w" + hashlib.sha256("\n".join(texts).encode()).hexdigest()[:11]

    def gather(self) -> Gathered:
        names: dict[str, Any] = {}
        exec(self.program, names)
        return gather(eval(self.call, names), self.key)


def widget(cells: list[NotebookNode], number: int) -> Widget | None:
    """The widget that this cell shows, if it shows one."""
    *before, last = [one for cell in cells[: number + 1] for one in _statements(cell)] or [ast.Pass()]
    if cells[number].cell_type != "code" or not isinstance(last, ast.Expr) or not isinstance(last.value, ast.Call):
        return None
    call = ast.unparse(last)
    if not CALLS.search(call.partition("(")[0]):
        return None
    if call.startswith("Card("):
        return card(ast.literal_eval(last.value.args[0]))
    kept: list[ast.stmt] = []
    needed = _names(last, ast.Load)
    for statement in reversed(before):
        if bound := _names(statement, ast.Store) & needed:
            kept.insert(0, statement)
            needed = needed - bound | _names(statement, ast.Load)
    return Widget("\n".join(map(ast.unparse, kept)), call)


def card(question: str) -> Widget:
    program = f"import {rooms.module_of(pages()[question].file)}\nfrom course_lib.classroom import questions"
    return Widget(program, f"questions.load({question!r})", question)


def _statements(cell: NotebookNode) -> list[ast.stmt]:
    if cell.cell_type != "code" or cell.source.startswith("%"):  # a cell for ranks binds nothing here
        return []
    return ast.parse(re.sub(r"(?m)^%.*$", "", cell.source)).body


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    """The names that a statement uses (Load) or binds (Store)."""
    nodes = list(ast.walk(statement))
    found = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)}
    if context is ast.Store:
        found |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        found |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    return found


def files_behind(program: str) -> set[Path]:
    """The files of the course that a program imports, be it late or through others, and the data beside them."""
    found: set[Path] = set()
    left = {*_imported(program)}
    while left:
        found |= left
        left = {file for one in left for file in _imported(_text(one))} - found
    return found | {data for file in found for data in file.parent.glob("*.json")}


@cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def _imported(program: str) -> list[Path]:
    names = []
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    places = (
        ROOT.joinpath(*parts[:end]) for parts in (one.split(".") for one in names) for end in range(1, len(parts) + 1)
    )
    return [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]


def _prose(page: Page) -> list[str]:
    return [page.title, *(one.text for part in (page.sections, page.found) for one in part.values())]
