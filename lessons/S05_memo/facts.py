"""The figures that a memo may quote: of the brief, of the plan, and of plans to compare it with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from course_lib.classroom.questions.units import BYTES, SECONDS, SHARE, TIMES
from course_lib.figures.costs import MEMORY_PARTS, TIME_PARTS
from course_lib.planner import Estimate, Plan, estimate
from lessons.S05_memo.numbers import COUNT, PARAMETERS, RATE, Fact

WORDS = {  # patterns of the words for each part of memory or of a step
    "parameters": "weights?|parameters?",
    "gradients": "gradients?",
    "optimizer": r"optimi[sz]er|adam|moments|master|update",
    "activations": "activations?",
    "logits": "logits?",
    "buffers": "buffers?",
    "margin": "margin|driver|fragment",
    "compute": "comput",
    "recompute": "again|recomput",
    "tensor": "tensor",
    "pipeline": "messages?|stages?|pipeline",
    "bubble": "bubble|idle",
    "data": "gradients?|all-reduce|synchroni[sz]",
    "context": "context",
    "experts": "experts?",
}
SENDING = "sen[dt]s?|travels?|traffic|moves?|crosse?s?"
LABELS = {part: look.label for part, look in TIME_PARTS.items()}
LABELS |= {"tensor": "traffic of tensor ranks", "context": "context", "experts": "all-to-alls of experts"}
BESIDE = {  # plans to compare it with, by their changes
    "without ZeRO": {"zero": 0, "shards": None},
    "in fp32": {"precision": "fp32"},
    "with naive splitting": {"schedule": "naive", "virtual_stages": 1},
}


def facts(plan: Estimate, one_node: Estimate, expected: float) -> Iterator[Fact]:
    """Every fact of a memo. one_node: the plan to beat.  expected: the share of the ideal speed-up."""
    yield from _of_the_brief(plan, expected)
    yield from _costs(plan, own=True)
    for name, changes in BESIDE.items():
        other = replace(plan.plan, **changes)  # type: ignore[arg-type]
        yield from _costs(estimate(plan.model, plan.cluster, other, plan.global_batch), own=False, name=f", {name}")
    yield from _speeds(plan, one_node)
    yield from _traffic(plan)
    yield from _pipeline(plan.plan, plan.plan.micro_batches(plan.global_batch))


def _of_the_brief(plan: Estimate, expected: float) -> Iterator[Fact]:
    """Facts of the brief, their consequences, and common knowledge."""
    spec, cluster, n = plan.model, plan.cluster, plan.model.parameters
    fast, slow = cluster.inside_link.bandwidth, cluster.between_link.bandwidth
    yield Fact("the model's parameters", n, PARAMETERS)
    yield Fact("the memory of a device", plan.capacity, BYTES)
    for each in (2, 4, 8, 12, 16, 18):
        yield Fact("bytes of a parameter", each, BYTES)
        yield Fact(f"{each} bytes for each parameter", each * n, BYTES)
    yield Fact("the link inside a node", fast, RATE, "inside|nvlink|fast", own=True)
    yield Fact("the link between nodes", slow, RATE, "between|ethernet|slow|network|across", own=True)
    yield Fact("how much faster the links inside a node are", fast / slow, TIMES)
    yield Fact("what is expected", expected, SHARE)
    yield Fact("what is expected", expected * cluster.nodes, TIMES)
    chosen = plan.plan
    ours = (chosen.dp, chosen.tp, chosen.pp, chosen.micro_batches(plan.global_batch), chosen.micro_batch)
    sizes = (cluster.devices, cluster.nodes, cluster.devices_per_node, plan.global_batch, spec.layers, spec.hidden)
    waiting = chosen.dp - 1, chosen.pp - 1, chosen.micro_batches(plan.global_batch) + chosen.pp - 1
    for count in {*ours, *waiting, *sizes, spec.heads, spec.sequence, spec.layers // chosen.pp, 1, 2, 4, 12, 16, 32}:
        yield Fact("", count, COUNT)


def _costs(plan: Estimate, own: bool, name: str = "") -> Iterator[Fact]:
    """Facts about a plan's costs. name: of a plan to compare with; "" for the recommended one."""
    memory, time, whole = plan.memory, plan.step_time, "fullest|needs?|in all|total|peak|holds?"
    yield Fact(f"all that the fullest device holds{name}", memory.total, BYTES, whole, own, beside=not own)
    yield Fact(f"a step{name}", time.total, SECONDS, "step", own, beside=not own)
    for part, size in memory.parts.items():
        said = f"the {MEMORY_PARTS[part].label} on the fullest device{name}"
        yield Fact(said, size, BYTES, WORDS[part], own and size > 0, beside=not own)
    for part, seconds in time.parts.items():
        yield Fact(f"{LABELS[part]}, in a step{name}", seconds, SECONDS, WORDS[part], own and seconds > 0, not own)


def _speeds(plan: Estimate, one_node: Estimate) -> Iterator[Fact]:
    gained, ideal = one_node.step_time.total / plan.step_time.total, plan.cluster.nodes
    used, left = plan.memory.total / plan.capacity, plan.capacity - plan.memory.total
    yield Fact("a step on one node", one_node.step_time.total, SECONDS, "node|8")
    yield Fact("the speed-up from one node", gained, TIMES, r"speed-?up|faster|as fast|scal", own=True)
    yield Fact("the share of the ideal speed-up", gained / ideal, SHARE, "ideal|linear|scal|efficien", own=True)
    yield Fact("the MFU", plan.mfu, SHARE, r"mfu|utili[sz]|peak", own=True)
    yield Fact("the share of the memory in use", used, SHARE, "memory")
    yield Fact("the memory that is left", left, BYTES, "left|free|headroom|spare|room", own=left > 0)
    for part, seconds in plan.step_time.parts.items():
        share, is_own = seconds / plan.step_time.total, part == "bubble" and seconds > 0
        yield Fact(f"{LABELS[part]}, as a share of a step", share, SHARE, WORDS[part], is_own)


def _traffic(plan: Estimate) -> Iterator[Fact]:
    message = 2 * plan.plan.micro_batch * plan.model.sequence * plan.model.hidden
    yield Fact("what a micro-batch is between two stages", message, BYTES, "messages?|micro-batch|activations?|stages?")
    for name, flow in plan.flows.items():
        yield Fact(f"what a device sends in a step, {LABELS[name]}", flow.bytes, BYTES, SENDING, own=True)
        yield Fact(f"sending, hidden or not, {LABELS[name]}", flow.seconds, SECONDS, WORDS[name])


def _pipeline(plan: Plan, micro_batches: int) -> Iterator[Fact]:
    """Facts by the formula for equal stages; a plan without stages counts as 4, with a quarter of the replicas."""
    stages, micro_batches = (plan.pp, micro_batches) if plan.pp > 1 else (4, min(4, plan.dp) * micro_batches)
    rounds = micro_batches + stages - 1
    yield Fact("the bubble by the formula", (stages - 1) / rounds, SHARE, "bubble|idle|1f1b|gpipe")
    yield Fact("idle with naive splitting", 1 - 1 / stages, SHARE, "idle|naive|bubble|waits?")
    yield Fact("busy with naive splitting", 1 / stages, SHARE, "busy|naive|works?|quarter|utili[sz]")
    yield Fact("pipelining against naive splitting", stages * micro_batches / rounds, TIMES, "naive", beside=True)
