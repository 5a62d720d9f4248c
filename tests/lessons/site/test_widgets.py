"""Widgets are found in the source of a page, with what they need, and gathered the same each time."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import pytest

from course_lib.classroom import questions
from course_lib.classroom.questions.forms import Ordering
from course_lib.classroom.questions.markup import to_html
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Question
from course_lib.classroom.widgets import play
from course_lib.planner import simulate
from course_lib.schedules import SCHEDULES
from lessons.site import moving, packs, widgets
from lessons.site.gather import gather
from lessons.site.pages import address_of
from lessons.site.widgets import card, files_behind, widget

CELLS = [
    nbformat.v4.new_code_cell(source)
    for source in (
        "from course_lib.classroom.widgets import play\nfast, slow = 1, 2",
        "%%ranks 4\nfast = 3",
        "print(slow)\nrun = step(fast)",
        "other = step(slow)\nplay(run)",
        'Card("Q4", case.seed)',
        "run.results",
    )
]


def test_only_the_statements_that_lead_to_a_widget_are_run() -> None:
    found = widget(CELLS, 3)
    assert found
    assert found.call == "play(run)"
    run = "from course_lib.classroom.widgets import play\nfast, slow = 1, 2\nrun = step(fast)"
    assert ast.dump(ast.parse(found.program)) == ast.dump(ast.parse(run))  # a Python may write brackets of its own


def test_a_card_needs_its_question_alone_and_other_cells_show_no_widget() -> None:
    found = widget(CELLS, 4)
    assert found
    assert (found.question, found.call) == ("Q4", "questions.load('Q4')")
    assert "lessons.L02_data_parallelism.questions" in found.program
    assert [widget(CELLS, number) for number in (0, 1, 2, 5)] == [None] * 4


def test_a_pack_depends_on_the_files_that_its_widget_imports() -> None:
    found = files_behind("from lessons.L05_pipeline_parallelism.explorer import PipelineExplorer")
    names = {file.relative_to(widgets.ROOT).as_posix() for file in found}
    assert {"lessons/L05_pipeline_parallelism/explorer.py", "course_lib/schedules.py"} <= names
    assert not any(name.startswith(("lessons/L04", "lessons/L09")) or name.endswith("lesson.py") for name in names)


@pytest.mark.parametrize("file", ["outcome.py", "requirements.lock", "gather.py"])
def test_its_name_changes_with_them(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    before = card("Q4").key
    assert card("Q4").key == before
    read = widgets._text
    monkeypatch.setattr(widgets, "_text", lambda one: read(one) + "#" * (one.name == file))
    assert card("Q4").key != before


def test_what_was_run_once_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packs, "CACHE", tmp_path)
    monkeypatch.setattr(packs, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))  # here, at no cost
    known = card("Q11")
    packs.gather(known)
    packs.gather_all([known, card("Q4"), card("Q4")])
    assert capsys.readouterr().out == "Q4\n"
    kept = (tmp_path / known.key).read_bytes()
    packs.gather(known)
    assert (tmp_path / known.key).read_bytes() == kept  # the same bytes each time
    record = packs.copy(known, tmp_path)
    assert record["state"]["texts"] == questions.load("Q11").form.lines
    assert (tmp_path / f"{known.key}.js").read_text().startswith(f'course.unpack("{known.key}",')


def test_a_run_that_is_played_is_the_same_each_time() -> None:
    run = simulate(SCHEDULES["gpipe"](2, 2), 0.1, 0.2)
    first, second = (gather(play(run), "key") for _ in range(2))
    assert first == second
    assert "url(#key-" in first[1]["key"]["picture"]  # its patterns


def test_workers_programs_are_run_once_whatever_stands_between_them() -> None:
    runs: list[tuple[str, ...]] = []

    def execute(order: tuple[str, ...]) -> Outcome:
        runs.append(order)
        return Outcome(order[0] == "a0", " ".join(order))

    form = Ordering(dict.fromkeys(["a0", "b1", "c0", "d1"], "an event"), execute, "", lambda name: int(name[1]))
    record, found = gather(Question("Q8", 0, "", form), "key")
    assert len(runs) == len(found["key"]["which"]) == 4  # of 24 orders
    assert sorted(record["workers"]) == [["a0", "c0"], ["b1", "d1"]]
    assert [right for _, right in found["key"]["told"]].count(True) == 2


@pytest.mark.parametrize("factor", [1, 1.005, 8, 1000, 3])
def test_a_number_is_judged_as_the_course_does(factor: float) -> None:
    form: Any = questions.load("same_plan").form
    _, found = gather(questions.load("same_plan"), "key")
    judged = found["key"]
    given = judged["measured"] * factor
    near = [abs(given / judged["measured"] / one - 1) <= judged["tolerance"] for one in judged["factors"]]
    html, right = judged["told"][judged["which"][[*near, True].index(True)]]
    outcome = form.run(f"{given:.6g}")
    assert right is outcome.right
    assert to_html(outcome.why) in html


def test_the_address_of_a_heading_stays_when_sections_are_numbered_anew() -> None:
    assert address_of("5. Filling the bubble") == address_of("6. Filling the bubble") == "filling-the-bubble"


def test_the_moving_picture_is_that_of_today() -> None:
    assert moving.draw() == Path(moving.PICTURE).read_text(encoding="utf-8")
