"""Packs: what pages load later, and the cache of those that widgets have been run for."""

from __future__ import annotations

import base64
import gzip
import json
import os
import pickle
import subprocess
import sys
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
    missing = [one for one in dict.fromkeys(widgets) if not (CACHE / one.key).exists()]
    missing.sort(key=lambda one: one.question)  # those that take long, explorers, come first
    n = os.cpu_count() or 1
    programs = [begin(missing[start::n]) for start in range(n)]
    codes = [program.wait() for program in programs]
    if any(codes):
        raise RuntimeError("some widgets could not be run; what is wrong stands above")


def begin(share: list[Widget]) -> subprocess.Popen[bytes]:
    """Begin to run a share of the widgets, in a program of its own.

    In a child of multiprocessing ranks would begin anew for each run, which takes 4 s in place of 0.02.
    """
    program = subprocess.Popen([sys.executable, "-m", "lessons.site.packs"], cwd=ROOT, stdin=subprocess.PIPE)
    assert program.stdin is not None
    with program.stdin as pipe:
        pickle.dump(share, pipe)
    return program


def gather(widget: Widget) -> None:
    """Run everything that a widget can show, and keep it."""
    record, packs = widget.gather()
    half = CACHE / f"{widget.key}.half"
    half.write_text(
        json.dumps([record, {name: script(name, value) for name, value in packs.items()}]), encoding="utf-8"
    )
    half.replace(CACHE / widget.key)
    print(widget.question or widget.call, flush=True)


def copy(widget: Widget, folder: Path) -> dict[str, Any]:
    """Put the packs of a widget into a folder. Returns its record."""
    record, packs = json.loads((CACHE / widget.key).read_text(encoding="utf-8"))
    for name, text in packs.items():
        (folder / f"{name}.js").write_text(text, encoding="utf-8")
    return dict(record)


if __name__ == "__main__":
    for each in pickle.load(sys.stdin.buffer):
        gather(each)
