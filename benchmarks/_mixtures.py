"""The planner against published steps of mixtures of experts; `python3 course.py bench planner` prints them, too.

They stand apart from the steps of _published.py: no constant of a device is fitted to them, and their interval is
wider. Runs that the tables print as equal took up to twice as long from one release to the next; the configurations of
the releases (scripts/performance/configs) say why: how tokens reach their experts, which is Plan(dispatch=).

    left out    matmul as if their whole source were not known; what is left are groups that trained dense models
    one row     the first row of a model on a stack calibrates, and its others are predicted: other plans, sizes,
                formats, releases and ways to the experts
    naive       FLOPs / (devices x peak), times one constant from the same first row
"""

from __future__ import annotations

import math
import statistics
from functools import cache

from benchmarks import _published
from benchmarks._published import Comparison, Row, compared, matmul_of, matmul_of_chips, stack_of
from course_lib.planner.estimate import ROUTED_APART
from course_lib.planner.hardware import NINETY_PERCENT, half_width


@cache
def stacks() -> dict[tuple[str, str], list[Row]]:
    """Rows of mixtures, by stack."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in _published.rows_of("step time of a mixture"):
        found.setdefault(stack_of(row), []).append(row)
    return found


def by_model() -> list[list[Row]]:
    """Rows of each model on each stack."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for stack, rows in stacks().items():
        for row in rows:
            found.setdefault((*stack, row["model"].split(",")[0]), []).append(row)
    return list(found.values())


@cache
def left_out() -> list[Comparison]:
    """Every step as the planner would predict it without any step of its source."""
    found = []
    for (group, chip), rows in stacks().items():
        others = sum(stack[1] == chip and stack[0] != group for stack in _published.steps())
        half = math.hypot(half_width(others), NINETY_PERCENT * ROUTED_APART)
        found += [compared(row, matmul_of_chips(group)[chip], half) for row in rows]
    return found


@cache
def after_one_row() -> list[Comparison]:
    """All rows of each model but the first, on the machine that the first row calibrates."""
    half, found = math.hypot(half_width(0, 1), NINETY_PERCENT * ROUTED_APART), []
    for first, *others in by_model():
        if others:
            found += [compared(row, matmul_of([first]), half) for row in others]
    return found


@cache
def naive() -> list[Comparison]:
    found = []
    for first, *others in by_model():
        share = _published.published_seconds(first) / _published.ideal_seconds(first)
        found += [
            Comparison(row, _published.published_seconds(row), share * _published.ideal_seconds(row)) for row in others
        ]
    return found


def fits() -> dict[str, str]:
    """Whether each step fits by the planner; all of them ran. A row with "memory" says what keeps it out of this."""
    return {one["id"]: _published.predict(one).fit for rows in by_model() for one in rows if "memory" not in one}


def least_error() -> tuple[int, float]:
    """How far runs of several releases that their table prints as equal are from their own mean: rows, and the mean.

    No planner that reads the table alone can do better on them.
    """
    alike: dict[str, list[Row]] = {}
    for row in (row for rows in by_model() for row in rows if "release" in row):
        plan = {name: value for name, value in row["plan"].items() if name not in ("dispatch", "overlap")}
        alike.setdefault(f"{row['cluster']} {row['model']} {sorted(plan.items())}", []).append(row)
    apart = []
    for rows in (rows for rows in alike.values() if len(rows) > 1):
        logs = [math.log(_published.published_seconds(row) / row["global_batch"]) for row in rows]
        apart += [abs(math.exp(one - statistics.mean(logs)) - 1) for one in logs]
    return len(apart), statistics.mean(apart)


def table() -> str:
    """Tokens per second and device of every row as published and as predicted, and predicted seconds by published."""
    calibrated = {one.row["id"]: one for one in after_one_row()}
    lines = [f"{'step':50} {'published':>10} {'left out':>10} {'ratio':>6} {'one row':>8}"]
    for out in left_out():
        row = out.row
        tokens = row["global_batch"] * _published.model_of(row).sequence / _published.plan_of(row).devices
        one = calibrated.get(row["id"])
        lines.append(
            f"{row['id']:50} {tokens / out.published:10,.0f} {tokens / out.predicted:10,.0f} "
            f"{out.predicted / out.published:6.2f} {f'{1 + one.error:8.2f}' if one else ' the row'}"
            f"{'' if out.is_inside else '   OUTSIDE its interval'}"
        )
    return "\n".join(lines)


def report() -> str:
    spread = statistics.pstdev(math.log(one.predicted / one.published) for one in left_out())
    answers, kept_out = list(fits().values()), [one for rows in by_model() for one in rows if "memory" in one]
    alike, least = least_error()
    said = ", ".join(f"{answer}: {answers.count(answer)}" for answer in dict.fromkeys(answers))
    lines = [
        f"mixtures of experts, {name} {_published.summary(found)}; {_published.coverage(found):.0%} in their interval"
        for name, found in (("source left out:", left_out()), ("after one row:", after_one_row()))
    ]
    lines.append(f"... by FLOPs and a constant: {_published.summary(naive())}")
    lines.append(f"... standard deviation of the logarithm, source left out: {spread:.2f}; all ran, and {said}")
    lines += [f"... not asked whether it fits: {one['id']}: {one['memory']}" for one in kept_out]
    lines.append(
        f"... {alike} runs of several releases that their table prints as equal are {least:.1%} from their own mean"
    )
    return "\n".join(lines)
