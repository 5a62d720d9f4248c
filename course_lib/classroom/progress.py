"""The progress on every question and every part of an exercise, for `course.py progress`. (Standard library only.)"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from course_lib.classroom.journal import FILE, Note, folder, notes
from course_lib.classroom.questions.catalog import pages

LONGEST_ANSWER = 40  # characters in a table


def table(found: list[Note], exercises: Path) -> str:
    """A table of every question by lesson and every part by exercise, with its state. exercises: their folder."""
    lines: list[str] = []
    for section, asked in (*_questions().items(), *_parts(exercises).items()):
        of_each = {name: [note for note in found if note.question == name] for name in asked}
        lines += ["", f"{section}: {sum(map(is_done, of_each.values()))} of {len(asked)} done"]
        lines += [f"  {name:<20} {asked[name]:<38} {_what_became(of_each[name])}".rstrip() for name in asked]
    return "\n".join(lines[1:])


def _questions() -> dict[str, dict[str, str]]:
    """The titles of the questions by their names, for each lesson and scenario."""
    found: dict[str, dict[str, str]] = {}
    for page in pages().values():
        if page.name != page.room:
            found.setdefault(page.room.removeprefix("L"), {})[page.name] = page.title
    return found


def _parts(exercises: Path) -> dict[str, dict[str, str]]:
    """The parts of each exercise, by the name of the function to write; the headings above are the titles."""
    found = {}
    for file in sorted(exercises.glob("*/*.ipynb")):
        parts, title = {}, ""
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
            heading = re.search(r"^## (?:\d+\. )?(.+)$", "".join(cell["source"]), re.MULTILINE)
            title = heading[1] if heading and cell["cell_type"] == "markdown" else title
            if cell["cell_type"] == "code" and cell["metadata"].get("nbgrader", {}).get("grade"):
                parts[cell["metadata"]["nbgrader"]["grade_id"].removeprefix("check_")] = title
        found[f"exercise {file.stem}"] = parts
    return found


def is_done(of_one_question: list[Note]) -> bool:
    """Whether a question was ever answered right or, as a text, compared with the model answer."""
    return any(note.right or note.what == "checked" for note in of_one_question)


def _what_became(of_one: list[Note]) -> str:
    ran = [note for note in of_one if note.what == "ran"]
    tries = next((number for number, note in enumerate(ran, start=1) if note.right), None)
    if tries:
        return "right at the first try" if tries == 1 else f"right at try {tries}"
    if any(note.what == "checked" for note in of_one):
        return "compared with the model answer"
    if ran:
        so_far = "not compared yet" if ran[-1].right is None else "not right yet"  # a text, which a run cannot judge
        return f"{so_far}; last answer: {_short(ran[-1].answer)}"
    return f"begun: {_short(of_one[-1].answer)}" if of_one else "-"


def _short(answer: Any) -> str:
    text = " ".join(map(str, answer)) if isinstance(answer, list) else " ".join(str(answer).split())
    return text if len(text) <= LONGEST_ANSWER else f"{text[: LONGEST_ANSWER - 1]}…"


def show(exercises: Path) -> None:
    """Print the table, for course.py."""
    print(table(notes(), exercises))
    print(f"\nKept in {folder() / FILE}. To begin anew, give this file another name.")
