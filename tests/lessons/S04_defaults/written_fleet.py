"""The best plans in lessons/S04_defaults/fleet.json.

`python -m tests.lessons.S04_defaults.written_fleet` searches for them anew.
"""

from __future__ import annotations

from pathlib import Path

from course_lib.classroom.questions import plan_text
from course_lib.planner import search
from lessons.S04_defaults import fleet

FILE = Path(fleet.__file__).with_name("fleet.json")


def best(name: str) -> str:
    """The best plan of a search, as written in the file."""
    model, cluster, batch, _ = fleet.FLEET[name]
    return plan_text.write(search(model, cluster, batch).best.plan)


def write() -> None:
    text = FILE.read_text(encoding="utf-8")
    for name, pair in fleet.FLEET.items():
        before, (head, found, rest) = plan_text.write(pair.best), text.partition(f'"{name}"')
        text = head + found + rest.replace(f'"best": "{before}"', f'"best": "{best(name)}"', 1)
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
