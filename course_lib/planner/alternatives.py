"""The few plans to choose from, where estimates cannot tell hundreds apart, and the measurement that would decide.

Most of the hundreds are variants: another number of stages on a rank, a larger micro-batch. Plans of one *shape* cut
the model alike, and only the fastest of each shape is worth a line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from textwrap import fill

from course_lib.planner.estimate import Estimate
from course_lib.planner.explain import LOSSES, in_seconds
from course_lib.planner.hardware import GiB
from course_lib.planner.spec import Plan

LINES = 6  # shapes in a table at most
WIDTH = 100  # letters of a printed line


def shape(plan: Plan) -> tuple[int, int, int, int, bool]:
    """The way a plan cuts a replica of the model: among which ranks, and whether ZeRO shards parameters too."""
    return plan.tp, plan.pp, plan.cp, plan.ep, plan.zero == 3


def by_shape(estimates: Iterable[Estimate], kind: Callable[[Plan], object] = shape) -> list[Estimate]:
    """The fastest of each shape, or of each other kind of plan, the fastest first."""
    slowest_first = sorted(estimates, key=lambda one: -one.step_time.total)
    return sorted({kind(one.plan): one for one in slowest_first}.values(), key=lambda one: one.step_time.total)


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
        "schedule": f"{plan.schedule} x {plan.virtual_stages}" if plan.pp > 1 else "FSDP" * is_plain(plan),
    }


def deciding(estimates: Sequence[Estimate]) -> str:
    """The measurement that would decide between the first and the others, in words.

    It is of the two plans, and of the part of a step, for which the smallest error in the part would swap them.
    """
    first, *others = estimates
    parts = [(n, one, part) for n, one in enumerate(others, 2) for part in one.step_time.parts]
    swaps = [(abs(math.log(factor)), factor, *of) for of in parts if (factor := _equal_at(first, *of[1:])) > 0]
    if not swaps:
        return "No other shape comes near: measure this one."
    _, factor, n, other, part = min(swaps, key=lambda swap: swap[0])
    mine, its = (in_seconds(getattr(one.step_time, part)) for one in (first, other))
    what = LOSSES[part][0] if part in LOSSES else "computing"
    text = (
        f"To decide, measure a step of 1 and of {n}. Which is faster depends on {what}: {mine} in 1 and {its} in {n}."
    )
    return fill(f"{text} If this takes {factor:.2g} times as long, both are equally fast.", WIDTH)


def _equal_at(first: Estimate, other: Estimate, part: str) -> float:
    """The factor on a part of both steps at which they would take equally long, or 0 if there is none."""
    more = getattr(first.step_time, part) - getattr(other.step_time, part)
    return 1 + (other.step_time.total - first.step_time.total) / more if more else 0.0
