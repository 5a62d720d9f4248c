"""Build the site: a folder of pages that opens from a web server and from a disk, and asks nothing of the network."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import jinja2
import plotly

from course_lib.figures.svg import ROOMY
from lessons.site import net, packs
from lessons.site.pages import Page, Site
from lessons.site.widgets import ROOT

HERE = Path(__file__).parent
WIDGETS = ROOT / "course_lib" / "classroom" / "widgets"
PARTS = ("slider", "options", "order", "sentences", "player")
STYLES = (*(WIDGETS / f"{name}.css" for name in ("player", "running", "controls")), HERE / "net.css", HERE / "site.css")
LAB = ROOT / "lessons" / "jupyterlab" / "custom" / "custom.css"  # gives charts the page's colors


def build(folder: Path, shown: list[Page]) -> None:
    """Write pages, the first one with the map, into a folder: the same to the byte while their sources are the same."""
    site = Site(folder)
    packs.gather_all([one for page in shown for one in page.widgets.values()])
    for page in shown:
        site.render(page)
    home, *_ = shown
    home.body += net.draw(set(), lambda page, place: f"{page}.html#{place}")
    packs.write(folder / "packs", "search", [[p.title, p.address, *section] for p in shown for section in p.sections])
    write(folder, shown)
    assets(folder)


def write(folder: Path, shown: list[Page]) -> None:
    template = jinja2.Template((HERE / "page.html").read_text(encoding="utf-8"), autoescape=True, trim_blocks=True)
    command = ["git", "show", "-s", "--format=%h of %cs"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
    for place, page in enumerate(shown):
        html = template.render(page=page, pages=shown, place=place, commit=commit)
        (folder / page.address).write_text(html, encoding="utf-8")


def assets(folder: Path) -> None:
    """Write scripts and styles: those of the widgets, as they are in notebooks, and the site's own around them."""
    shutil.copy(Path(plotly.__file__).parent / "package_data" / "plotly.min.js", folder)
    script = (HERE / "site.js").read_text(encoding="utf-8")
    for part in PARTS:  # a page that is opened from a disk may load no modules
        module = (WIDGETS / f"{part}.js").read_text(encoding="utf-8")
        script += f"(() => {{\n{module.replace('export default', f'course.parts.{part} =')}\n}})();\n"
    (folder / "site.js").write_text(f"{script}course.start();\n", encoding="utf-8")
    styles = [f".live, .course-player {{ {ROOMY} }}", *(file.read_text(encoding="utf-8") for file in (*STYLES, LAB))]
    (folder / "site.css").write_text("\n".join(styles), encoding="utf-8")
