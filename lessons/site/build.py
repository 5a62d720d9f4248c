"""Build the site: a folder of pages that opens from a web server and from a disk, and asks nothing of the network.

python -m lessons.site FOLDER [NAME ...]    all pages, or those whose names begin so, and the sources they link to
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import plotly

from course_lib.figures.svg import ROOMY
from lessons.site import moving, net
from lessons.site.pages import Page, Site, script_json
from lessons.site.widgets import Widget, widget

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COURSE = "Training large models on many workers"
WIDGETS = ROOT / "course_lib" / "classroom" / "widgets"
PARTS = ("slider", "switch", "options", "order", "sentences", "player")
STYLES = (*(WIDGETS / f"{name}.css" for name in ("player", "running", "controls")), HERE / "net.css", HERE / "site.css")
CACHE = ROOT / ".course" / "site"
TIPS = re.compile(r'<i aria-hidden="true"[^>]*></i>')
MENU = {"lesson": "Lessons", "exercise": "Exercises", "scenario": "Scenarios", "more": "More"}


def pack(folder: Path, name: str, value: Any) -> None:
    """Write a value as a script, compressed: a page that is opened from a disk may load scripts, and nothing else."""
    data = base64.b64encode(gzip.compress(script_json(value).encode(), 9, mtime=0)).decode()
    (folder / f"{name}.js").write_text(f'course.unpack("{name}","{data}")\n', encoding="utf-8")


def gather_all(widgets: list[Widget], folder: Path) -> None:
    """Put the packs of these widgets into a folder. What was run with the same sources before is not run again."""
    CACHE.mkdir(parents=True, exist_ok=True)
    missing = [one for one in dict.fromkeys(widgets) if not (CACHE / one.key).exists()]
    if missing:  # those that take long, explorers, first
        with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
            list(pool.map(gather, sorted(missing, key=lambda one: one.question)))
    for file in (file for one in widgets for file in (CACHE / one.key).glob("*.js")):
        shutil.copy(file, folder)


def gather(widget: Widget) -> None:
    """Run everything that a widget can show, and keep it."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=CACHE) as half:
        record, packs = widget.gather()
        for name, value in packs.items():
            pack(Path(half), name, value)
        (Path(half) / "record.json").write_text(script_json({**record, "key": widget.key}), encoding="utf-8")
        shutil.copytree(half, CACHE / widget.key)
    print(f"{widget.question or widget.call}: {time.monotonic() - begun:.1f} s", flush=True)


def enliven(site: Site, page: Page) -> list[Widget]:
    """Let the page show live widgets in place of their stored pictures. Returns them; they are yet to be gathered."""
    cells = site.cells(page)
    found = {number: one for number in range(len(cells)) if (one := widget(cells, number))}
    for number, one in found.items():
        page.beside[number] = partial(live, page, one)
    return list(found.values())


def live(page: Page, one: Widget, stored: str) -> str:
    record, name = (CACHE / one.key / "record.json").read_text(encoding="utf-8"), one.question or one.key
    if json.loads(record)["kind"] == "elsewhere":
        where = page.file.relative_to(ROOT).as_posix()
        how = f"<p>To answer it, run <code>python3 course.py lab</code> and open <code>{where}</code>.</p>"
        return f'<div class="out" id="{name}">{stored}{how}</div>'
    still = TIPS.sub("", stored)
    return f'<div class="live" id="{name}"><script type="application/json">{record}</script>{still}</div>'


def assets(folder: Path) -> None:
    """Write scripts and styles: those of the widgets, as they are in notebooks, and the site's own around them."""
    shutil.copy(Path(plotly.__file__).parent / "package_data" / "plotly.min.js", folder)
    script = (HERE / "site.js").read_text(encoding="utf-8")
    for part in PARTS:  # a page that is opened from a disk may load no modules
        module = (WIDGETS / f"{part}.js").read_text(encoding="utf-8")
        script += f"(() => {{\n{module.replace('export default', f'course.parts.{part} =')}\n}})();\n"
    (folder / "site.js").write_text(f"{script}course.start();\n", encoding="utf-8")
    styles = [f".live, .course-player {{ {ROOMY} }}", *(file.read_text(encoding="utf-8") for file in STYLES)]
    (folder / "site.css").write_text("\n".join(styles), encoding="utf-8")


def commit() -> str:
    command = ["git", "show", "-s", "--format=%h of %cs"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"


def build(folder: Path, names: list[str]) -> list[Page]:
    """Write the pages into a folder, the same to the byte as long as their sources are the same."""
    moving.PICTURE.write_text(moving.draw(), encoding="utf-8")
    shutil.rmtree(folder / "packs", ignore_errors=True)
    (folder / "packs").mkdir(parents=True)
    site = Site(ROOT, folder, partial(pack, folder / "packs"))
    wanted = [page for page in site.pages.values() if not names or page.name.startswith(tuple(names))]
    widgets = [one for page in wanted if page.kind in ("lesson", "scenario") for one in enliven(site, page)]
    gather_all(widgets, folder / "packs")
    for page in wanted:
        site.render(page)
    sources = [page for page in site.pages.values() if page.kind == "source"]
    for page in sources:
        site.render(page)
    home = site.pages[HERE / "index.md"]
    home.body += net.draw(set(), lambda page, place: f"{page}.html#{place}")
    write(folder, wanted, sources)
    pack(folder / "packs", "search", [[p.title, p.address, *section] for p in wanted for section in p.sections])
    assets(folder)
    return wanted


def write(folder: Path, found: list[Page], sources: list[Page]) -> None:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, loader=jinja2.FileSystemLoader(HERE))
    template = environment.get_template("page.html")
    menu = [(heading, [page for page in found if page.kind == kind]) for kind, heading in MENU.items()]
    turns = zip([None, *found], found, [*found[1:], None], strict=False)
    for before, page, after in itertools.chain(turns, ((None, source, None) for source in sources)):
        turn = [(word, one) for word, one in (("previous", before), ("next", after)) if one]
        html = template.render(page=page, menu=menu, turn=turn, course=COURSE, commit=commit())
        (folder / page.address).write_text(html, encoding="utf-8")
