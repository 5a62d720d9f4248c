"""Widgets are found in the source of a page, with what they need, and gathered the same each time."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from course_lib.classroom import questions
from lessons.site import moving, widgets
from lessons.site.gather import gather
from lessons.site.pages import address_of
from lessons.site.widgets import files_behind, widget

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
    assert found.program.splitlines() == [
        "from course_lib.classroom.widgets import play",
        "fast, slow = (1, 2)",
        "run = step(fast)",
    ]


def test_a_card_needs_its_question_alone_and_other_cells_show_no_widget() -> None:
    card = widget(CELLS, 4)
    assert card
    assert (card.question, card.program) == ("Q4", "")
    assert [widget(CELLS, number) for number in (0, 1, 2, 5)] == [None] * 4


def test_a_pack_depends_on_the_files_that_its_widget_imports() -> None:
    found = files_behind("from lessons.L05_pipeline_parallelism.explorer import PipelineExplorer")
    names = {file.relative_to(widgets.ROOT).as_posix() for file in found}
    assert {"lessons/L05_pipeline_parallelism/explorer.py", "course_lib/schedules.py"} <= names
    assert not any(name.startswith(("lessons/L04", "lessons/L09")) or name.endswith("lesson.py") for name in names)


def test_its_name_changes_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    before = widgets.Widget("", "", "Q4").key
    assert widgets.Widget("", "", "Q4").key == before
    read = widgets._text
    monkeypatch.setattr(widgets, "_text", lambda file: read(file) + "#" * (file.name == "outcome.py"))
    assert widgets.Widget("", "", "Q4").key != before


def test_the_same_is_gathered_twice() -> None:
    record, packs = gather(questions.load("Q11"), "key")
    assert gather(questions.load("Q11"), "key") == (record, packs)
    assert record["right"].count(True) == 1
    assert len(packs["key"]) == len(record["lines"])


def test_the_address_of_a_heading_stays_when_sections_are_numbered_anew() -> None:
    assert address_of("5. Filling the bubble") == address_of("6. Filling the bubble") == "filling-the-bubble"


def test_the_moving_picture_is_that_of_today() -> None:
    assert moving.draw() == Path(moving.PICTURE).read_text(encoding="utf-8")
