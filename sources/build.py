"""Build what people open from the percent scripts that authors edit.

    sources/notebooks/NAME.py  ->  notebooks/NAME.ipynb       run, with outputs; NAME may be scenarios/S02_...
    sources/exercises/NAME.py  ->  solutions/NAME/NAME.ipynb  run, with outputs
                               ->  exercises/NAME/NAME.ipynb  what `nbgrader generate_assignment` makes of the solution

    python3 course.py build           build what is out of step with its source
    python3 course.py build NAME ...  build these
    python3 course.py build --all     build everything
    python3 course.py build --check   change nothing; exit 1 if anything is out of step

Outputs are not compared, since measured times differ from run to run; what in them is deterministic
is for nbval to compare. Never stored: an error (unless its cell is tagged `raises-exception`), a path
of the machine that built the notebook, a widget without a picture (unless its cell is tagged
`no-picture`), since neither GitHub nor a fresh clone shows widgets.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
NBGRADER = {"grade": False, "locked": False, "schema_version": 3, "solution": False, "task": False}
WIDGET = "application/vnd.jupyter.widget-view+json"
CELL_TIMEOUT = 300  # seconds
MACHINE_PATH = re.compile(
    r"(?<![\w.:/<+=-])(?:/(?:home|root|Users|tmp|private|var/folders|work|opt|mnt|usr)/|[A-Za-z]:\\)[\w.-]+"
)


class BuildError(Exception):
    """A notebook cannot be built as its source stands; the message says which cell, and what would do."""


@dataclass(frozen=True)
class Product:
    """One notebook and the script it is made of. kind: "lesson", "solution" or "exercise"."""

    kind: str
    source: Path
    target: Path


def products(root: Path) -> list[Product]:
    """Every notebook that should exist, solutions before exercises."""
    scripts = root / "sources" / "notebooks"
    lessons = sorted(path.relative_to(scripts) for path in scripts.rglob("*.py"))
    exercises = sorted(root.glob("sources/exercises/*.py"))
    return [
        *(Product("lesson", scripts / path, root / "notebooks" / path.with_suffix(".ipynb")) for path in lessons),
        *(Product("solution", path, root / "solutions" / path.stem / f"{path.stem}.ipynb") for path in exercises),
        *(Product("exercise", path, root / "exercises" / path.stem / f"{path.stem}.ipynb") for path in exercises),
    ]


def read(source: Path) -> NotebookNode:
    """The notebook of a percent script, not yet run, with cell ids that depend on nothing but the script."""
    notebook = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen: Counter[str] = Counter()
    for cell in notebook.cells:
        text = f"{source.stem}\n{cell.cell_type}\n{cell.source}"
        seen[text] += 1
        cell.id = hashlib.sha256(f"{text}\n{seen[text]}".encode()).hexdigest()[:12]
        for key in [key for key in cell.metadata if key.startswith("lines_to_")]:  # jupytext's notes to itself
            del cell.metadata[key]
        if "nbgrader" in cell.metadata:
            cell.metadata.nbgrader = nbformat.from_dict({**NBGRADER, **cell.metadata.nbgrader})
    return notebook


def release(notebook: NotebookNode) -> str:
    """The exercise of a solution, as nbgrader's generate_assignment writes it, without its database."""
    from nbconvert.exporters import NotebookExporter
    from nbgrader.converters import GenerateAssignment
    from nbgrader.coursedir import CourseDirectory
    from nbgrader.preprocessors import SaveCells
    from traitlets.config import Config

    exporter = NotebookExporter(config=Config({"Exporter": {"default_preprocessors": []}}))
    for preprocessor in GenerateAssignment(coursedir=CourseDirectory()).preprocessors:
        if preprocessor is not SaveCells:
            exporter.register_preprocessor(preprocessor, enabled=True)
    text, _ = exporter.from_notebook_node(notebook)
    return text


def run(notebook: NotebookNode, source: Path, folder: Path) -> None:
    """Run every cell in `folder` and keep what may be stored of its outputs."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal

    for is_second_try in (False, True):
        client = NotebookClient(
            notebook,
            kernel_name=METADATA["kernelspec"]["name"],
            timeout=CELL_TIMEOUT,
            resources={"metadata": {"path": str(folder)}},
            record_timing=False,
            store_widget_state=False,
            coalesce_streams=True,
        )
        try:
            client.execute()
            break
        except (CellControlSignal, RuntimeError) as error:
            # A port that is chosen for a kernel may be somebody else's by the time it starts.
            if is_second_try or "died before replying" not in str(error):
                raise BuildError(f"{source.name}: {error}") from None
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [without_widget(without_paths(output)) for output in cell.outputs]


def without_paths(value: Any) -> Any:
    """The same output with the places of this machine taken out of every text in it."""
    if isinstance(value, dict):
        return nbformat.from_dict({key: without_paths(item) for key, item in value.items()})
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    value = re.sub(re.escape(tempfile.gettempdir()) + r"[/\\]ipykernel_\d+[/\\]\d+\.py", "<cell>", value)
    for place, name in ((str(ROOT) + os.sep, ""), (sys.base_prefix, "<python>"), (str(Path.home()), "~")):
        value = value.replace(place, name)
    return value


def without_widget(output: NotebookNode) -> NotebookNode:
    """The same output without its live view, which shows nothing without a kernel, if there is a picture instead."""
    if set(output.get("data", {})) - {WIDGET, "text/plain"}:
        output.data.pop(WIDGET, None)
    return output


def flaws(notebook: NotebookNode) -> list[str]:
    """What keeps a run notebook from being stored, one sentence each."""
    found = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        tags = cell.metadata.get("tags", [])
        if cell.execution_count is None:
            found.append(f"cell {number} was not run")
        shown = " ".join(texts(cell.outputs))
        if "nbval-ignore-output" in tags and "emulated" in shown and "measured" not in shown:
            found.append(f"cell {number} is emulated, the same everywhere, and yet tagged nbval-ignore-output")
        for output in cell.outputs:
            if output.output_type == "error" and "raises-exception" not in tags:
                found.append(f"cell {number} ended in {output.ename}: {output.evalue}")
            if WIDGET in output.get("data", {}) and "no-picture" not in tags:
                found.append(
                    f"cell {number} shows a widget and stores no picture: give it text/html or image/png "
                    "in _repr_mimebundle_, or tag the cell no-picture"
                )
            paths = filter(None, map(MACHINE_PATH.search, texts(output)))
            found += [f"cell {number} shows a path of this machine: {path[0]}" for path in paths]
    return found


def texts(value: Any) -> Iterator[str]:
    """Every text in an output, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts(item)


def text_of(notebook: NotebookNode) -> str:
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def without_outputs(notebook: NotebookNode) -> str:
    bare = nbformat.from_dict(notebook)
    for cell in bare.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return text_of(bare)


def out_of_step(product: Product) -> list[str]:
    """Why this notebook must be built again, one sentence each; empty if it is as its source says."""
    if not product.target.exists():
        return ["it does not exist"]
    stored = product.target.read_text(encoding="utf-8")
    wanted = read(product.source)
    if product.kind == "exercise":
        return [] if stored == release(wanted) else ["it differs from its source"]
    notebook = nbformat.reads(stored, as_version=4)
    differs = without_outputs(notebook) != without_outputs(wanted)
    return [*(["it differs from its source"] if differs else []), *flaws(notebook)]


def strays(root: Path) -> list[Path]:
    """Notebooks that no source makes."""
    found = {path for folder in ("notebooks", "exercises", "solutions") for path in (root / folder).rglob("*.ipynb")}
    known = {product.target for product in products(root)}
    return sorted(path for path in found - known if ".ipynb_checkpoints" not in path.parts)


def build(product: Product) -> None:
    """Make this notebook. Raises BuildError, and leaves the old one, if it may not be stored."""
    notebook = read(product.source)
    product.target.parent.mkdir(parents=True, exist_ok=True)
    if product.kind == "exercise":
        text = release(notebook)
    else:
        run(notebook, product.source, product.target.parent)
        if found := flaws(notebook):
            raise BuildError(f"{product.source.name}: {'; '.join(found)}")
        text = text_of(notebook)
    half = product.target.with_suffix(".half")
    half.write_text(text, encoding="utf-8", newline="\n")
    half.replace(product.target)


def check(root: Path) -> int:
    reasons = [(product.target, reason) for product in products(root) for reason in out_of_step(product)]
    reasons += [(path, "nothing in sources/ makes it") for path in strays(root)]
    for path, reason in reasons:
        print(f"{path.relative_to(root)}: {reason}")
    print("Run `python3 course.py build`." if reasons else "Every notebook is in step with its source.")
    return 1 if reasons else 0


def build_all(root: Path, names: list[str], everything: bool) -> int:
    """Build what is asked for, or what is out of step. Returns 1 if anything could not be built."""
    known = products(root)
    if unknown := set(names) - {product.source.stem for product in known}:
        print(f"Nothing in sources/ is called {sorted(unknown)[0]!r}.")
        return 1
    wanted = [p for p in known if p.source.stem in names] if names else known
    failed = 0
    for product in wanted:
        if names or everything or out_of_step(product):
            try:
                build(product)
                print(f"built {product.target.relative_to(root)}", flush=True)
            except BuildError as error:
                failed = 1
                print(f"NOT built {product.target.relative_to(root)}: {error}", flush=True)
    return failed


def main(words: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(words)
    return check(root) if arguments.check else build_all(root, arguments.names, arguments.all)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
