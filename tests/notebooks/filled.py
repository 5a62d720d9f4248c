"""A plugin for pytest that compares the fields of a lesson with their values, while nbval runs its cells."""

from __future__ import annotations

import sys
import tempfile
import uuid
from collections.abc import Generator, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import nbval.kernel
import pytest
from jupyter_client.manager import KernelManager
from nbformat import NotebookNode
from nbval.plugin import IPyNbCell

from lessons import build


def pytest_configure() -> None:
    if sys.platform != "win32":
        nbval.kernel.KernelManager = without_ports


def without_ports(**traits: Any) -> KernelManager:
    """A manager whose kernel is reached by files: other processes may take ports before the kernel does."""
    return KernelManager(transport="ipc", ip=f"{tempfile.gettempdir()}/kernel-{uuid.uuid4().hex[:12]}", **traits)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    result = yield
    if isinstance(item, IPyNbCell):
        scripts = {product.target: product.source for product in build.products(item.config.rootpath)}
        compare(item, scripts[item.path])
    return result


def compare(item: IPyNbCell, source: Path) -> None:
    """Fail this cell if a field between it and the next has another value now."""
    stored = {cell.id: cell.source for cell in item.parent.nb.cells}
    for cell in behind(source, item.cell_num):
        try:
            text = build.told(cell, ask(item, cell))
        except build.FieldError as error:
            item.raise_cell_error(str(error))
        if build.has_fields(cell) and text != stored.get(cell.id):
            lines = zip(stored.get(cell.id, "").split("\n"), text.split("\n"), strict=False)
            was, now = next((pair for pair in lines if pair[0] != pair[1]), ("less", "more"))
            again = f"python3 course.py build {item.path.stem}"
            item.raise_cell_error(f"the page says\n  {was}\nand the run gives\n  {now}\nRun `{again}`.")


def behind(source: Path, number: int) -> Iterator[NotebookNode]:
    """The script's cells that need the kernel, after the page's code cell of this number and before its next one.

    Cells above the first code cell count as following it.
    """
    seen = -1
    for cell in script(source).cells:
        if build.unseen(cell):
            if number == max(seen, 0):
                yield cell
        elif cell.cell_type == "code":
            seen += 1


script = lru_cache(build.read)


def ask(item: IPyNbCell, cell: NotebookNode) -> Any:
    """The reply of nbval's kernel to the request of this cell."""
    kernel = item.parent.kernel
    asked = kernel.kc.execute(**build.unseen(cell))
    while (reply := kernel.get_message("shell", build.CELL_TIMEOUT))["parent_header"].get("msg_id") != asked:
        pass
    return reply
