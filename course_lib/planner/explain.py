"""Two or three plain sentences about an estimate: what binds, and what to try."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from course_lib.planner.hardware import Cluster, GiB
from course_lib.planner.memory import Memory, memory_of_worst_device
from course_lib.planner.spec import ModelSpec, Plan

# Features that some published step had.
PUBLISHED = (Plan(), Plan(precision="fp16", schedule="interleaved_1f1b", virtual_stages=2))
# A name for each part of a step, and a remedy.
LOSSES = json.loads(Path(__file__).with_name("losses.json").read_text(encoding="utf-8"))


def why(
    model: ModelSpec, plan: Plan, global_batch: int, memory: Memory, capacity: float, seconds: Mapping[str, float]
) -> str:
    """The binding constraint in words: memory if the plan does not fit for certain, else the largest loss of time.

    capacity: bytes of a device that a step can use.  seconds: of a step, by part.
    """
    largest = max(memory.parts, key=lambda name: memory.parts[name])
    where = f"the fullest device (pipeline rank {memory.rank})" if plan.pp > 1 else "each device"
    needs = f"{where} needs {_gib(memory.total)}"
    span = f"{needs}, {_gib(memory.low)} to {_gib(memory.high)} by the software"
    fit = memory.fit(capacity)
    if fit == "fits":
        return f"It fits: {span}, of {_gib(capacity)}. {_time(seconds)}"
    share = memory.parts[largest] / memory.total
    full = f"It {fit}: {span}, and {_gib(capacity)} are there; {share:.0%} of it is {largest}."
    return f"{full} {_remedy(model, plan, global_batch, capacity)} {_time(seconds)}"


def interval(plan: Plan, low: float, high: float, cluster: Cluster) -> str:
    """The range of 90% of runs, its origin, and features of the plan that none of the steps behind it had."""
    said = f"90% of such steps take {_seconds(low)} to {_seconds(high)}, by {cluster.spread_from}."
    measured = [step.plan for step in cluster.measured]
    largest = max((cluster.spec.largest, *(one.devices for one in measured)))
    known = [*PUBLISHED, *measured]
    new = [f"precision={plan.precision!r}"] * all(plan.precision != one.precision for one in known)
    new += [f"schedule={plan.schedule!r}"] * (plan.pp > 1 and all(plan.schedule != one.schedule for one in known))
    new += [f"more than {largest:,} devices"] * (plan.devices > largest > 0)
    return f"{said} None of those had {' or '.join(new)}: measure before you rely on it." if new else said


def _remedy(model: ModelSpec, plan: Plan, global_batch: int, capacity: float) -> str:
    """The mildest single change of the plan that makes it fit, or the one that helps most."""
    tried: dict[str, Memory] = {}
    for what, milder in _milder(plan):
        tried[what] = memory_of_worst_device(model, milder, milder.micro_batches(global_batch))
        if tried[what].fit(capacity) == "fits":
            return f"With {what} it would need {_gib(tried[what].total)} and fit."
    if not tried:
        return "Cut the model further, with a larger tp or pp."
    best = min(tried, key=lambda what: tried[what].total)
    return f"{best} would bring it to {_gib(tried[best].total)}; beyond that, cut the model with a larger tp or pp."


def _milder(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Changes of the plan that need less memory, those that cost the least time first."""
    if plan.zero == 0 and plan.dp > 1:
        yield "zero=1", replace(plan, zero=1)
    if plan.tp > 1 and not plan.sequence_parallel:
        yield "sequence_parallel=True", replace(plan, sequence_parallel=True)
    if plan.recompute == "none":
        yield "recompute='selective'", replace(plan, recompute="selective")
    if plan.micro_batch % 2 == 0:
        yield f"micro_batch={plan.micro_batch // 2}", replace(plan, micro_batch=plan.micro_batch // 2)
    if plan.schedule == "gpipe":
        yield "schedule='1f1b'", replace(plan, schedule="1f1b")
    if plan.recompute != "full" or plan.recomputed < 1:
        yield "recompute='full' in all layers", replace(plan, recompute="full", recomputed=1.0)
    if plan.zero < 3 and plan.dp > 1:
        yield "zero=3", replace(plan, zero=3)


def _time(seconds: Mapping[str, float]) -> str:
    total = sum(seconds.values())
    useful = f"Of a step of {_seconds(total)}, {seconds['compute'] / total:.0%} is computing"
    losses = {name: lost for name, lost in seconds.items() if name in LOSSES and lost > 0}
    if not losses:
        return f"{useful}."
    worst = max(losses, key=lambda name: losses[name])
    share = losses[worst] / total
    if share < 0.02:
        return f"{useful}, and nothing else takes more than 2%."
    what, remedy = LOSSES[worst]
    return f"{useful}; the largest loss is {what} ({share:.0%}). To shrink it, {remedy}."


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / GiB:.1f} GiB" if n_bytes >= 0.1 * GiB else f"{n_bytes / 2**20:.1f} MiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
