"""The rows about plans in lessons/instructors/variants.md; `python -m tests.lessons.written_variants` writes them."""

from __future__ import annotations

import re
from pathlib import Path

from course_lib.classroom import questions
from course_lib.classroom.questions import plan_text
from course_lib.classroom.scenarios.plans import PlanCase
from course_lib.classroom.scenarios.targets import machine, reaching
from tests.lessons import cases

PAGE = Path(__file__).parents[2] / "lessons" / "instructors" / "variants.md"


def row(variant: PlanCase) -> str:
    """A row: what the variant is about, the answer to the limit question, and the best plans of a search."""
    name, first = variant.case.name, variant.first
    right = [
        words[0] for words, outcome in questions.load(f"{name}_limit", variant.seed).form.reveal() if outcome.right
    ]
    best = [f"`{plan_text.write(reaching(task).best.plan)}`" for task in (first, variant.then)]
    return f"| {' | '.join([name, str(variant.seed), first.words, machine(first.cluster), *right, *best])} |"


def write() -> None:
    page, drawn = PAGE.read_text(encoding="utf-8"), [cases.CASES[room] for room in cases.PLANS]
    rows = [row(case.variant(seed)) for case in drawn for seed in range(len(case.tasks))]
    page = re.sub(r"(?m)(^\| case \|.*\n\|[-|]+\|\n)(?:\|.*\n)*", lambda head: f"{head[1]}{chr(10).join(rows)}\n", page)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write()
