"""The file of answers: no note is ever lost, and nobody else can read it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from course_lib.classroom import journal
from course_lib.classroom.journal import Note, latest, notes, record
from course_lib.classroom.progress import is_done, table
from tests.lessons.asked import ASKED

ROOT = Path(__file__).parents[3]
EXERCISES = ROOT / "exercises"
WRITER = """
import sys
from course_lib.classroom.journal import record
for number in range(int(sys.argv[2])):
    record("committed", sys.argv[1], number, "x" * 1000)
"""


def writer(name: str, count: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITER, name, str(count)], cwd=ROOT)


def lines(state: Path) -> list[bytes]:
    return (state / journal.FILE).read_bytes().strip().splitlines()


def test_what_is_recorded_is_there_again(state: Path) -> None:
    record("committed", "Q4", 0, "a")
    record("ran", "Q4", 0, "a", False)
    record("committed", "Q2", 7, ["split", "forward"])
    assert [note[1:] for note in notes()] == [
        ("committed", "Q4", 0, "a", None),
        ("ran", "Q4", 0, "a", False),
        ("committed", "Q2", 7, ["split", "forward"], None),
    ]
    assert latest("Q4", 0) == notes()[1]
    assert latest("Q4", 7) is None


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other rights")
def test_the_answers_are_their_owners_alone_also_those_that_were_not(state: Path) -> None:
    file = state / journal.FILE
    for _ in range(2):
        record("committed", "Q4", 0, "a")
        assert file.stat().st_mode & 0o077 == 0
        file.chmod(0o644)


def test_two_notebooks_that_write_at_once_lose_nothing(state: Path) -> None:
    writers = [writer("Q1", 150), writer("Q2", 150)]
    assert [process.wait(60) for process in writers] == [0, 0]
    assert all(json.loads(line)["answer"] == "x" * 1000 for line in lines(state))
    for name in ("Q1", "Q2"):
        assert [note.seed for note in notes() if note.question == name] == list(range(150))


def test_a_killed_notebook_leaves_whole_lines(state: Path) -> None:
    process = writer("Q1", 10**9)
    while not (state / journal.FILE).exists() or len(lines(state)) < 20:
        time.sleep(0.01)
    process.kill()
    process.wait()
    before = len(lines(state))
    record("committed", "Q2", 0, "b")
    assert len(lines(state)) == before + 1
    assert [note.seed for note in notes()[:-1]] == list(range(len(notes()) - 1))
    assert notes()[-1].question == "Q2"


def test_a_line_cut_short_by_a_crash_costs_itself_and_no_other(state: Path) -> None:
    record("committed", "Q4", 0, "a")
    with open(state / journal.FILE, "ab") as file:
        file.write(b'\n{"when": "2026-03-01", "what": "ran", "quest')
    record("committed", "Q4", 0, "b")
    assert [note.answer for note in notes()] == ["a", "b"]


def test_the_folder_is_the_one_of_the_course_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COURSE_STATE")
    notebooks = tmp_path / "course" / "notebooks"
    notebooks.mkdir(parents=True)
    monkeypatch.chdir(notebooks)
    (tmp_path / "course" / "course.py").touch()
    assert journal.folder() == tmp_path / "course" / ".course"


def test_without_a_course_around_the_folder_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COURSE_STATE")
    monkeypatch.chdir(tmp_path)
    assert journal.folder() == tmp_path / ".course" or (journal.folder().parent / ".course").is_dir()


def note(what: str, answer: str, right: bool | None = None) -> Note:
    return Note("2026-03-01T10:00:00+00:00", what, "Q4", 0, answer, right)


def row(*of_q4: Note) -> str:
    return next(line for line in table(list(of_q4), EXERCISES).splitlines() if line.startswith("  Q4"))


def test_the_table_says_what_became_of_each_question() -> None:
    assert row().endswith("-")
    assert row(note("committed", "a")).endswith("begun: a")
    wrong, right = note("ran", "a", False), note("ran", "b", True)
    assert row(note("committed", "a"), wrong).endswith("not right yet; last answer: a")
    assert row(right).endswith("right at the first try")
    assert row(wrong, wrong, right, wrong).endswith("right at try 3")
    assert row(note("ran", "text")).endswith("not compared yet; last answer: text")
    assert row(note("ran", "text"), note("checked", "")).endswith("compared with the model answer")


def test_the_table_counts_by_lesson() -> None:
    found = [note("ran", "b", True)]
    lesson = [entry for entry in ASKED.values() if entry.room == "L02_data_parallelism"]
    assert f"02_data_parallelism: 1 of {len(lesson)} done" in table(found, EXERCISES)
    assert not is_done([note("ran", "a", False)])


def test_the_table_counts_the_parts_of_exercises() -> None:
    found = [Note("2026-03-01", "ran", "split_batch", 0, "padded", False), note("ran", "b", True)]
    assert "exercise 02_data_parallelism: 0 of 5 done" in table(found, EXERCISES)
    (row,) = (line for line in table(found, EXERCISES).splitlines() if line.startswith("  split_batch"))
    assert "Split a minibatch" in row and row.endswith("not right yet; last answer: padded")
    done = table([*found, Note("2026-03-01", "ran", "split_batch", 0, "passed", True)], EXERCISES)
    assert "exercise 02_data_parallelism: 1 of 5 done" in done and "right at try 2" in done


def test_reading_needs_nothing_but_the_standard_library() -> None:
    program = """
import sys
import lessons
from pathlib import Path
from course_lib.classroom import progress
progress.show(Path("exercises"))
foreign = {name.split(".")[0] for name in sys.modules} - sys.stdlib_module_names - {"course_lib", "lessons", "__main__"}
assert not {"torch", "numpy", "ipywidgets", "plotly"} & foreign, foreign
"""
    # -S leaves out site-packages, as in a Python where nothing is installed.
    outcome = subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    assert "02_data_parallelism: 0 of" in outcome.stdout


def test_course_py_finds_the_answers_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COURSE_STATE")
    command = [sys.executable, str(ROOT / "course.py"), "progress"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert f"Kept in {ROOT / '.course' / journal.FILE}" in shown.stdout
