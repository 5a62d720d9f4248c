"""Build the notebooks that people open from the percent scripts that authors edit.

    L05_pipeline_parallelism/lesson.py    ->  notebooks/05_....ipynb             run, with outputs
    L05_pipeline_parallelism/exercise.py  ->  solutions/05_.../05_....ipynb      run, with outputs
                                          ->  exercises/05_.../05_....ipynb      made from the solution by nbgrader
    S02_night_call/page.py                ->  notebooks/scenarios/S02_....ipynb  run, with outputs

    python3 course.py build           build what is out of step with its source
    python3 course.py build NAME ...  build these
    python3 course.py build --all     build everything
    python3 course.py build --check   change nothing; exit 1 if anything is out of step

A number in a lesson's prose comes from its run, in a field, {{expression}} or {{expression:how}}:

    # %% [markdown]
    # The devices are idle for {{run.idle_fraction():percent}} of the time.

The expression sees what the notebook's kernel has at this place of the page, and `how` is as on question pages (see
course_lib/classroom/questions/fields.py). Its value must be the same in every run, so it is never a measured time.
Code for fields only goes into a cell tagged `build-only`, which is run in its place and is not in the notebook:

    # %% tags=["build-only"]
    slowest = max(runs.values(), key=lambda run: run.makespan)

`--check` compares only the text around fields; nbval compares their values (tests/notebooks/filled.py).

Outputs are not compared, since measured times differ from run to run; nbval compares the deterministic
ones. Never stored: an error (unless its cell is tagged `raises-exception`), a path
of the machine that built the notebook, a widget without a picture (unless its cell is tagged
`no-picture`), since neither GitHub nor a fresh clone shows widgets.
"""

from __future__ import annotations

import argparse
import ast
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

from course_lib.classroom.questions import fields

ROOT = Path(__file__).resolve().parents[1]
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
PAGES = [  # (kind of notebook, its script in a room, its folder)
    ("lesson", "lesson", "notebooks"),
    ("lesson", "page", "notebooks/scenarios"),
    ("solution", "exercise", "solutions/{name}"),
    ("exercise", "exercise", "exercises/{name}"),
]
NBGRADER = {"grade": False, "locked": False, "schema_version": 3, "solution": False, "task": False}
WIDGET = "application/vnd.jupyter.widget-view+json"
BUILD_ONLY = "build-only"
CELL_TIMEOUT = 300  # seconds
MACHINE_PATH = re.compile(
    r"(?<![\w.:/<+=-])(?:/(?:home|root|Users|tmp|private|var/folders|work|opt|mnt|usr)/|[A-Za-z]:\\)[\w.-]+"
)


class BuildError(Exception):
    """An error: a notebook cannot be built from its source; the message names the cell and the remedy."""


@dataclass(frozen=True)
class BuiltNotebook:
    """A notebook and its script. kind: "lesson", "solution" or "exercise"."""

    kind: str
    source: Path
    target: Path

    @property
    def name(self) -> str:
        return self.target.stem


def products(root: Path) -> list[BuiltNotebook]:
    """All notebooks that should exist, solutions before exercises."""
    found = []
    for kind, script, folder in PAGES:
        for source in sorted(root.glob(f"lessons/*/{script}.py")):
            name = source.parent.name.removeprefix("L")
            found.append(BuiltNotebook(kind, source, root / folder.format(name=name) / f"{name}.ipynb"))
    return found


def read(source: Path) -> NotebookNode:
    """The notebook of a percent script, not yet run, with cell ids that depend on nothing but the script."""
    notebook = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen: Counter[str] = Counter()
    for cell in notebook.cells:
        text = f"{source.parent.name}/{source.stem}\n{cell.cell_type}\n{cell.source}"
        seen[text] += 1
        cell.id = hashlib.sha256(f"{text}\n{seen[text]}".encode()).hexdigest()[:12]
        for key in [key for key in cell.metadata if key.startswith("lines_to_")]:  # jupytext's own notes
            del cell.metadata[key]
        if cell.metadata.get("jupyter", {}).get("outputs_hidden"):
            cell.metadata.collapsed = True  # as JupyterLab would add when it saves
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
    """Run every cell in `folder`, fill the fields, and drop cells and outputs that must not be stored."""
    from nbclient.exceptions import CellControlSignal

    for is_second_try in (False, True):
        try:
            execute(notebook, folder)
            break
        except (CellControlSignal, RuntimeError, FieldError) as error:
            # Another process may have taken the port chosen for a kernel before it starts.
            if is_second_try or "died before replying" not in str(error):
                raise BuildError(f"{source.parent.name}/{source.name}: {error}") from None
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.cells = [cell for cell in notebook.cells if not is_build_only(cell)]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [without_widget(without_paths(output)) for output in cell.outputs]


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run the cells and fill the fields with a kernel in `folder`."""
    from nbclient import NotebookClient

    async def behind_the_page(cell: NotebookNode, cell_index: int) -> None:
        if request := unseen(cell):
            reply = await client.async_wait_for_reply(client.kc.execute(**request))
            cell.source = told(cell, reply)

    client: Any = NotebookClient(
        notebook,
        kernel_name=METADATA["kernelspec"]["name"],
        timeout=CELL_TIMEOUT,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        skip_cells_with_tag=BUILD_ONLY,
        on_cell_start=behind_the_page,
    )
    client.execute()


class FieldError(Exception):
    """An error: a field, or a cell for fields, has failed in the kernel."""


def is_build_only(cell: NotebookNode) -> bool:
    return BUILD_ONLY in cell.metadata.get("tags", [])


def has_fields(cell: NotebookNode) -> bool:
    return cell.cell_type == "markdown" and bool(fields.FIELD.search(cell.source))


def unseen(cell: NotebookNode) -> dict[str, Any]:
    """The request to the kernel at this cell that leaves no trace on the page; empty for most cells."""
    if is_build_only(cell):
        return {"code": cell.source, "silent": True}
    if has_fields(cell):
        call = f"__import__('importlib').import_module({fields.__name__!r}).fill({cell.source!r}, globals())"
        return {"code": "", "silent": True, "user_expressions": {"text": call}}
    return {}


def told(cell: NotebookNode, reply: Any) -> str:
    """The cell's source, with fields filled from a kernel's reply to the request. Raises FieldError."""
    if reply is None:
        raise FieldError(f"no answer in {CELL_TIMEOUT} s: {cell.source}")
    answer = reply["content"].get("user_expressions", {}).get("text", reply["content"])
    if answer["status"] == "error":
        raise FieldError(answer["evalue"] if has_fields(cell) else f"{answer['ename']} in the cell\n{cell.source}")
    return str(ast.literal_eval(answer["data"]["text/plain"])) if has_fields(cell) else str(cell.source)


def without_paths(value: Any) -> Any:
    """An output without this machine's paths in any of its texts."""
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
    """An output without its live view, which shows nothing without a kernel, if there is a picture instead."""
    if set(output.get("data", {})) - {WIDGET, "text/plain"}:
        output.data.pop(WIDGET, None)
    return output


def flaws(notebook: NotebookNode) -> list[str]:
    """Reasons why a run notebook may not be stored, one sentence each."""
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
    """All texts in an output, at any depth."""
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


def out_of_step(product: BuiltNotebook) -> list[str]:
    """Reasons why this notebook must be built again, one sentence each; empty if it is in step with its source."""
    if not product.target.exists():
        return ["it does not exist"]
    stored = product.target.read_text(encoding="utf-8")
    wanted = read(product.source)
    if product.kind == "exercise":
        return [] if stored == release(wanted) else ["it differs from its source"]
    notebook = nbformat.reads(stored, as_version=4)
    differs = without_outputs(notebook) != without_outputs(filled_as(notebook, wanted))
    return [*(["it differs from its source"] if differs else []), *flaws(notebook)]


def filled_as(stored: NotebookNode, wanted: NotebookNode) -> NotebookNode:
    """The page of a script, its fields filled with the text at their places in the stored notebook."""
    texts = {cell.id: cell.source for cell in stored.cells}
    page = nbformat.from_dict(wanted)
    page.cells = [cell for cell in page.cells if not is_build_only(cell)]
    for cell in filter(has_fields, page.cells):
        text = texts.get(cell.id, "")
        cell.source = text if fields.pattern(cell.source).fullmatch(text) else cell.source
    return page


def strays(root: Path) -> list[Path]:
    """Notebooks without a source."""
    found = {path for folder in ("notebooks", "exercises", "solutions") for path in (root / folder).rglob("*.ipynb")}
    known = {product.target for product in products(root)}
    return sorted(path for path in found - known if ".ipynb_checkpoints" not in path.parts)


def build(product: BuiltNotebook) -> None:
    """Build this notebook. Raises BuildError, and keeps the old one, if it may not be stored."""
    notebook = read(product.source)
    product.target.parent.mkdir(parents=True, exist_ok=True)
    if product.kind == "exercise":
        text = release(notebook)
    else:
        run(notebook, product.source, product.target.parent)
        if found := flaws(notebook):
            raise BuildError(f"{product.name}: {'; '.join(found)}")
        text = text_of(notebook)
    half = product.target.with_suffix(".half")
    half.write_text(text, encoding="utf-8", newline="\n")
    half.replace(product.target)


def check(root: Path) -> int:
    reasons = [(product.target, reason) for product in products(root) for reason in out_of_step(product)]
    reasons += [(path, "nothing in lessons/ makes it") for path in strays(root)]
    for path, reason in reasons:
        print(f"{path.relative_to(root)}: {reason}")
    print("Run `python3 course.py build`." if reasons else "Every notebook is in step with its source.")
    return 1 if reasons else 0


def build_all(root: Path, names: list[str], everything: bool) -> int:
    """Build the named notebooks, or those that are out of step. Returns 1 if any could not be built."""
    known = products(root)
    if unknown := set(names) - {product.name for product in known}:
        makes = ", ".join(dict.fromkeys(product.name for product in known))
        print(f"Nothing in lessons/ makes {min(unknown)!r}; choose from {makes}.")
        return 1
    wanted = [product for product in known if product.name in names] if names else known
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
