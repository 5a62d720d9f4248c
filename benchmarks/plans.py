"""One plan for all: what a student reaches in S1, S3, S9 and S10 who found one plan, or one letter, and plays it again.

For each case: the tasks that the best single plan of a small set solves (the best plans of all tasks, and what people
usually do), the tasks that any plan of any search solves at most, and the share of first questions over 40 seeds that
the best guess of a letter answers. Modelled.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from course_lib.classroom.questions import plan_text
from course_lib.classroom.scenarios.plans import Planning
from course_lib.classroom.scenarios.targets import reaching
from tests.lessons import cases, one_plan_for_all
from tests.lessons.test_plans import PLAYED, right_letter


def row(case: Planning) -> str:
    variants = [case.variant(seed) for seed in range(len(case.tasks))]
    tasks = [task for one in variants for task in (one.first, one.then)]
    best = {plan_text.write(reaching(task).best.plan) for task in tasks}
    usual = {plan_text.write(one.then.estimate(turn).plan) for one in variants for turn in one.then.turns.values()}
    small = max(one_plan_for_all.solved(plan, tasks) for plan in best | usual)
    solved = Counter(plan for task in tasks for plan in {plan_text.write(one.plan) for one in reaching(task)})
    letters = Counter(right_letter(case.name, seed) for seed in range(PLAYED))
    guess, listed = max(letters.values()) / PLAYED, ", ".join(f"{n} {letter}" for letter, n in sorted(letters.items()))
    return f"{case.name:<5}{len(tasks):>6}{small:>12}{max(solved.values()):>10}{guess:>12.0%}  {listed}"


if __name__ == "__main__":
    print(f"{'case':<5}{'tasks':>6}{'small set':>12}{'any plan':>10}{'one letter':>12}  right letters")
    for room in cases.PLANS:
        print(row(cases.CASES[room]), flush=True)
