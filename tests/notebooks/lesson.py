"""A lesson: the text of its script, with fields unfilled, and the outputs of its notebook.

nbval runs the cells again, and compares outputs and fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property, lru_cache

import nbformat
from nbformat import NotebookNode

from lessons import build

NOTEBOOKS = build.ROOT / "notebooks"

Proofs = dict[str, Callable[[], object]]  # quoted sentence: its proof


class Lesson:
    """The lesson of this name, without its number."""

    def __init__(self, name: str) -> None:
        (self.product,) = (
            one for one in build.products(build.ROOT) if one.target.stem[3:] == name and one.kind == "lesson"
        )

    @cached_property
    def cells(self) -> list[NotebookNode]:
        return nbformat.read(self.product.target, as_version=4).cells

    @cached_property
    def texts(self) -> list[str]:
        return [cell.source for cell in build.read(self.product.source).cells if cell.cell_type == "markdown"]

    @cached_property
    def prose(self) -> str:
        return _on_one_line(" ".join(self.texts))

    def says(self, sentence: str) -> bool:
        return _on_one_line(sentence) in self.prose

    def code(self, part: str) -> str:
        """The code of the only cell that contains `part`."""
        return str(self._cell(part).source)

    def _cell(self, code: str) -> NotebookNode:
        (cell,) = (cell for cell in self.cells if cell.cell_type == "code" and code in cell.source)
        return cell

    def shown(self, code: str) -> str:
        """The output of the only cell whose code contains this, as text.

        Raises ValueError if nbval does not compare the output, as it then proves nothing.
        """
        cell = self._cell(code)
        if "nbval-ignore-output" in cell.metadata.get("tags", []):
            raise ValueError(f"nbval ignores what the cell with {code!r} shows; prove the sentence by a run")
        said = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
        return "\n".join(said)

    def shows(self, code: str, *words: str) -> bool:
        return all(word in self.shown(code) for word in words)

    def numbers(self, code: str, line: str = "") -> list[float]:
        """The numbers in a cell's output, or only in its lines that contain `line`."""
        lines = [one for one in self.shown(code).splitlines() if line in one]
        found = re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", "\n".join(lines))
        return [float(number.replace(",", "")) for number in found]


@lru_cache
def lesson(name: str) -> Lesson:
    return Lesson(name)


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def is_proved(name: str, sentence: str, proofs: Proofs) -> None:
    """Fail if the lesson no longer has this sentence, or if it is not true."""
    assert lesson(name).says(sentence), "the lesson no longer says this; take it, and what proves it, out of the table"
    assert proofs[sentence](), "the lesson says this, and it is not so"
