"""The journal: a student's answers, in a file that only ever grows.

    .course/answers.jsonl     one line for each thing that happened, the latest last
    {"when": "2026-03-01T10:00:00+00:00", "what": "committed", "question": "Q4", "seed": 0, "answer": "a"}
    {"when": "2026-03-01T10:00:03+00:00", "what": "ran", "question": "Q4", "seed": 0, "answer": "a", "right": false}

A line is on the disk before `record` returns, and no line is ever changed. So neither a crash, nor a restart, nor a
second notebook that writes at the same moment can lose what is there; readers skip a line that a crash cut short.

Standard library only, so that `course.py progress` works where nothing is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

FILE = "answers.jsonl"


class Note(NamedTuple):
    """One line of the file.

    what: "drafted" (a text to go on with), "committed" (the student has decided), "ran" (the answer was run),
        "checked" (the points of the model answer that the student finds in a text, by number) or "measured" (an
        instrument of a scenario was paid for).
    question: the name of the question, of a part of an exercise, or of a scenario.
    answer: as the question's form reads it (a letter, a list of events, a text); for a part, the result of the check;
        for a policy, its result on the fleet; for a measurement, the name of the instrument.
    right: the verdict of the run; None if there is none, or if only the student can judge.
    """

    when: str
    what: str
    question: str
    seed: int
    answer: Any
    right: bool | None = None


def folder() -> Path:
    """The student's `.course`: COURSE_STATE if that is set, else that of the course around the working directory."""
    if chosen := os.environ.get("COURSE_STATE"):
        return Path(chosen)
    here = Path.cwd()
    for place in (here, *here.parents):
        if (place / ".course").is_dir() or (place / "course.py").is_file():
            return place / ".course"
    return here / ".course"


def record(what: str, question: str, seed: int, answer: Any, right: bool | None = None) -> None:
    """Add a line. Raises OSError where nothing can be written."""
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    line = json.dumps(Note(when, what, question, seed, answer, right)._asdict(), ensure_ascii=False)
    folder().mkdir(parents=True, exist_ok=True)
    with open(folder() / FILE, "ab", buffering=0) as file:
        os.chmod(file.name, 0o600)  # private to the student
        file.write(b"\n" + line.encode())  # at once, on a line of its own, also after one that a crash cut short
        os.fsync(file.fileno())


def notes() -> list[Note]:
    """All notes, the latest last. Raises OSError where the file is there but cannot be read."""
    try:
        lines = (folder() / FILE).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [note for line in lines if (note := _note(line))]


def latest(question: str, seed: int) -> Note | None:
    """The latest note about a question."""
    own = (note for note in reversed(notes()) if (note.question, note.seed) == (question, seed))
    return next((note for note in own if note.what != "checked"), None)


def _note(line: bytes) -> Note | None:
    with contextlib.suppress(ValueError, TypeError):
        return Note(**json.loads(line))
    return None
