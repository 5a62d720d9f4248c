"""How a lesson is exported to HTML: on paper and offline it shows what the page does.

Formulas become MathML, which browsers draw without the network. Of a widget, its stored picture is shown, or the line
that says how to open it. Long lines break, since paper does not scroll.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r"(`+).*?\1|\$\$(.+?)\$\$|\$([^$\n]+)\$", re.DOTALL)  # what is code is none
ON_PAPER = "<style>@media print { pre { white-space: pre-wrap !important; overflow-wrap: anywhere; } }</style>"


def prepare(notebook: Any, resources: Any) -> tuple[Any, Any]:
    pages = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
    for cell in pages:
        cell.source = FORMULA.sub(in_mathml, cell.source)
    for cell in pages[:1]:
        cell.source += f"\n\n{ON_PAPER}"
    return notebook, resources


def in_mathml(found: re.Match[str]) -> str:
    _, block, inside = found.groups()
    return convert(block or inside, display="block" if block else "inline") if block or inside else found[0]


config = get_config()  # type: ignore[name-defined]  # noqa: F821
config.HTMLExporter.preprocessors = [prepare]
config.NbConvertBase.display_data_priority = ["text/html", "text/markdown", "image/png", "text/latex", "text/plain"]
