"""The way from a percent script to a notebook, with scripts written for the test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest

from course_lib.classroom.questions import fields
from lessons import build

ROOT = Path(__file__).parents[2]

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
    (tmp_path / "lessons" / "L01_hello").mkdir(parents=True)
    return tmp_path


def lesson(project: Path, text: str) -> Path:
    (project / "lessons" / "L01_hello" / "lesson.py").write_text(text, encoding="utf-8")
    return project / "notebooks" / "01_hello.ipynb"


def cell(code: str, *outputs: dict[str, Any], tags: tuple[str, ...] = (), count: int | None = 1) -> Any:
    made = nbformat.v4.new_code_cell(code, execution_count=count, metadata={"tags": list(tags)})
    made.outputs = [nbformat.v4.new_output(**output) for output in outputs]
    return nbformat.v4.new_notebook(cells=[made])


def test_a_lesson_is_run_and_then_in_step(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = lesson(project, LESSON)
    assert build.main(["--check"], project) == 1
    assert "notebooks/01_hello.ipynb: it does not exist" in capsys.readouterr().out.replace("\\", "/")
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
    (project / "lessons" / "L01_hello" / "exercise.py").write_text(EXERCISE, encoding="utf-8")
    assert build.main([], project) == 0
    solution = (project / "solutions" / "01_hello" / "01_hello.ipynb").read_text(encoding="utf-8")
    exercise = (project / "exercises" / "01_hello" / "01_hello.ipynb").read_text(encoding="utf-8")
    assert "return 2 * x" in solution and "raise NotImplementedError" not in solution
    assert "raise NotImplementedError()" in exercise
    assert "return 2 * x" not in exercise and "double(3)" not in exercise
    for notebook in (nbformat.reads(text, as_version=4) for text in (solution, exercise)):
        nbformat.validate(notebook)
        assert notebook.metadata == build.METADATA  # it opens with the kernel that every installation has
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
    assert "stray.ipynb: nothing in lessons/ makes it" in capsys.readouterr().out


def test_an_unknown_name_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["nonsense"], project) == 1
    assert "Nothing in lessons/ makes 'nonsense'; choose from" in capsys.readouterr().out


def test_ids_depend_on_the_script_alone_and_survive_an_insertion(project: Path) -> None:
    target = lesson(project, LESSON)
    source = project / "lessons" / "L01_hello" / "lesson.py"
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
        f'File "{build.ROOT}/course_lib/ranks/parent/pool.py", line 3',
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
    text = "https://example.org/home/ann/x, <root>/x, 3/4, bytes/s, course_lib/ranks/parent/pool.py, </tmp>"
    assert build.flaws(cell("f()", {"output_type": "stream", "text": text})) == []


@pytest.mark.parametrize("folder", ["notebooks", "notebooks/scenarios", "exercises/*", "solutions/*"])
def test_no_stored_notebook_has_a_megabyte(folder: str) -> None:
    stored = list(Path(__file__).parents[2].glob(f"{folder}/*.ipynb"))
    assert stored
    assert [path.name for path in stored if path.stat().st_size >= 1e6] == []


NEW = {
    "L10_greetings/lesson.py": """\
# %% [markdown]
# # Lesson 10: greetings

# %%
from lessons import Card

print(Card("hello").question.text)
""",
    "L10_greetings/questions.md": "# hello: A greeting\n\nWhat do {ranks} ranks say?\n\n## why\nEach says it once.\n",
    "L10_greetings/questions.py": """\
from course_lib import launch
from course_lib.classroom.questions.asking import number
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Seeded
from course_lib.classroom.questions.units import BYTES


def say(ranks):
    return Outcome(None, measured=len(launch(str, ranks).results))


QUESTIONS = {"hello": Seeded(4, number(BYTES, say), fields=lambda ranks: {"ranks": ranks})}
""",
}


def test_a_new_lesson_is_a_new_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "lessons" / "__init__.py", project / "lessons")
    for name, text in NEW.items():
        (project / "lessons" / name).parent.mkdir(exist_ok=True)
        (project / "lessons" / name).write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(project))
    assert build.main(["10_greetings"], project) == 0
    assert "What do 4 ranks say?" in (project / "notebooks" / "10_greetings.ipynb").read_text(encoding="utf-8")


FIELDS = """\
# %%
samples = {"each": 7}

# %% tags=["build-only"]
total = 4 * samples["each"]

# %% [markdown]
# Four ranks have {{total}} samples, {{samples["each"] / total:percent}} each, \
{{total > 20:more than|at most}} {{20:,.1f}}, in {{len("abcd")
# :in_words}} letters, $x_{1}$.

# %%
samples

# %% [markdown]
# {{not total:No|Yes}}.
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("built")
    (project / "lessons" / "L01_hello").mkdir(parents=True)
    lesson(project, FIELDS)
    assert build.main([], project) == 0
    return project


@pytest.fixture
def filled(built: Path, project: Path) -> Path:
    """A lesson's notebook, in a separate project."""
    shutil.copytree(built, project, dirs_exist_ok=True)
    return project / "notebooks" / "01_hello.ipynb"


def test_a_field_is_filled_from_the_run_and_what_only_it_needs_is_not_on_the_page(filled: Path, project: Path) -> None:
    first, text, last, _ = nbformat.read(filled, as_version=4).cells
    assert text.source == "Four ranks have 28 samples, 25% each, more than 20.0, in four letters, $x_{1}$."
    assert (first.execution_count, last.execution_count, last.outputs[0].execution_count) == (1, 2, 2)


def test_what_is_around_a_field_is_compared_with_the_source_without_a_run(filled: Path, project: Path) -> None:
    page = filled.read_text(encoding="utf-8")
    filled.write_text(page.replace("28 samples", "27 samples"), encoding="utf-8")
    assert build.main(["--check"], project) == 0
    filled.write_text(page.replace("28 samples", "28 examples"), encoding="utf-8")
    assert build.main(["--check"], project) == 1
    filled.write_text(page, encoding="utf-8")
    lesson(project, FIELDS.replace("{{total}}", "{{total + 1}}"))
    assert build.main(["--check"], project) == 1


def test_a_number_that_the_run_does_not_give_fails_its_cell_and_no_other(filled: Path) -> None:
    filled.write_text(filled.read_text(encoding="utf-8").replace("28 samples", "27 samples"), encoding="utf-8")
    nbval = ("--nbval", "--nbval-current-env", "-p", "tests.notebooks.filled", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *nbval, "--rootdir", str(filled.parents[1]), str(filled)]
    environment = {**os.environ, "PYTHONPATH": str(build.ROOT)}
    said = subprocess.run(command, capture_output=True, text=True, cwd=build.ROOT, env=environment).stdout
    assert "1 failed, 1 passed" in said
    assert "Four ranks have 27 samples" in said and "Four ranks have 28 samples" in said
    assert "Run `python3 course.py build 01_hello`." in said


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("{{total}}", "{{totals}}", "L01_hello/lesson.py: {{totals}}: NameError"),
        ("total = 4", "total = four", "L01_hello/lesson.py: NameError in the cell\ntotal = four"),
    ],
)
def test_what_fails_behind_the_page_is_named(
    project: Path, right: str, wrong: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = lesson(project, FIELDS.replace(right, wrong))
    assert build.main([], project) == 1 and not target.exists()
    assert complaint in capsys.readouterr().out


@pytest.mark.parametrize("field", ["{{4 *}}", "{{2 + 2:in stones}}"])
def test_a_field_that_has_no_value_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=re.escape(field)):
        fields.fill(f"It takes {field} of {{{{1}}}}.", {})


@pytest.mark.parametrize("product", build.products(ROOT), ids=lambda one: one.target.stem)
def test_a_fold_ends_in_its_cell_and_prose_has_no_endless_numbers(product: Any) -> None:
    """What a slip while wrapping leaves open swallows the rest of its cell; a ratio of peaks is 2.0001010713563776."""
    cells = nbformat.read(product.target, as_version=4).cells
    prose = [cell.source for cell in cells if cell.cell_type == "markdown"]
    assert [text for text in prose if text.count("<details>") != text.count("</details>")] == []
    assert [text for text in prose if re.search(r"\d\.\d{7}", text)] == []
