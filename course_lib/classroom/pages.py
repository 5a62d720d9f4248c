"""Pages of prose, which authors edit in the rooms: headings, and the text below each of them.

Lines of a paragraph are joined, blank lines separate paragraphs, a list begins with "- ", and code stands between lines
of ```. (Standard library only; see `progress`.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def sections(file: Path) -> Iterator[tuple[str, str, str]]:
    """Place (file and line), heading with its marks, and text of each section."""
    where = f"{file.parent.name}/{file.name}"
    place, heading, lines, is_code = f"{where}:1", "", list[str](), False
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        is_code ^= line.startswith("```")
        if line.startswith("#") and not is_code:
            if heading or any(lines):
                yield place, heading, _joined(lines)
            place, heading, lines = f"{where}:{number}", line, []
        else:
            lines.append(line)
    yield place, heading, _joined(lines)


def _joined(lines: list[str]) -> str:
    """The text with each paragraph on one line, and code unchanged."""
    parts = "\n".join(lines).strip().split("```")
    return "```".join(
        part if number % 2 else re.sub(r"(?<!\n)\n(?!\n|- ) *", " ", part) for number, part in enumerate(parts)
    )
