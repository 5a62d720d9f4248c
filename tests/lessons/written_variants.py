"""The rows about plans in lessons/instructors/variants.md; `python -m tests.lessons.written_variants` writes them."""

from __future__ import annotations

import re
from pathlib import Path

from course_lib.classroom.questions import plan_text
from course_lib.classroom.scenarios.plans import PlanCase
from tests.lessons import cases

PAGE = Path(__file__).parents[2] / "lessons" / "instructors" / "variants.md"


def row(variant: PlanCase) -> str:
    """A row of the table: what the variant is about, and the best plans of a search."""
    best = [f"`{plan_text.write(task.reaching.best.plan)}`" for task in (variant.first, variant.then)]
    return f"| {' | '.join([variant.case.name, str(variant.seed), variant.first.words, *best])} |"


def write() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for case in map(cases.CASES.__getitem__, cases.PLANS):
        for seed in range(len(case.tasks)):
            page = re.sub(rf"(?m)^\| {case.name} \| {seed} \|.*$", row(case.variant(seed)), page)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write()
