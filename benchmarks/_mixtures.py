"""The planner against published steps of mixtures of experts; `python3 course.py bench planner` prints them, too.

They stand apart from the steps of _published.py: no constant of a device is fitted to them, and the same software on the
same machine took up to twice as long from one release to the next, so their interval is wider.

    left out    matmul is the median of the stacks of *other* groups on that chip, none of which trained a mixture here
    one row     the first row of a stack calibrates, and its others are predicted
"""

from __future__ import annotations

import math
import statistics
from functools import cache

from benchmarks import _published
from benchmarks._published import Comparison, Row, compared, matmul_of, matmul_of_chip, stack_of
from course_lib.planner.estimate import ROUTED_APART
from course_lib.planner.hardware import NINETY_PERCENT, half_width


@cache
def stacks() -> dict[tuple[str, str], list[Row]]:
    """Rows of mixtures, by stack."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in _published.rows_of("step time of a mixture"):
        found.setdefault(stack_of(row), []).append(row)
    return found


@cache
def left_out() -> list[Comparison]:
    """Every step as the planner would predict it without any step of its source."""
    found = []
    for (group, chip), rows in stacks().items():
        others = sum(stack[1] == chip and stack[0] != group for stack in _published.steps())
        matmul = matmul_of_chip(chip, group)
        found += [compared(row, matmul, _wider(half_width(others))) for row in rows]
    return found


@cache
def after_one_row() -> list[Comparison]:
    """All rows of each stack but the first, on the machine that the first row calibrates."""
    found = []
    for first, *others in stacks().values():
        matmul = matmul_of([first]) if others else 0.0
        found += [compared(row, matmul, _wider(half_width(0, 1))) for row in others]
    return found


def _wider(half: float) -> float:
    return math.hypot(half, NINETY_PERCENT * ROUTED_APART)


def table() -> str:
    """Every row: its device and precision, tokens per second and device as published and as predicted, and the ratio."""
    calibrated = {one.row["id"]: one for one in after_one_row()}
    lines = [f"{'step':46} {'published':>10} {'left out':>10} {'ratio':>6} {'one row':>8}"]
    for out in left_out():
        row = out.row
        tokens = row["global_batch"] * _published.model_of(row).sequence / _published.plan_of(row).devices
        one = calibrated.get(row["id"])
        shown = f"{1 / (1 + one.error):8.2f}" if one else " the row"
        outside = "" if out.is_inside else "   OUTSIDE its interval"
        lines.append(
            f"{row['id']:46} {tokens / out.published:10,.0f} {tokens / out.predicted:10,.0f} "
            f"{out.predicted / out.published:6.2f} {shown}{outside}"
        )
    return "\n".join(lines)


def report() -> str:
    spread = statistics.pstdev(math.log(one.predicted / one.published) for one in left_out())
    return "\n".join(
        f"mixtures of experts, {name} {_published.summary(found)}; {_published.coverage(found):.0%} in their interval"
        for name, found in (("source left out:", left_out()), ("after one row:", after_one_row()))
    ) + f"\n... standard deviation of the logarithm, source left out: {spread:.2f}"
