"""The little markup of questions, as HTML: paragraphs, lists, `code`, and blocks of code between lines of ```."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape


def to_html(text: str) -> str:
    """The text as HTML. Blank lines separate paragraphs; one whose lines begin with "- " is a list."""
    parts = text.split("```")
    code = "<pre style='margin:4px 0;padding:8px;overflow-x:auto'>{}</pre>"
    return "".join(code.format(escape(part.strip())) if n % 2 else _prose(part) for n, part in enumerate(parts))


def to_text(text: str) -> str:
    """The text for a terminal, without the marks."""
    return re.sub(r"```\n?|`", "", text.strip())


def bullets(lines: Iterable[object]) -> str:
    """A list of these lines in this markup."""
    return "\n".join(f"- {line}" for line in lines)


def inline(text: str) -> str:
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


def _prose(text: str) -> str:
    return "".join(_paragraph(block) for block in re.split(r"\n\s*\n", text.strip()) if block)


def _paragraph(block: str) -> str:
    if block.startswith("- "):
        items = re.split(r"(?:^|\n)- ", block)[1:]
        return f"<ul>{''.join(f'<li>{inline(item)}</li>' for item in items)}</ul>"
    return f"<p>{inline(block)}</p>"
