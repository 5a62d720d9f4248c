"""The pages of the questions: authors' words are shown, and their mistakes are reported with their place."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from course_lib.classroom import questions, rooms
from course_lib.classroom.questions.asking import choice, each, number, open_case, ordering
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.prose import Page, Section, items, read
from course_lib.classroom.questions.units import BYTES
from tests.lessons.asked import ASKED

PAGE = """\
# Q4: What does each

{samples:,} samples on
{workers} workers, as a set {{1, 2}}.

- first
  of all
- second

```
# code

for x in y:
    pass
```

## option: one
the first

Why it is
wrong.

And more.

## option: two
the second

Right.
"""


def pages(folder: Path, text: str, lesson: str = "L02_lesson") -> dict[str, Page]:
    page = folder / lesson / "questions.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text(text, encoding="utf-8")
    return read(*folder.glob("*/questions.md"))


def never(*case: object) -> Outcome:
    raise AssertionError("no answer is run here")


@pytest.mark.parametrize("name", ASKED)
def test_a_page_and_its_code_know_the_same_fields_options_and_slips(name: str) -> None:
    """`load` refuses a field, option or slip that is missing or left over."""
    question = questions.load(name)
    for seed in range(1, 8) if question.varies else ():
        questions.load(name, seed)


@pytest.mark.parametrize("file", {page.file: None for page in ASKED.values()}, ids=lambda file: file.parent.name)
def test_every_question_in_the_code_has_a_page(file: Path) -> None:
    asked = importlib.import_module(rooms.module_of(file)).QUESTIONS
    assert set(asked) == {name for name, page in ASKED.items() if page.file == file}


def test_lines_are_joined_and_lists_and_code_are_not(tmp_path: Path) -> None:
    page = pages(tmp_path, PAGE)["Q4"].fill({"samples": 1024, "workers": 4})
    assert (page.title, page.room, page.place) == ("What does each", "L02_lesson", "L02_lesson/questions.md:1")
    assert page.text == (
        "1,024 samples on 4 workers, as a set {1, 2}.\n\n- first of all\n- second\n\n"
        "```\n# code\n\nfor x in y:\n    pass\n```"
    )
    form = choice(each(never, ("two", "one")))(page, None)
    assert form.lines == ["a  the first", "b  the second"]  # in the order of the page
    assert form.why == "a, the first: Why it is wrong.\n\nAnd more.\n\nb, the second: Right."


def test_a_field_is_an_expression_over_the_numbers_and_the_names_of_the_module(tmp_path: Path) -> None:
    page = pages(
        tmp_path, "# Q4: Shares\n\n{samples // workers} of {samples}: {1 / workers:.0%}, {in_words(workers)}.\n"
    )
    filled = page["Q4"].fill({"samples": 16, "workers": 4}, in_words={4: "four"}.get)
    assert filled.text == "4 of 16: 25%, four."


FOUND = """\
# Q2: What is found

Which?

## option: one
the first

## option: two
the second

## events
- x: first
- y: second

## why
X comes first.

## found
{share:percent} of {size:data_size}: it {right:is so|is not, by {size:,} bytes}.

## found: two
Nothing of {size}.

It means nothing.
"""


def test_a_page_says_what_a_run_has_found(tmp_path: Path) -> None:
    def find(option: str) -> Outcome:
        return Outcome(option == "one", found={"share": 1 / 4, "size": 4096, "right": option == "one"})

    page = pages(tmp_path, FOUND)["Q2"]
    form = choice(each(find, ("one", "two")))(replace(page, sections=without(page, "events", "why")), None)
    assert form.run("a").happened == "25% of 4.1 kB: it is so."
    assert form.run("b").happened.startswith("Nothing of 4096.")


def test_an_outcome_of_an_order_has_its_own_words_and_meaning(tmp_path: Path) -> None:
    def follow(order: tuple[str, ...]) -> Outcome:
        return Outcome(False, why="" if order[0] == "x" else "two", found={"share": 1, "size": 4096, "right": False})

    page = pages(tmp_path, FOUND)["Q2"]
    form: Any = ordering(follow)(replace(page, sections=without(page, "option: one", "option: two")), None)
    first, second = form.run(["x", "y"]), form.run(["y", "x"])
    assert (first.happened, first.why) == ("100% of 4.1 kB: it is not, by 4,096 bytes.", "X comes first.")
    assert (second.happened, second.why) == ("Nothing of 4096.", "It means nothing.")


def without(page: Page, *headings: str) -> dict[str, Section]:
    return {heading: section for heading, section in page.sections.items() if heading not in headings}


def test_items_are_those_of_a_list() -> None:
    assert items("- one - two\n- three") == ["one - two", "three"]


def test_a_field_without_a_number_is_told(tmp_path: Path) -> None:
    complaint = r"L02_lesson/questions.md:1: Q4: name 'samples' is not defined; choose one of workers"
    with pytest.raises(ValueError, match=complaint):
        pages(tmp_path, PAGE)["Q4"].fill({"workers": 4})


def test_a_brace_that_is_no_field_is_told(tmp_path: Path) -> None:
    page = pages(tmp_path, "# Q4: Sets\n\nWhat?\n\n## answer\n{1, 2\n")["Q4"]
    with pytest.raises(ValueError, match=r"L02_lesson/questions.md:5: .*, and write a brace that is no field twice"):
        page.fill({})


@pytest.mark.parametrize(
    ("ask", "complaint"),
    [
        (choice(each(never, ("one", "two", "three"))), "L02_lesson/questions.md:1: Q4 has no '## option: three'"),
        (
            choice({"one": never}),
            "L02_lesson/questions.md:25: no code knows '## option: two' of Q4; choose one of option: one",
        ),
        (number(BYTES, never), "Q4 has no '## why'"),
        (open_case(never), "Q4 has no '## (answer|checklist)'"),
    ],
)
def test_sections_that_are_missing_or_left_over_are_told(tmp_path: Path, ask: object, complaint: str) -> None:
    page = pages(tmp_path, PAGE)["Q4"].fill({"samples": 1, "workers": 1})
    with pytest.raises(ValueError, match=complaint):
        ask(page, None)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("What?\n\n# Q4: A title\n", r"L02_lesson/questions.md:1: 'What\?' should be like '# Q4: Its title'"),
        ("# A title\n", "L02_lesson/questions.md:1: '# A title' should be like '# Q4: Its title'"),
        ("## answer\n", "L02_lesson/questions.md:1: '## answer' should be like"),
        ("# Q4: A\n\n## why\n\n## why\n", "L02_lesson/questions.md:5: Q4 has two sections '## why'"),
        (
            "# Q4: A\n\n# Q4: B\n",
            "L02_lesson/questions.md:3: L02_lesson/questions.md:1 is Q4, too; choose another name",
        ),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        pages(tmp_path, text)
