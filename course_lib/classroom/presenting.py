"""Lessons prepared for a projector, for `course.py present`. (Standard library only.)"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

AFTER_A_RUN = '<i class="course-after-a-run"></i>'


def stage(root: Path, settings: Path, folder: Path, shown: Path) -> list[str]:
    """Put a copy of the course in a folder, ready to be projected. Returns options for JupyterLab, to show one page.

    root: the course's folder.  settings: its settings of JupyterLab.
    """
    for name in ("notebooks", "exercises"):
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns(".*"))
    for file in (folder / "notebooks").rglob("*.ipynb"):
        page = json.loads(file.read_text(encoding="utf-8"))
        pairs = zip(page["cells"], [None, *page["cells"]], strict=False)
        page["cells"] = [part for pair in pairs for part in projected(*pair)]
        file.write_text(json.dumps(page), encoding="utf-8")
    shutil.copytree(settings / "present", folder / "lab")
    shutil.copy(settings / "overrides.json", folder / "lab")
    (folder / "custom").mkdir()  # the server shows everything in it to everybody
    shutil.copy(settings / "custom" / "custom.css", folder / "custom" / "lab.css")
    shutil.move(folder / "lab" / "custom.css", folder / "custom")
    return [
        f"--ServerApp.root_dir={folder}",
        f"--LabApp.default_url=/doc/tree/{shown.relative_to(root).as_posix()}",
        f"--LabApp.app_settings_dir={folder / 'lab'}",
        f"--LabApp.user_settings_dir={folder / 'lab'}",
        f"--LabApp.workspaces_dir={folder / 'lab'}",
        "--LabApp.custom_css=True",
        f"--ServerApp.tornado_settings=static_custom_path={folder / 'custom'}",
    ]


def projected(cell: dict[str, Any], above: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A cell prepared for a projector: code without its results, and each heading in a cell of its own, folded.

    Text right below code with results is about them; it is marked, and seen once the code has run (custom.css).
    """
    if cell["cell_type"] == "code":
        folds = {**cell["metadata"].get("jupyter", {}), "outputs_hidden": False}  # results come when it is run
        metadata = {**cell["metadata"], "collapsed": False, "jupyter": folds}
        return [{**cell, "metadata": metadata, "outputs": [], "execution_count": None}]
    parts = []
    for number, text in enumerate(re.split(r"^(##+ .*)$", "".join(cell["source"]), flags=re.MULTILINE)):
        if number == 0 and text.strip() and above and above.get("outputs"):
            text += f"\n\n{AFTER_A_RUN}"
        folded = {"jp-MarkdownHeadingCollapsed": text.startswith("##")}
        part = {"id": f"{cell['id']}-{number}", "source": text.strip(), "metadata": {**cell["metadata"], **folded}}
        parts.append({**cell, **part})
    return [part for part in parts if part["source"]]
