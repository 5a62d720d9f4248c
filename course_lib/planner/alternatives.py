"""The few plans to choose from, where estimates cannot tell hundreds apart, and the measurement that would decide.

Most of the hundreds are variants: another number of stages on a rank, a larger micro-batch. Plans of one *shape* cut
the model alike, and only the fastest of each shape is worth a line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import fill

from course_lib.planner.estimate import Estimate
from course_lib.planner.explain import in_seconds, named
from course_lib.planner.hardware import GiB
from course_lib.planner.spec import Plan

LINES = 6  # shapes in a table at most
WIDTH = 100  # letters of a printed line


def shape(plan: Plan) -> tuple[int, int, int, int, bool]:
    """The way a plan cuts a replica of the model: among which ranks, and whether ZeRO shards parameters too."""
    return plan.tp, plan.pp, plan.cp, plan.ep, plan.zero == 3


def by_shape(estimates: Sequence[Estimate]) -> list[Estimate]:
    """The fastest of each shape, the fastest shape first."""
    first: dict[tuple, Estimate] = {}
    for one in sorted(estimates, key=lambda one: one.step_time.total):
        first.setdefault(shape(one.plan), one)
    return list(first.values())


def is_plain(plan: Plan) -> bool:
    """Whether it is plain FSDP: ZeRO-3 over all devices, and nothing else."""
    return plan.zero == 3 and plan.dp == plan.devices


def few(shapes: list[Estimate]) -> list[Estimate]:
    """The first few, and plain FSDP in any case, as it is the easiest to begin with."""
    plain = [one for one in shapes[LINES:] if is_plain(one.plan)][:1]
    return shapes[: LINES - len(plain)] + plain


def table(estimates: Sequence[Estimate], within: float) -> str:
    """A row for each plan: its time, the memory that it leaves, its traffic over the slowest link, and the plan."""
    rows = [{"": str(n), **_row(one, within)} for n, one in enumerate(estimates, 1)]
    names = [name for name in rows[0] if not (name in ("cp", "ep") and {row[name] for row in rows} == {"1"})]
    columns = [[name, *(row[name] for row in rows)] for name in names]
    padded = [[text.rjust(max(map(len, column))) for text in column] for column in columns]
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


def _row(one: Estimate, within: float) -> dict[str, str]:
    plan, room, cluster = one.plan, within * one.capacity, one.cluster
    link = (cluster.between_link if cluster.nodes > 1 else cluster.inside_link).name
    sizes = {name: str(getattr(plan, name)) for name in ("dp", "tp", "pp", "cp", "ep", "zero")}
    return {
        "step": in_seconds(one.step_time.total),
        "GiB left": f"{(room - one.memory.high) / GiB:.0f} to {(room - one.memory.low) / GiB:.0f}",
        link: f"{one.traffic.get(link, 0) / 1e9:.0f} GB",
        **sizes,
        "micro-batches": f"{plan.micro_batches(one.global_batch)} of {plan.micro_batch}",
        "recompute": plan.recompute,
        "schedule": _schedule(plan),
    }


def _schedule(plan: Plan) -> str:
    if plan.pp == 1:
        return "FSDP" if is_plain(plan) else ""
    several = f" x {plan.virtual_stages}" if plan.virtual_stages > 1 else ""
    return plan.schedule.removesuffix("_1f1b") + several


def deciding(estimates: Sequence[Estimate]) -> str:
    """The measurement that would decide between the first and the others, in words.

    It is of the two plans, and of the part of a step, for which the smallest error in the part would swap them.
    """
    first, *others = estimates
    swaps = [swap for n, one in enumerate(others, 2) for swap in _swaps(first, one, n)]
    if not swaps:
        return "No other shape comes near: measure this one."
    _, n, name, factor = min(swaps)
    mine, other = (getattr(one.step_time, name) for one in (first, estimates[n - 1]))
    text = (
        f"To decide, measure a step of 1 and of {n}. Which is faster depends on {named(name)}: {in_seconds(mine)} in 1 "
        f"and {in_seconds(other)} in {n}. If this takes {factor:.2g} times as long, both are equally fast."
    )
    return fill(text, WIDTH)


def _swaps(first: Estimate, one: Estimate, n: int) -> list[tuple[float, int, str, float]]:
    """For each part of a step, the factor at which two plans would take equally long: how far from 1, and what."""
    behind, found = one.step_time.total - first.step_time.total, []
    for name, seconds in first.step_time.parts.items():
        more = seconds - getattr(one.step_time, name)
        factor = 1 + behind / more if more else 0.0
        if factor > 0:
            found.append((abs(math.log(factor)), n, name, factor))
    return found
