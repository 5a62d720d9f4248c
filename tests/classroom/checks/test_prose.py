"""The pages of the checks: authors' words are shown, and their mistakes are reported with their place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from course_lib.classroom import rooms
from course_lib.classroom.checks.prose import words
from lessons.L09_planning.checks import TRIES
from tests.lessons.parts import checks

PART = "# split_batch\n\n"
PADDED = "## padded\nTo make shares equal,\nsamples are used twice.\n\nHow much does\nsuch a sample count?\n\n"


def test_every_mistake_has_its_words_and_no_words_are_left_over() -> None:
    mistakes = [(part.name, mistake.program.__name__) for part in checks.PARTS for mistake in part.mistakes]
    assert sorted(words()) == sorted(mistakes)


def test_every_exercise_has_a_page() -> None:
    assert [page.parent for page in rooms.files("checks.md")] == [page.parent for page in rooms.files("exercise.py")]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only page of a course with a single room."""
    (tmp_path / "L02").mkdir()
    monkeypatch.setattr(rooms, "_courses", {"course": tmp_path})
    words.cache_clear()
    yield tmp_path / "L02" / "checks.md"
    words.cache_clear()


def test_the_number_of_plans_is_the_one_that_the_check_allows() -> None:
    assert f"; {TRIES} are enough." in words()["choose", "searched"].idea


def test_an_idea_and_a_question_are_read(page: Path) -> None:
    page.write_text(PART + PADDED, encoding="utf-8")
    said = words()["split_batch", "padded"]
    assert said[:2] == ("To make shares equal, samples are used twice.", "How much does such a sample count?")
    assert (said.places, said.base, said.fails) == ((), "", False)


def test_what_is_other_in_a_mistake_is_read_in_pairs_and_over_lines(page: Path) -> None:
    changes = "- `stop]` → `stop - 1]`\n- ` and more` → nothing\n- `a long one`\n  → `another`\n\n"
    page.write_text(PART + PADDED.replace("padded\n", f"padded\n{changes}"), encoding="utf-8")
    places = ("stop]", "stop - 1]", " and more", "", "a long one", "another")
    assert words()["split_batch", "padded"].places == places


def test_a_mistake_may_change_another_program_over_several_lines_of_code_and_fail(page: Path) -> None:
    changes = "- in `plain_sum`\n- `a\\n    b` → `b`\n- its run fails\n\n"
    page.write_text(PART + PADDED.replace("padded\n", f"padded\n{changes}"), encoding="utf-8")
    assert words()["split_batch", "padded"][2:] == (("a\n    b", "b"), "plain_sum", True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (PADDED, r"L02/checks.md:1: '## padded' should be a mistake"),
        (PART + PADDED + PADDED, r"L02/checks.md:\d+: '## padded' should be a mistake of its own"),
        (PART + "## padded\nAn idea.\n", r"L02/checks.md:3: '## padded' .* an idea and then a question"),
        (PART + "## padded\nAn idea.\n\nNo question.\n", r"L02/checks.md:3: '## padded'"),
        (PART + PADDED.replace("padded\n", "padded\n- `old` for `new`\n\n"), r"L02/checks.md:3: '## padded'"),
        ("What?\n", r"L02/checks.md:1: '' should be"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(page: Path, text: str, complaint: str) -> None:
    page.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=complaint):
        words()


def test_a_course_without_such_pages_is_told_in_a_sentence(page: Path) -> None:
    with pytest.raises(LookupError, match=r"no room has checks.md; import the package of the lessons first"):
        words()
