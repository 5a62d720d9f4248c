"""Two or three plain sentences about an estimate: what binds, and what to try."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from course_lib.planner.hardware import Cluster, GiB
from course_lib.planner.memory import Memory
from course_lib.planner.spec import ModelSpec, Plan

SIMILAR = 1.1  # times as many parameters are no other size: the same model is counted in several ways
PUBLISHED_SCHEDULES = {"1f1b", "interleaved_1f1b"}  # that some published step had
# A name for each part of a step, and a remedy; for parts of memory, what shrinks them, and the change of the plan.
LOSSES, REMEDIES = (
    json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8")) for name in ("losses", "remedies")
)
STATE = {"optimizer": 1, "gradients": 2, "parameters": 3}  # the ZeRO stage from which on replicas share it out


def why(plan: Plan, memory: Memory, capacity: float, seconds: Mapping[str, float]) -> str:
    """The binding constraint in words: memory if the plan does not fit for certain, else the largest loss of time.

    capacity: bytes of a device that a step can use.  seconds: of a step, by part.
    """
    where = f"the fullest device (pipeline rank {memory.rank})" if plan.pp > 1 else "each device"
    span = f"{where} needs {_gib(memory.total)}, {_gib(memory.low)} to {_gib(memory.high)} by the software"
    fit = memory.fit(capacity)
    if fit == "fits":
        return f"It fits: {span}, of {_gib(capacity)}. {_time(seconds)}"
    return f"It {fit}: {span}, and {_gib(capacity)} are there; {_remedy(plan, memory)} {_time(seconds)}"


def _remedy(plan: Plan, memory: Memory) -> str:
    """The largest part of memory, and how to shrink it, or else the largest that this plan can still shrink."""
    parts = sorted(memory.parts, key=lambda part: -memory.parts[part])
    shares = [f"{memory.parts[part] / memory.total:.0%} of it is {part}" for part in parts]
    for part, share in zip(parts, shares, strict=True):
        if ways := _ways(part, plan):
            before = "" if part == parts[0] else f"{shares[0]}, which cannot shrink on these devices, and "
            return f"{before}{share}. To shrink it, {', or '.join(ways)}."
    return f"{shares[0]}. To shrink it, cut the model in another way, or take more devices."


def _ways(part: str, plan: Plan) -> list[str]:
    """Changes that shrink a part of memory on the same devices, and that the plan has not made yet."""
    if stage := STATE.get(part):
        copies = plan.dp * plan.cp / (plan.sharing if plan.zero >= stage else 1)
        share = f"let all replicas share it, with zero={stage}"
        return ["cut the model further, with a larger tp or pp", share] if copies > 1 else []
    return [way for way, change in REMEDIES.get(part, {}).items() if replace(plan, **change) != plan]


def evidence(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """Whether steps like this one were published or measured on this machine, or what none of them had."""
    known = "published or measured" if cluster.measured else "published"
    new = list(_extrapolated(model, plan, cluster))
    if new:
        return f"It is extrapolated: no step was {known} with {' or '.join(new)}. Measure before you rely on it."
    return f"It is inside what is known: steps of its precision, size and number of devices were {known}."


def _extrapolated(model: ModelSpec, plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Properties of this step that none of the published and measured steps behind its interval."""
    known, measured = cluster.spec, [step.plan for step in cluster.measured]
    used, mixed = model.active_parameters, bool(model.experts)
    sizes = [step.model.active_parameters for step in cluster.measured if bool(step.model.experts) == mixed]
    sizes += known.mixtures if mixed else known.sizes
    if not sizes:
        yield f"{cluster.device} and experts" if mixed else cluster.device
    largest = max((known.largest, *(one.devices for one in measured)))
    precisions = {*known.precisions, *(one.precision for one in measured)}
    if precisions and plan.precision not in precisions:
        yield f"precision={plan.precision!r}"
    if plan.pp > 1 and plan.schedule not in PUBLISHED_SCHEDULES.union(one.schedule for one in measured):
        yield f"schedule={plan.schedule!r}"
    if plan.devices > largest > 0:
        yield f"more than {largest:,} devices"
    if sizes and not min(sizes) / SIMILAR <= used <= max(sizes) * SIMILAR:
        yield f"{used / 1e9:.2g} billion parameters"


def _time(seconds: Mapping[str, float]) -> str:
    total = sum(seconds.values())
    useful = f"Of a step of {in_seconds(total)}, {seconds['compute'] / total:.0%} is computing"
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


def in_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
