"""The pages of the checks: what authors write is said, and what they get wrong is told with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from course_lib import checks
from course_lib.checks.planning import TRIES
from course_lib.checks.prose import FOLDER, words

EXERCISES = sorted(path.stem for path in (FOLDER.parent / "exercises").glob("*.py"))
PART = "# split_batch\n\n"
PADDED = "## padded\nTo make shares equal,\nsamples are used twice.\n\nHow much does\nsuch a sample count?\n\n"


def test_every_mistake_has_its_words_and_no_words_are_left_over() -> None:
    mistakes = [(part.name, mistake.program.__name__) for part in checks.PARTS for mistake in part.mistakes]
    assert sorted(words()) == sorted(mistakes)


def test_every_exercise_has_a_page() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*")) == EXERCISES


def test_the_number_of_plans_is_the_one_that_the_check_allows() -> None:
    assert f"; {TRIES} are enough." in words()["choose", "searched"].idea


def test_an_idea_and_a_question_are_read(tmp_path: Path) -> None:
    (tmp_path / "02.md").write_text(PART + PADDED, encoding="utf-8")
    idea, ask = words(tmp_path)["split_batch", "padded"]
    assert (idea, ask) == ("To make shares equal, samples are used twice.", "How much does such a sample count?")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (PADDED, r"02.md:1: '## padded' should be a mistake"),
        (PART + PADDED + PADDED, r"02.md:\d+: '## padded' should be a mistake of its own"),
        (PART + "## padded\nAn idea.\n", r"02.md:3: '## padded' .* an idea and then a question"),
        (PART + "## padded\nAn idea.\n\nNo question.\n", r"02.md:3: '## padded'"),
        ("What?\n", r"02.md:1: '' should be"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "02.md").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=complaint):
        words(tmp_path)


def test_a_missing_folder_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere has no words; copy the folder sources/ of the course"):
        words(tmp_path / "nowhere")
