"""One plan for all: a plan that was right once, played again with every seed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from course_lib.classroom.questions import plan_text
from course_lib.classroom.scenarios.targets import PlanTask
from course_lib.planner import estimate


def solved(plan: str, tasks: Iterable[PlanTask]) -> int:
    """The tasks that the plan solves, computing in the 16 bits that the task's device has."""
    return sum(_solves(plan, task) for task in tasks)


def _solves(plan: str, task: PlanTask) -> bool:
    precision = "bf16" if "bf16" in task.cluster.spec.peak else "fp16"
    try:
        one = estimate(task.model, task.cluster, replace(plan_text.parse(plan), precision=precision), task.batch)
    except ValueError:
        return False
    return not task.missed(one)
