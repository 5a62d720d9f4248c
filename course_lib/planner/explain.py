"""Two or three plain sentences about an estimate: what binds, and what to try."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from course_lib.planner.hardware import GiB
from course_lib.planner.memory import Memory, memory_of_worst_device
from course_lib.planner.spec import Plan

if TYPE_CHECKING:
    from course_lib.planner.estimate import Estimate

PART = {
    "recompute": "computing activations a second time",
    "tensor": "waiting for tensor-parallel traffic inside the layers",
    "context": "waiting for keys and values of other positions",
    "pipeline": "waiting for messages between pipeline stages",
    "bubble": "the pipeline's bubble",
    "data": "waiting for gradients to be summed over the replicas",
    "optimizer": "the optimizer's update",
}
REMEDY = {
    "recompute": "recompute less, if memory allows",
    "tensor": "use a smaller tp, or keep it inside a node",
    "context": "use a smaller cp",
    "pipeline": "use fewer stages, or let messages overlap with computation",
    "bubble": "give each pipeline more micro-batches, or use interleaving or a zero-bubble schedule",
    "data": "raise the batch (or the micro-batch, under ZeRO-2 and 3), use fewer replicas or a faster network",
    "optimizer": "share it among the replicas with zero=1",
}


def why(estimate: Estimate) -> str:
    """The binding constraint in words: memory if the plan does not fit, else the largest loss of time."""
    memory = _memory(estimate)
    return f"{memory} {_time(estimate)}"


def _memory(estimate: Estimate) -> str:
    memory, room = estimate.memory, estimate.capacity
    largest = max(memory.parts, key=lambda name: memory.parts[name])
    where = f"the fullest device (pipeline rank {memory.rank})" if estimate.plan.pp > 1 else "each device"
    needs = f"{where} needs {_gib(memory.total)}"
    if estimate.fits:
        return f"It fits: {needs} of {_gib(room)}."
    share = memory.parts[largest] / memory.total
    return f"It does not fit: {needs}, and {_gib(room)} are there; {share:.0%} of it is {largest}. {remedy(estimate)}"


def remedy(estimate: Estimate) -> str:
    """The mildest single change of the plan that makes it fit, or the one that helps most."""
    m = estimate.plan.micro_batches(estimate.global_batch)
    tried: dict[str, Memory] = {}
    for what, plan in _milder(estimate.plan):
        factor = estimate.plan.micro_batch // plan.micro_batch
        tried[what] = memory_of_worst_device(estimate.model, plan, m * factor)
        if tried[what].total <= estimate.capacity:
            return f"With {what} it would need {_gib(tried[what].total)} and fit."
    if not tried:
        return "Cut the model further, with a larger tp or pp."
    best = min(tried, key=lambda what: tried[what].total)
    return f"{best} would bring it to {_gib(tried[best].total)}; beyond that, cut the model with a larger tp or pp."


def _milder(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Changes that need less memory, those that cost least time first."""
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
    if plan.recompute != "full":
        yield "recompute='full'", replace(plan, recompute="full")
    if plan.zero < 3 and plan.dp > 1:
        yield "zero=3", replace(plan, zero=3)


def _time(estimate: Estimate) -> str:
    time = estimate.step_time
    useful = f"Of a step of {_seconds(time.total)}, {time.compute / time.total:.0%} is computing"
    losses = {name: seconds for name, seconds in time.parts.items() if name in PART and seconds > 0}
    if not losses:
        return f"{useful}."
    worst = max(losses, key=lambda name: losses[name])
    share = losses[worst] / time.total
    if share < 0.02:
        return f"{useful}, and nothing else takes more than 2%."
    return f"{useful}; the largest loss is {PART[worst]} ({share:.0%}). To shrink it, {REMEDY[worst]}."


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / GiB:.1f} GiB" if n_bytes >= 0.1 * GiB else f"{n_bytes / 2**20:.1f} MiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
