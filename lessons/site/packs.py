"""Packs: what pages load later, and the cache of those that widgets have been run for."""

from __future__ import annotations

import base64
import gzip
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from lessons.site.widgets import ROOT, Widget

CACHE = ROOT / ".course" / "site"


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")


def script(name: str, value: Any) -> str:
    """A value as a script, compressed: a page that is opened from a disk may load scripts, and nothing else."""
    data = base64.b64encode(gzip.compress(dumps(value).encode(), 9, mtime=0)).decode()
    return f'course.unpack("{name}","{data}")\n'


def write(folder: Path, name: str, value: Any) -> None:
    (folder / f"{name}.js").write_text(script(name, value), encoding="utf-8")


def gather_all(widgets: list[Widget]) -> None:
    """Run what these widgets can show. What was run with the same sources before is not run again."""
    CACHE.mkdir(parents=True, exist_ok=True)
    # Later lessons have those that take minutes.
    missing = [one for one in reversed(dict.fromkeys(widgets)) if not (CACHE / one.key).exists()]
    processes = multiprocessing.get_context("spawn")  # a process with ranks is not forked
    with ProcessPoolExecutor((os.cpu_count() or 1) + 1, processes) as pool:  # one may wait for ranks that are stuck
        for name in pool.map(gather, missing):
            print(name, flush=True)


def gather(widget: Widget) -> str:
    """Run everything that a widget can show, and keep it. Returns its name."""
    record, packs = widget.gather()
    half = CACHE / f"{widget.key}.half"
    half.write_text(
        json.dumps([record, {name: script(name, value) for name, value in packs.items()}]), encoding="utf-8"
    )
    half.replace(CACHE / widget.key)
    return widget.question or widget.call


def copy(widget: Widget, folder: Path) -> dict[str, Any]:
    """Put the packs of a widget into a folder. Returns its record."""
    record, packs = json.loads((CACHE / widget.key).read_text(encoding="utf-8"))
    for name, text in packs.items():
        (folder / f"{name}.js").write_text(text, encoding="utf-8")
    return dict(record)
