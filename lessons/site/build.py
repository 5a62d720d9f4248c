"""Build the site: a folder of pages that opens from a web server and from a disk, and asks nothing of the network.

python lessons/site/build.py FOLDER [NAME ...]    all pages, or those whose names begin so, and what they lead to
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import plotly

from lessons.site.pages import Page, Site

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COURSE = "Training large models on many workers"
WIDGETS = ROOT / "course_lib" / "classroom" / "widgets"
PARTS = ("slider", "switch", "options", "order", "sentences", "player")
STYLES = (*(WIDGETS / f"{name}.css" for name in ("player", "running", "controls")), HERE / "site.css")
MENU = {"lesson": "Lessons", "exercise": "Exercises", "scenario": "Scenarios", "more": "More"}


def pack(folder: Path, name: str, value: Any) -> None:
    """Write a value as a script, compressed: a page that is opened from a disk may load scripts, and nothing else."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    data = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    (folder / "packs").mkdir(exist_ok=True)
    (folder / "packs" / f"{name}.js").write_text(f'course.unpack("{name}","{data}")\n', encoding="utf-8")


def assets(folder: Path) -> None:
    """Write scripts and styles: those of the widgets, as they are in notebooks, and the site's own around them."""
    shutil.copy(Path(plotly.__file__).parent / "package_data" / "plotly.min.js", folder)
    script = (HERE / "site.js").read_text(encoding="utf-8")
    for part in PARTS:  # a page that is opened from a disk may load no modules
        module = (WIDGETS / f"{part}.js").read_text(encoding="utf-8")
        script += f"(() => {{\n{module.replace('export default', f'course.parts.{part} =')}\n}})();\n"
    (folder / "site.js").write_text(f"{script}course.start();\n", encoding="utf-8")
    (folder / "site.css").write_text("\n".join(file.read_text(encoding="utf-8") for file in STYLES), encoding="utf-8")


def commit() -> str:
    command = ["git", "show", "-s", "--format=%h of %cs"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"


def build(folder: Path, names: list[str]) -> list[Page]:
    """Write the pages into a folder, the same to the byte as long as their sources are the same."""
    folder.mkdir(parents=True, exist_ok=True)
    site = Site(ROOT, folder, lambda name, value: pack(folder, name, value))
    wanted = [page for page in site.pages.values() if not names or page.name.startswith(tuple(names))]
    for page in wanted:
        site.render(page)
    sources = [page for page in site.pages.values() if page.kind == "source"]
    for page in sources:
        site.render(page)
    write(folder, wanted, sources)
    pack(folder, "search", [[p.title, p.address, *section] for p in wanted for section in p.sections])
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


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2:])
