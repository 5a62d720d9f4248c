"""What the page on mixed precision defines in its own cells, for tests of it."""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace

import torch

from lessons import build
from tests.notebooks.lesson import lesson


@cache
def page() -> SimpleNamespace:
    """The functions that make a model multiply numbers of few bits."""
    defined = {"torch": torch, "partial": partial}
    for cell in build.read(lesson("mixed_precision").product.source).cells:
        if "class Product(" in cell.source or "def grow_outlier(" in cell.source:
            exec(cell.source, defined)
    return SimpleNamespace(**defined)
