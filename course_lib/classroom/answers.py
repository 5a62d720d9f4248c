"""The answer of a student: those statements of a notebook's cells that make up one function, as text.

    cells  ->  statements  ->  those that bind the function, or a name that these use, and so on  ->  Answer

No process but a rank runs them. Whatever else the cells do, to this library or to the notebook, is not in the answer.
"""

from __future__ import annotations

import ast
import contextlib
import re
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any

from course_lib.ranks.worker.cells import remember_source

PLACE = "answer"  # the name of its file in a traceback
MAY_IMPORT = re.compile(
    r"(course_lib|torch|numpy|__future__|bisect|collections|contextlib|copy|dataclasses|enum|fractions|functools|heapq|"
    r"itertools|math|operator|random|statistics|string|time|typing|warnings)(\..+)?"
)
GIVEN = re.compile(r"^from course_lib\.mechanisms\.\S+ import (conjugate|all_reduce_in)$", re.MULTILINE)  # to students
# The words that reach this library, files or other processes from within a function, and that none needs.
SUSPICIOUS = re.compile(
    "breakpoint|builtins|classroom|compile|ctypes|delattr|eval|exec|getattr|globals|hub|importlib|lessons|locals|"
    "mechanisms|open|os|pickle|setattr|subprocess|sys|vars|"
    "__(?!(future|init|call|len|iter|next|[gs]etitem|enter|exit|post_init|eq|lt|hash|repr|name)__).+"
)


@dataclass(frozen=True)
class Answer:
    """A student's function: its name, and the text that makes it, which runs when the function is first called."""

    name: str
    text: str

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._made[self.name](*args, **named)

    @cached_property
    def _made(self) -> dict[str, Any]:
        made: dict[str, Any] = {"__name__": "__main__"}
        remember_source(PLACE, self.text)
        exec(compile(self.text, PLACE, "exec"), made)
        return made

    @property
    def __code__(self) -> CodeType | None:
        codes = (one for one in compile(self.text, PLACE, "exec").co_consts if isinstance(one, CodeType))
        return next((code for code in codes if code.co_name == self.name), None)

    def suspicious(self) -> list[str]:
        """Signs of a cheat, which no answer needs: modules, words and names of others that it replaces, each once."""
        nodes = list(ast.walk(ast.parse(GIVEN.sub("", self.text))))
        imports = [(node, one) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for one in node.names]
        modules = [str(getattr(node, "module", one.name)) for node, one in imports]
        unusual = [f"import {module}" for module in modules if not MAY_IMPORT.fullmatch(module)]
        attributes = [(node, ast.unparse(node)) for node in nodes if isinstance(node, ast.Attribute)]
        private = [one.attr for one, text in attributes if re.match("_[^_]", one.attr) and not text.startswith("self.")]
        foreign = tuple(f"{one.asname or one.name}." for _, one in imports)
        replaced = [text for one, text in attributes if text.startswith(foreign) and not isinstance(one.ctx, ast.Load)]
        words = [word for node in nodes for word in _words(node) if SUSPICIOUS.fullmatch(word)]
        return sorted({*unusual, *private, *replaced, *words})


def answer(cells: Iterable[str], name: str) -> Answer:
    """The answer with this name in the sources of some cells; its text is empty if none of them binds the name.

    A cell that is not Python binds nothing.
    """
    statements = [(text, *_names(text)) for cell in cells for text in _statements(cell)]
    wanted, taken = {name, "*"}, dict[int, str]()
    while new := [i for i, (_, bound, _) in enumerate(statements) if i not in taken and bound & wanted]:
        taken |= {i: statements[i][0] for i in new}
        wanted = wanted.union(*(statements[i][2] for i in new))
    is_there = any(name in statements[i][1] for i in taken)
    return Answer(name, "\n\n".join(taken[i] for i in sorted(taken)) if is_there else "")


def _statements(cell: str) -> Iterator[str]:
    from IPython.core.inputtransformer2 import TransformerManager  # ranks import this file, and parse no cells

    with contextlib.suppress(SyntaxError, ValueError):
        yield from map(ast.unparse, ast.parse(TransformerManager().transform_cell(cell)).body)


def _names(statement: str) -> tuple[set[str], set[str]]:
    """The names that a statement binds in its module ("*" for any), and those of its module that it uses."""
    tables = [top := symtable.symtable(statement, PLACE, "exec")]
    for table in tables:  # those inside are added meanwhile
        tables += table.get_children()
    bound = {one.get_name() for one in top.get_symbols() if one.is_assigned() or one.is_imported()}
    used = {one.get_name() for table in tables for one in table.get_symbols() if one.is_global() or table is top}
    return bound | ({"*"} if statement.endswith(" import *") else set()), used


def _words(node: ast.AST) -> list[str]:
    """The identifiers in a node; of a text without spaces, such as a name for getattr, its parts."""
    if isinstance(node, ast.Attribute) and node.attr == "eval":
        return []  # as in model.eval()
    texts = [getattr(node, field, None) for field in ("id", "attr", "name", "module", "value")]
    return [word for text in texts if isinstance(text, str) and " " not in text for word in re.split(r"\W+", text)]
