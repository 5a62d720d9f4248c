"""The way from a percent script to a notebook, on scripts made up here."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest

from sources import build

LESSON = """\
# %% [markdown]
# # A lesson

# %%
print("hello")

# %%
# %%capture caught
print("not shown")

# %%
print("hello")
"""

EXERCISE = '''\
# %% nbgrader={"grade_id": "double", "solution": true}
def double(x):
    """Twice x."""
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_double", "grade": true, "locked": true, "points": 2}
assert double(2) == 4
### BEGIN HIDDEN TESTS
assert double(3) == 6
### END HIDDEN TESTS
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for folder in ("notebooks", "exercises"):
        (tmp_path / "sources" / folder).mkdir(parents=True)
    return tmp_path


def lesson(project: Path, text: str) -> Path:
    (project / "sources" / "notebooks" / "lesson.py").write_text(text, encoding="utf-8")
    return project / "notebooks" / "lesson.ipynb"


def cell(code: str, *outputs: dict[str, Any], tags: tuple[str, ...] = (), count: int | None = 1) -> Any:
    made = nbformat.v4.new_code_cell(code, execution_count=count, metadata={"tags": list(tags)})
    made.outputs = [nbformat.v4.new_output(**output) for output in outputs]
    return nbformat.v4.new_notebook(cells=[made])


def test_a_lesson_is_run_and_then_in_step(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = lesson(project, LESSON)
    assert build.main(["--check"], project) == 1
    assert "notebooks/lesson.ipynb: it does not exist" in capsys.readouterr().out.replace("\\", "/")
    assert build.main([], project) == 0
    cells = nbformat.read(target, as_version=4).cells
    assert cells[1].outputs[0].text == "hello\n"
    assert cells[2].source.startswith("%%capture caught") and cells[2].outputs == []
    assert build.main(["--check"], project) == 0


def test_a_flaw_in_what_is_stored_is_found(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = lesson(project, LESSON)
    build.main([], project)
    notebook = nbformat.read(target, as_version=4)
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="see /home/ann/x.py")]
    nbformat.write(notebook, target)
    assert build.main(["--check"], project) == 1
    assert "cell 1 shows a path of this machine: /home/ann" in capsys.readouterr().out


def test_only_what_changed_is_built(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lesson(project, LESSON)
    build.main([], project)
    capsys.readouterr()
    build.main([], project)
    assert capsys.readouterr().out == ""
    lesson(project, LESSON.replace("# A lesson", "# Another lesson"))
    assert build.main(["--check"], project) == 1
    assert "it differs from its source" in capsys.readouterr().out


def test_an_exercise_loses_its_solution_and_hidden_tests(project: Path) -> None:
    (project / "sources" / "exercises" / "twice.py").write_text(EXERCISE, encoding="utf-8")
    assert build.main([], project) == 0
    solution = (project / "solutions" / "twice" / "twice.ipynb").read_text(encoding="utf-8")
    exercise = (project / "exercises" / "twice" / "twice.ipynb").read_text(encoding="utf-8")
    assert "return 2 * x" in solution and "raise NotImplementedError" not in solution
    assert "raise NotImplementedError()" in exercise
    assert "return 2 * x" not in exercise and "double(3)" not in exercise
    for notebook in (nbformat.reads(text, as_version=4) for text in (solution, exercise)):
        nbformat.validate(notebook)
        assert notebook.metadata == build.METADATA  # it opens with the kernel that everybody has
    assert build.main(["--check"], project) == 0


def test_a_cell_that_fails_is_not_stored(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = lesson(project, "# %%\n1 / 0\n")
    assert build.main([], project) == 1
    assert not target.exists()
    said = capsys.readouterr().out
    assert "NOT built" in said and "ZeroDivisionError" in said


def test_a_failure_on_purpose_is_stored(project: Path) -> None:
    target = lesson(project, '# %% tags=["raises-exception"]\n1 / 0\n')
    assert build.main([], project) == 0
    assert nbformat.read(target, as_version=4).cells[0].outputs[0].ename == "ZeroDivisionError"


def test_a_notebook_without_a_source_is_found(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "notebooks").mkdir()
    (project / "notebooks" / "stray.ipynb").touch()
    assert build.main(["--check"], project) == 1
    assert "stray.ipynb: nothing in sources/ makes it" in capsys.readouterr().out


def test_an_unknown_name_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["nonsense"], project) == 1
    assert "Nothing in sources/ is called 'nonsense'" in capsys.readouterr().out


def test_ids_depend_on_the_script_alone_and_survive_an_insertion(project: Path) -> None:
    target = lesson(project, LESSON)
    source = project / "sources" / "notebooks" / "lesson.py"
    first, again = build.read(source), build.read(source)
    ids = [cell.id for cell in first.cells]
    assert ids == [cell.id for cell in again.cells] and len(set(ids)) == len(ids)
    lesson(project, LESSON.replace("# %%\nprint", "# %%\nx = 1\n\n# %%\nprint", 1))
    assert [cell.id for cell in build.read(source).cells if cell.source != "x = 1"] == ids
    assert not target.exists()


def test_flaws_are_named() -> None:
    error = {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []}
    assert build.flaws(cell("raise ValueError", error)) == ["cell 0 ended in ValueError: no"]
    assert build.flaws(cell("raise ValueError", error, tags=("raises-exception",))) == []
    assert build.flaws(cell("1", count=None)) == ["cell 0 was not run"]


@pytest.mark.parametrize(("text", "flaws"), [("emulated: 3 ms", 1), ("emulated beside measured", 0), ("3 ms", 0)])
def test_what_an_emulated_clock_says_is_left_to_nbval_to_compare(text: str, flaws: int) -> None:
    shown = {"output_type": "stream", "text": text}
    assert len(build.flaws(cell("look()", shown, tags=("nbval-ignore-output",)))) == flaws
    assert build.flaws(cell("look()", shown)) == []


def test_a_widget_needs_a_picture_to_be_stored() -> None:
    view = {build.WIDGET: {"model_id": "1"}, "text/plain": "IntSlider()"}
    bare = {"output_type": "display_data", "data": view}
    pictured = {"output_type": "display_data", "data": {**view, "text/html": "<img>"}}
    assert "stores no picture" in build.flaws(cell("slider", bare))[0]
    assert build.flaws(cell("slider", bare, tags=("no-picture",))) == []
    kept = build.without_widget(nbformat.v4.new_output(**pictured))
    assert set(kept.data) == {"text/plain", "text/html"}


@pytest.mark.parametrize(
    "text",
    [
        f'File "{build.ROOT}/course_lib/ranks/pool.py", line 3',
        f'File "{Path.home()}/elsewhere/x.py", line 3',
        f'File "{tempfile.gettempdir()}/ipykernel_123/456.py", line 3',
    ],
)
def test_paths_of_this_machine_are_taken_out(text: str) -> None:
    output = nbformat.v4.new_output("stream", text=text)
    cleaned = build.without_paths(output)
    assert build.flaws(cell("f()", cleaned)) == []
    assert "line 3" in cleaned.text


@pytest.mark.parametrize("path", ["/home/ann/course/x.py", "/tmp/x/trace.json", r"C:\Users\ann\x.py"])
def test_a_path_that_is_left_over_is_a_flaw(path: str) -> None:
    stream = {"output_type": "stream", "text": f"see\n{path}\n"}
    assert "a path of this machine" in build.flaws(cell("f()", stream))[0]


def test_web_addresses_and_fractions_are_no_paths() -> None:
    text = "https://example.org/home/ann/x, <root>/x, 3/4, bytes/s, course_lib/ranks/pool.py, </tmp>"
    assert build.flaws(cell("f()", {"output_type": "stream", "text": text})) == []


@pytest.mark.parametrize("folder", ["notebooks", "notebooks/scenarios", "exercises/*", "solutions/*"])
def test_no_stored_notebook_has_a_megabyte(folder: str) -> None:
    stored = list(Path(__file__).parents[2].glob(f"{folder}/*.ipynb"))
    assert stored
    assert [path.name for path in stored if path.stat().st_size >= 1e6] == []
