"""The cost of one training step under a plan: memory, time by part, traffic by link, and why.

    step  =  micro-batches x (compute + what is computed again + exposed tensor and context traffic)
           + exposed messages between stages + bubble
           + exposed traffic of gradients and parameters + optimizer

on the slowest device. *Exposed* is the part of some traffic that the device waits for; the rest is *hidden* behind
computation. The first line is compute.py and communication.py, the second is bubbles.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from course_lib.planner import explain, memory
from course_lib.planner.bubbles import Work, bubble_seconds, exposed_messages
from course_lib.planner.communication import Spread, all_to_all, bytes_sent, collective_seconds, group, message_seconds
from course_lib.planner.compute import SIZE, LayerTimes, layer_times, logits_times, streaming_seconds
from course_lib.planner.hardware import LINKS, NINETY_PERCENT, Cluster, Interconnect
from course_lib.planner.memory import Fit, Memory, candidates, memory_of_worst_device, rank_shape, recipe, share
from course_lib.planner.simulate import simulate
from course_lib.planner.spec import V_SHAPED, Depth, ModelSpec, Plan, Slice, layers_of_stages
from course_lib.timeline import Timeline

# The share of overlappable traffic that is really hidden: it takes cores and memory bandwidth from the computation, and
# its first and last pieces have nothing to hide behind. Fitted to all published steps together.
HIDES = 0.5
# How much further steps of mixtures of experts lie from estimates than others: a standard deviation of the logarithm.
ROUTED_APART = 0.12
# Bytes of a parameter that is gathered in 8 bits, as by Megatron Core (fp8_param_gather), which gathers none in 4.
GATHERED = {"fp8": 1, "mxfp8": 1}
NOTHING = Work(0.0, 0.0, 0.0)
Pair: TypeAlias = "tuple[float, float]"


class Flow(NamedTuple):
    """One kind of traffic of one device in one step.

    bytes: sent.  link: the slowest on the way.  seconds: its duration.  exposed: how much longer the step is because of
    it: the device waits, or computes more slowly while the traffic takes its share.
    """

    bytes: float
    link: str
    seconds: float
    exposed: float


class StepTime(NamedTuple):
    """Seconds of one step on the slowest device, by part; the parts add up to the step.

    low, high: 90% of steps take no less and no more. spread: how far that is to each side, in logarithms.
    """

    compute: float
    recompute: float
    tensor: float
    context: float
    experts: float
    pipeline: float
    bubble: float
    data: float
    optimizer: float
    spread: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        return {name: seconds for name, seconds in self._asdict().items() if name != "spread"}

    @property
    def low(self) -> float:
        return self.around(self.total)[0]

    @property
    def high(self) -> float:
        return self.around(self.total)[1]

    def around(self, middle: float) -> tuple[float, float]:
        """The interval around any value that is as uncertain as the step."""
        return middle * math.exp(-self.spread), middle * math.exp(self.spread)

    @property
    def total(self) -> float:
        return sum(self[:-1])


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of a plan. `flows` has every kind of traffic."""

    model: ModelSpec
    cluster: Cluster
    plan: Plan
    global_batch: int
    memory: Memory
    step_time: StepTime
    flows: dict[str, Flow]

    @property
    def fit(self) -> Fit:
        """Whether it "fits" with any software, "may fit" with lean software, or "does not fit"."""
        return self.memory.fit(self.capacity)

    @property
    def fits(self) -> bool:
        """Whether it fits with any software."""
        return self.fit == "fits"

    @property
    def capacity(self) -> float:
        """Bytes of a device; the part that a step cannot use is in the memory's margin."""
        return self.cluster.spec.memory

    @property
    def why(self) -> str:
        """The binding constraint, what would loosen it, and whether steps like this one were published, in words."""
        parts, evidence = self.step_time.parts, explain.evidence(self.model, self.plan, self.cluster)
        return f"{explain.why(self.plan, self.memory, self.capacity, parts)} {evidence}"

    @property
    def bubble(self) -> float:
        """The share of the step in which the slowest device waits for its turn in the pipeline, 0 to 1."""
        return self.step_time.bubble / self.step_time.total

    @property
    def traffic(self) -> dict[str, float]:
        """Bytes that one device sends in a step, by the slowest link on the way."""
        by_link: dict[str, float] = {}
        for flow in self.flows.values():
            by_link[flow.link] = by_link.get(flow.link, 0.0) + flow.bytes
        return by_link

    @property
    def tokens_per_second(self) -> float:
        return self.global_batch * self.model.sequence / self.step_time.total

    @property
    def interval(self) -> str:
        """The interval in words: its origin, and whether published steps are like this one or it is extrapolated."""
        range_of = " to ".join(map(explain.in_seconds, (self.step_time.low, self.step_time.high)))
        evidence = explain.evidence(self.model, self.plan, self.cluster)
        return f"90% of such steps take {range_of}, by {self.cluster.spread_from}. {evidence}"

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the FLOPs that a step needs, by those that the devices could do in its time."""
        available = self.step_time.total * self.cluster.devices * self.cluster.spec.peak[self.plan.precision]
        return self.model.step_flops(self.global_batch) / available

    @property
    def flops(self) -> float:
        """FLOPs of all devices in one step, recomputed ones included."""
        again = self.plan.recomputed * self.model.recomputed_flops(self.global_batch, self.plan.recompute)
        return self.model.step_flops(self.global_batch) + again

    def timeline(self) -> Timeline:
        """The step of one pipeline, simulated action by action, followed by gradient traffic and the optimizer."""
        model, plan = self.model, self.plan
        layer = layer_cost(model, self.cluster, plan.slice)
        *others, last = layers_of_stages(model.layers, plan.depth.n_stages)
        works = [*(work_of(layers, layer.work) for layers in others), work_of(last, layer.work, layer.logits)]
        message = _message_seconds(model, self.cluster, plan) if plan.pp > 1 else 0.0
        forward, backward, weight_grad = map(list, zip(*works, strict=True))
        schedule = plan.depth.schedule_of(plan.micro_batches(self.global_batch))
        return simulate(schedule, forward, backward, weight_grad, message)


def estimate(model: ModelSpec, cluster: Cluster, plan: Plan, global_batch: int) -> Estimate:
    """Memory, time and traffic of one step.

    Raises ValueError for a plan that cannot exist, with what to change.
    """
    plan.check(model, cluster.devices, global_batch)
    if plan.precision not in cluster.spec.peak:
        known = ", ".join(cluster.spec.peak)
        raise ValueError(f"precision={plan.precision!r} is nothing {cluster.device} computes in; it has {known}")
    return unchecked_estimate(model, cluster, plan, global_batch)


def unchecked_estimate(model: ModelSpec, cluster: Cluster, plan: Plan, global_batch: int) -> Estimate:
    """The estimate of a plan that is known to be legal."""
    m = plan.micro_batches(global_batch)
    pace = _pace(model, cluster, plan.slice, plan.depth)
    layer, work = pace.layer, pace.layers * m
    flows = {
        **{name: _scaled(getattr(layer, name), work) for name in ("tensor", "context", "experts")},
        "pipeline": _pipeline_flow(model, cluster, plan, m, pace.lead),
        "data": _data_flow(model, cluster, plan, m, pace),
    }
    time = StepTime(
        compute=work * layer.compute + m * pace.logits,
        recompute=work * layer.again,
        bubble=bubble_seconds(plan, m, pace.slowest, pace.others) if plan.pp > 1 else 0.0,
        optimizer=_optimizer_seconds(cluster, plan, pace),
        spread=math.hypot(cluster.spread, NINETY_PERCENT * ROUTED_APART if model.experts else 0.0),
        **{name: flow.exposed for name, flow in flows.items()},
    )
    flows = {name: flow for name, flow in flows.items() if flow.seconds}
    return Estimate(model, cluster, plan, global_batch, memory_of_worst_device(model, plan, m), time, flows)


class LayerCost(NamedTuple):
    """The cost of one micro-batch in one layer on one device: seconds, traffic included, and their parts.

    logits: further seconds, for the last product and the loss.
    """

    work: Work
    logits: Work
    compute: float
    again: float
    tensor: Flow
    context: Flow
    experts: Flow


@lru_cache(maxsize=4096)
def layer_cost(model: ModelSpec, cluster: Cluster, cut: Slice) -> LayerCost:
    times = layer_times(model, cluster.spec, cut)
    (seconds, once), (seconds_back, back), n_bytes = _tensor_traffic(model, cluster, cut, times)
    forwards = cut.forwards
    tensor = Flow(n_bytes, _link(cluster, cut.tp).name, forwards * seconds + seconds_back, forwards * once + back)
    gather, context_bytes = _context_traffic(model, cluster, cut)
    passes = (forwards + 2) * gather
    context = Flow(context_bytes, _link(cluster, cut.tp * cut.cp).name, passes, passes)
    experts = _expert_flow(model, cluster, cut, times.forward + times.backward)
    routed = experts.exposed / (forwards + 1)
    again = cut.recomputed * {"none": 0.0, "selective": times.selective, "full": times.forward}[cut.recompute]
    # Activations wait on the host while others are computed; what is exposed is their price, like recomputing them.
    away = cut.offloaded * memory.layer_activations(model, cut, cut.recompute) / LINKS[cluster.spec.host].achieved
    again += max(away - times.forward, 0.0) + max(away - times.backward - times.weight_grad, 0.0)
    work = Work(
        times.forward + once + gather + routed,
        times.backward + again + (forwards - 1) * (once + gather) + back + 2 * gather + forwards * routed,
        times.weight_grad,
    )
    logits = Work(*logits_times(model, cluster.spec, cut))
    return LayerCost(work, logits, times.forward + times.backward + times.weight_grad, again, tensor, context, experts)


def _link(cluster: Cluster, span: int) -> Interconnect:
    """The slowest link within a group of devices whose first and last are `span` apart."""
    return cluster.inside_link if span <= cluster.devices_per_node else cluster.between_link


def _tensor_traffic(model: ModelSpec, cluster: Cluster, cut: Slice, times: LayerTimes) -> tuple[Pair, Pair, float]:
    """A layer's tensor traffic: seconds and exposed seconds, forward and backward, and bytes sent.

    Two all-reduces forward, two backward (Megatron's g and f); one each where routed experts, which are not cut, are
    the only MLP. The backward ones sum gradients of inputs, so they can run while the gradients of the weights are
    computed. Sequence parallelism splits each all-reduce into an all-gather and a reduce-scatter of the same size in
    all, and gathers the inputs of products again in backward. Each has a product beside it, which can begin with the
    first piece that is gathered and scatter the first that is done.
    """
    ranks = group(cut.tp, 1, cluster.devices_per_node)
    n_bytes, blocks = _hidden_states(model, cut), 1 + (model.mlp_width > 0)
    sent = (cut.forwards + 1) * blocks * bytes_sent("all_reduce", n_bytes, cut.tp)
    if not cut.sequence_parallel:
        both = blocks * collective_seconds("all_reduce", n_bytes, ranks, cluster)
        return (both, both), (both, _exposed(both, times.weight_grad, cut.hides_tensor)), sent
    gather = blocks * collective_seconds("all_gather", n_bytes, ranks, cluster)
    scatter = blocks * collective_seconds("reduce_scatter", n_bytes, ranks, cluster)
    once, back = gather + scatter, 2 * gather + scatter
    forward = once, _exposed(once, times.forward, cut.hides_tensor)
    backward = back, _exposed(back, times.backward + times.weight_grad, cut.hides_tensor)
    return forward, backward, sent + blocks * bytes_sent("all_gather", n_bytes, cut.tp)


def _exposed(seconds: float, behind: float, is_hidden: bool) -> float:
    """The exposed part of traffic that may run during `behind` seconds of computation."""
    return seconds - HIDES * min(seconds, behind) if is_hidden else seconds


def _context_traffic(model: ModelSpec, cluster: Cluster, cut: Slice) -> tuple[float, float]:
    """Seconds of one all-gather of keys and values over the positions, and a layer's bytes in all.

    They are gathered forward, gathered again backward, and their gradients scattered: three passes of the same size.
    """
    ranks = group(cut.cp, cut.tp, cluster.devices_per_node)
    width = 2 * model.key_value_width / min(cut.tp, model.key_value_heads)
    n_bytes = SIZE[cut.precision] * cut.micro_batch * model.sequence * width
    seconds = collective_seconds("all_gather", n_bytes, ranks, cluster)
    return seconds, (cut.forwards + 2) * bytes_sent("all_gather", n_bytes, cut.cp)


def _expert_flow(model: ModelSpec, cluster: Cluster, cut: Slice, computing: float) -> Flow:
    """A layer's all-to-alls for one micro-batch: tokens to their experts and back, and the same for their gradients.

    Each takes as long as the busiest rank. Hidden ones run during the computation of another micro-batch.
    """
    ranks, passes = group(cut.ep, 1, cluster.devices_per_node), 2 * (cut.forwards + 1)
    n_bytes, once = _hidden_states(model, cut) / cut.tp, cut.dispatch == "fused"
    sent, one = all_to_all(n_bytes, model.active_experts, ranks, cluster, once)
    seconds = passes * model.imbalance * one
    return Flow(passes * sent, _link(cluster, cut.ep).name, seconds, _exposed(seconds, computing, cut.hides_experts))


def _scaled(flow: Flow, times: float) -> Flow:
    return Flow(flow.bytes * times, flow.link, flow.seconds * times, flow.exposed * times)


class SlowestRank(NamedTuple):
    """The work of the slowest pipeline rank for a micro-batch. Many plans share it.

    layers: on that rank.  others: seconds of all other ranks together.  logits: seconds on that rank.  lead: how much
    longer the last rank takes than the others, if it is the slowest.  parameters: on the device that holds most,
    without those of routed experts.
    """

    layer: LayerCost
    layers: int
    slowest: Work
    others: float
    logits: float
    lead: float
    parameters: int
    routed: int


@lru_cache(maxsize=4096)
def _pace(model: ModelSpec, cluster: Cluster, cut: Slice, depth: Depth) -> SlowestRank:
    layer = layer_cost(model, cluster, cut)
    logits, found, parameters, routed = layer.logits, [], 0, 0
    for rank in candidates(model, depth):
        held, layers, _, has_logits = rank_shape(model, depth, rank)
        found.append((work_of(layers, layer.work, logits if has_logits else NOTHING), layers, has_logits))
        parameters = max(parameters, share(held.cut, cut.tp) + held.whole)
        routed = max(routed, held.routed // cut.ep)
    slowest, layers, has_logits = max(found, key=lambda one: one[0].total)
    others = model.layers * layer.work.total + logits.total - slowest.total
    lead = slowest.total - others / (depth.pp - 1) if has_logits and depth.pp > 1 else 0.0
    return SlowestRank(layer, layers, slowest, others, sum(logits) if has_logits else 0.0, lead, parameters, routed)


def work_of(layers: int, layer: Work, logits: Work = NOTHING) -> Work:
    return Work(layers * layer[0] + logits[0], layers * layer[1] + logits[1], layers * layer[2] + logits[2])


def _pipeline_flow(model: ModelSpec, cluster: Cluster, plan: Plan, m: int, lead: float) -> Flow:
    """Hidden states to the next stage, their gradients back.

    Tensor ranks hold the same hidden states (or a slice each, under sequence parallelism), so each sends a slice and
    the receivers gather them inside their node: the scatter/gather optimization of the 2021 paper, section 4.1.
    """
    if plan.pp == 1:
        return Flow(0.0, "", 0.0, 0.0)
    seconds, sent = _message_seconds(model, cluster, plan), _hidden_states(model, plan.slice) / plan.tp
    count = (1 if plan.pp == 2 and plan.virtual_stages == 1 else 2) * plan.virtual_stages * m
    exposed = exposed_messages(plan, m, lead / seconds) * seconds
    return Flow(count * sent, _link(cluster, plan.devices).name, max(count * seconds, exposed), exposed)


def _hidden_states(model: ModelSpec, cut: Slice) -> float:
    """Bytes of one micro-batch between two layers."""
    return SIZE[cut.precision] * cut.micro_batch * model.sequence / cut.cp * model.hidden


def _message_seconds(model: ModelSpec, cluster: Cluster, plan: Plan) -> float:
    n_bytes = _hidden_states(model, plan.slice)
    seconds = message_seconds(n_bytes / plan.tp, _link(cluster, plan.devices))
    if plan.tp > 1 and not plan.sequence_parallel:
        tensor = group(plan.tp, 1, cluster.devices_per_node)
        seconds += collective_seconds("all_gather", n_bytes, tensor, cluster)
    return seconds


def _data_flow(model: ModelSpec, cluster: Cluster, plan: Plan, m: int, pace: SlowestRank) -> Flow:
    """Gradients are summed over the replicas, with ZeRO parameters are gathered, and a tied matrix is kept equal.

    In hybrid sharding ZeRO's traffic stays among the ranks that shard, and gradient shards are summed once across them.

    Traffic that is ready while there is still something to compute can be hidden: the last micro-batch's gradients
    during its backward, except for one layer's, and gathered parameters during a forward.
    """
    operations = _summed_over(cluster, plan, m, pace.parameters, plan.tp, plan.sharing)
    if pace.routed:
        operations += _summed_over(cluster, plan, m, pace.routed, plan.ep, plan.expert_sharing)
    inside = all(members.nodes == 1 for members, *_ in operations)
    links = cluster.inside_link if inside else cluster.between_link
    n_bytes = taken = exposed = 0.0
    layers = max(pace.layers, 1)
    free = {"forward": pace.slowest.forward, "backward": pace.slowest.backward + pace.slowest.weight_grad}
    for members, numbers, op, size, times, behind in operations:
        if members.size > 1:
            pieces = layers if plan.zero == 3 and op != "all_reduce" else 1  # which gathers layer by layer
            seconds = pieces * collective_seconds(op, size * numbers / pieces, members, cluster)
            hidden = min(seconds * (1 - 1 / layers), free[behind]) if "data" in plan.overlap else 0.0
            free[behind] -= hidden  # hidden traffic displaces other traffic there
            n_bytes += times * bytes_sent(op, size * numbers, members.size)
            taken += times * seconds
            exposed += times * (seconds - hidden * HIDES)
    if model.tied_embeddings and plan.pp > 1 and plan.schedule not in V_SHAPED:
        matrix = recipe(plan).gradient * model.vocab * model.hidden / plan.tp
        seconds = collective_seconds("all_reduce", matrix, Spread(2, 1), cluster)
        n_bytes, taken, exposed = n_bytes + matrix, taken + seconds, exposed + seconds
    return Flow(n_bytes, links.name, taken, exposed)


def _summed_over(
    cluster: Cluster, plan: Plan, m: int, parameters: int, stride: int, sharing: int
) -> list[tuple[Spread, int, str, int, int, str]]:
    """The collectives of parameters whose replicas are `stride` devices apart; groups of `sharing` shard them."""
    shards = group(sharing, stride, cluster.devices_per_node)
    replicas = plan.dp * plan.cp * plan.tp // stride
    copies = group(replicas // sharing, stride * sharing, cluster.devices_per_node)
    whole = copies, share(parameters, sharing), "all_reduce", recipe(plan).gradient, 1, "backward"
    return [*((shards, parameters, *operation) for operation in _data_operations(plan, m)), whole]


def _data_operations(plan: Plan, m: int) -> list[tuple[str, int, int, str]]:
    """The collectives of a step: operation, bytes of a number, how often, and the computation that can hide them."""
    size, activation = recipe(plan).gradient, GATHERED.get(plan.precision, SIZE[plan.precision])
    rounds = m // plan.pp if plan.schedule == "interleaved_1f1b" else m  # which has pp of a stage after each other
    return {
        0: [("all_reduce", size, 1, "backward")],
        1: [("reduce_scatter", size, 1, "backward"), ("all_gather", activation, 1, "forward")],
        2: [("reduce_scatter", size, rounds, "backward"), ("all_gather", activation, 1, "forward")],
        3: [("reduce_scatter", size, m, "backward")]
        + [("all_gather", activation, m, behind) for behind in ("forward", "backward")],
    }[plan.zero]


def _optimizer_seconds(cluster: Cluster, plan: Plan, pace: SlowestRank) -> float:
    """Seconds of Adam, which computes little and moves much: the state is read and written, gradients are read twice
    (once for their norm) and cleared, parameters written."""
    size = recipe(plan)
    parameters = pace.parameters + pace.routed
    mine = share(pace.parameters, plan.sharing) + share(pace.routed, plan.expert_sharing) if plan.zero else parameters
    moved = mine * (2 * size.optimizer + 2 * size.gradient + size.parameter) + parameters * size.gradient
    return streaming_seconds(moved, cluster.spec)
