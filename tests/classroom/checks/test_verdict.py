"""The words of a verdict, in a notebook and elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from course_lib import Span, Timeline
from course_lib.classroom import journal
from course_lib.classroom.checks import Cost, Idle, NotPassed, Verdict
from course_lib.classroom.checks.verdict import partial_credit

RIGHT = Verdict("f", "passed", "Tried.", costs=(Cost("bytes", "1,200", "1,000"),), remarks=("Use `isend`.",))
WRONG = Verdict("f", "idea", "a < b in `x`", "2 ranks", "too_small", facts=(("Line", "cell 3, line 1: x < y"),))


def test_a_right_function_shows_its_price() -> None:
    lines = str(RIGHT).splitlines()
    assert lines[0] == "f is right."
    assert lines[4] == "bytes: 1,200, lowest known 1,000"
    assert lines[-1] == "Use isend."


def test_a_wrong_one_says_why_and_where() -> None:
    assert str(WRONG).split("\n\n") == ["f: not yet. (Tried: 2 ranks.)", "a < b in x", "Line: cell 3, line 1: x < y"]


def test_in_a_notebook_code_is_code_and_signs_are_safe() -> None:
    html = WRONG._repr_mimebundle_()["text/html"]
    assert "a &lt; b in <code>x</code>" in html
    assert "<code>cell 3, line 1: x &lt; y</code>" in html
    assert "<td>1,200</td><td>1,000</td>" in RIGHT._repr_mimebundle_()["text/html"]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COURSE_STATE", str(tmp_path))
    return tmp_path


def test_a_right_one_shows_itself_and_is_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    RIGHT.points(3)
    assert capsys.readouterr().out == f"{RIGHT}\n"
    assert journal.notes()[-1][1:] == ("ran", "f", 0, "passed", True)


def test_a_wrong_one_raises_without_a_wall_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotPassed) as caught:
        WRONG.points(3)
    assert capsys.readouterr().out == f"{WRONG}\n"
    assert str(caught.value) == str(WRONG)
    assert caught.value._render_traceback_() == [
        "NotPassed: the reason stands above. Change f and run this cell again."
    ]
    assert journal.notes()[-1][1:] == ("ran", "f", 0, "too small", False)


def test_what_is_partly_right_says_what_it_earns() -> None:
    with pytest.raises(NotPassed) as caught:
        replace(WRONG, share=5 / 6).points(3)
    assert caught.value._render_traceback_()[1] == "So far it earns 2.5 of 3 points."
    assert [partial_credit(share, 2) for share in (0, 0.2, 0.25, 0.99, 1)] == [0, 0, 0.5, 1.5, 2]


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COURSE_STATE", str(tmp_path / "file" / "inside"))
    RIGHT.points(3)


@pytest.mark.parametrize("outcome", ["budget", "error", "held", "idea", "price", "slip", "unwritten"])
def test_nothing_but_a_right_one_earns_points(outcome: str) -> None:
    with pytest.raises(NotPassed):
        Verdict("f", outcome, "Why.").points(3)


def test_idle_time_says_what_would_be_possible_and_that_it_is_emulated() -> None:
    spans = [Span(0, "backward", "backward", 0.0, 3.0), Span(0, "transfer", "send", 3.0, 4.0, bytes=8)]
    bundle = Idle(Timeline(spans, 1, "emulated"), best=0.2)._repr_mimebundle_()
    assert bundle["text/plain"].startswith("Idle 25% of the time; the lowest known is 20% (emulated")
    assert "<img" in bundle["text/html"]


def test_nbgrader_validate_which_cuts_lines_at_76_characters_shows_all_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBGRADER_VALIDATING", "1")
    verdict = replace(WRONG, message="A share that is small counts as much as one that is large. " * 3)
    lines = "\n".join(NotPassed(verdict, 3)._render_traceback_()).splitlines()
    assert max(map(len, lines)) <= 76 and " ".join(lines).count("as one that is large.") == 3
