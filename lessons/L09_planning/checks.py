"""The checks for planning: a plan's bytes on a device and in a step, the choice of a plan, and the time of a step.

All of them are functions of numbers. Where each rank is asked, each asks for other plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import Budget, Case, Observed
from course_lib.classroom.checks.tables import Plans, as_numbers, computing
from course_lib.planner import Cluster, Estimate, ModelSpec, Plan, estimate, search
from course_lib.planner.explain import LOSSES
from course_lib.planner.search import ALIKE
from course_lib.planner.spec import RECOMPUTE
from course_lib.ranks import Link, Pace
from course_lib.timeline import compute
from lessons.L09_planning.measured import SEEN, UNSEEN

# Memory


def held(parameters: int, dp: int, tp: int, pp: int, zero: int, precision: str) -> tuple[int, int, int]:
    weight, gradient, adam = {"bf16": (2, 2, 12), "fp32": (4, 4, 8)}[precision]
    mine = -(-parameters // (tp * pp))
    share = -(-mine // dp)
    weights = weight * (share if zero >= 3 else mine)
    gradients = gradient * (share if zero >= 2 else mine)
    return weights, gradients, adam * (share if zero >= 1 else mine)


def _memories(seed: int, rank: int) -> Plans:
    size, dp, zero = 1_680 * (3 + seed + rank), 4 + 2 * rank, 1 + (rank + seed) % 3
    return {
        "replicas alone": [(size, dp, 1, 1, 0, "bf16"), (2 * size, 2, 1, 1, 0, "bf16")],
        "ZeRO": [(size, dp, 1, 1, zero, "bf16"), (2 * size, 3, 1, 1, zero % 3 + 1, "bf16")],
        "tensor ranks and stages": [(size, 1, 4, 7, 0, "bf16"), (size, 2, 2, 5, 1, "bf16"), (size, 2, 2, 5, 3, "bf16")],
        "all in 32 bits": [(size, dp, 2, 1, zero, "fp32"), (size, 1, 1, 5, 0, "fp32")],
        "sizes that do not divide": [(size + 1, dp, 2, 3, zero, "bf16"), (size - 5, 8, 4, 1, 3, "fp32")],
    }


def _hold(plan: tuple, found: Any) -> None:
    """Allocate the bytes that were found."""
    assert len([torch.empty(int(n_bytes), dtype=torch.uint8) for n_bytes in found]) == 3


state_bytes_more = [(3, "replicas alone"), (3, "tensor ranks and stages"), (3, "ZeRO"), (4, "sizes that do not divide")]
price_case = "a plan with ZeRO-2", (40_000, 4, 2, 1, 2, "bf16")
state_bytes = computing("state_bytes", held, "plans with ", _memories, state_bytes_more, price_case, _hold)


# Traffic


def sent(
    parameters: int, layers: int, message: int, micro_batches: int, dp: int, tp: int, pp: int, stage: int, zero: int
) -> tuple[float, float, float]:
    trips = 3 * micro_batches if zero == 3 else 2
    data = trips * (dp - 1) / dp * 2 * parameters
    reductions = 4 * layers * micro_batches
    tensor = reductions * 2 * (tp - 1) / tp * message
    neighbors = (stage > 0) + (stage < pp - 1)
    return data, tensor, neighbors * micro_batches * message / tp


def _traffics(seed: int, rank: int) -> Plans:
    size, layers, message, m = 1_000 * (7 + rank), 3 + seed, 4_000 + 480 * rank, 5 + rank
    return {
        "replicas alone": [(size, layers, message, 1, 4 + rank, 1, 1, 0, 0), (size, layers, message, m, 3, 1, 1, 0, 1)],
        "ZeRO-3": [(size, layers, message, 1, 4, 1, 1, 0, 3), (size, layers, message, m, 2 + rank, 1, 1, 0, 3)],
        "tensor ranks": [(size, layers, message, 1, 1, 4, 1, 0, 0), (size, layers + 1, message, m, 2, 8, 1, 0, 0)],
        "stages": [(size, layers, message, m, 1, 1, 4, stage, 0) for stage in (0, 2, 3)],
        "everything together": [(size, layers, message, m, 5, 4, 3, stage, stage) for stage in (0, 1)],
    }


def _send(plan: tuple, _: Any) -> None:
    """Run a step of the plan as one stage, with messages in 16 bits."""
    parameters, layers, message, micro_batches, dp, tp, *_ = plan
    across, inside = init_device_mesh("cpu", (dp, tp)).get_all_groups()
    hidden = torch.ones(message // 2, dtype=torch.float16)
    for kind in [kind for _ in range(micro_batches) for kind in ("forward", "backward")]:
        for _ in range(layers):
            with compute(kind):
                hidden.fill_(1)
            dist.all_reduce(hidden, group=inside)
            dist.all_reduce(hidden, group=inside)
    dist.all_reduce(torch.ones(parameters, dtype=torch.float16), group=across)


step_traffic_more = [(3, "replicas alone"), (3, "ZeRO-3"), (3, "everything together"), (4, "everything together")]
traffic = "2 replicas of 2 tensor ranks, on 4 ranks", (6_000, 2, 800, 3, 2, 2, 1, 0, 0)
pace = Pace({"forward": 0.001, "backward": 0.002}, Link(latency=1e-5, bandwidth=2e6))
step_traffic = computing(
    "step_traffic", sent, "plans with ", _traffics, step_traffic_more, traffic, _send, pace=pace, rounding=1e-9
)


# A choice

ROOM, TRIES = 0.9, 500
GPT = partial(ModelSpec, vocab=51_200, flash_attention=True)
MODELS = {
    "1.3B": GPT(24, 2048, 16, 2048),
    "13B": GPT(40, 5120, 40, 2048),
    "30B": GPT(48, 7168, 56, 2048),
    "70B": GPT(80, 8192, 64, 4096, kv_heads=8, ffn_hidden=28672, gated_mlp=True, tied_embeddings=False),
}
CLUSTERS = {
    "A100": Cluster(nodes=4),
    "small A100": Cluster("A100-40GB", nodes=4),
    "A100 on a slow network": Cluster(nodes=4, between="Ethernet 25"),
}
GOOD = "a good plan"


def chosen(model: ModelSpec, cluster: Cluster, global_batch: int) -> Plan:
    cuts = itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), RECOMPUTE, (1, 3))
    tried = []
    for tp, pp, micro_batch, recompute, zero in cuts:
        dp, schedule = cluster.devices // (tp * pp), "zb_h1" if pp > 1 else "1f1b"
        try:
            plan = Plan(dp, tp, pp, micro_batch, schedule, 1, zero, tp > 1, recompute)
            tried.append(estimate(model, cluster, plan, global_batch))
        except ValueError:
            continue  # not a valid plan
    fitting = [one for one in tried if one.memory.total <= 0.9 * one.capacity]
    return min(fitting, key=lambda one: one.step_time.total).plan


def _choice(models: tuple[str, ...], cluster: str, seed: int, new: str = "") -> Case:
    samples = 64 * (1 + seed % 2)
    text = f"{' and '.join(models)} parameters on 32 {cluster}, {samples} samples"
    return Case(text, len(models), partial(_task, models, cluster, samples), new)


def _task(models: tuple[str, ...], cluster: str, global_batch: int, rank: int) -> tuple:
    """A model, a cluster and a minibatch for each rank, and the best plan, searched for once."""
    best = _best(models[rank], cluster, global_batch)
    return best.model, best.cluster, global_batch, models[rank], best


@cache
def _best(model: str, cluster: str, global_batch: int) -> Estimate:
    return search(MODELS[model], CLUSTERS[cluster], global_batch, within=ROOM).best


def _choices(seed: int) -> list[Case]:
    usual, large, half = ("1.3B", "13B"), ("13B", "30B", "70B"), "devices with half the memory"
    small = _choice(("1.3B", "13B", "30B"), "small A100", seed, half)
    return [_choice(usual, "A100", seed), _choice(large, "A100", seed, "larger models"), small]


class _EnoughError(Exception):
    """An error: more plans are estimated than are needed."""


def _play_choice(fn: Callable, model: ModelSpec, cluster: Cluster, global_batch: int, name: str, best: Estimate) -> str:
    """Choose a plan. Returns GOOD, or a sentence about the plan's flaw."""
    module = import_module("course_lib.planner.estimate")  # in the package, this name is the function
    measure, tries = module.memory_of_worst_device, itertools.count(1)

    def counted(*plan: Any) -> Any:
        if next(tries) > TRIES:
            raise _EnoughError
        return measure(*plan)

    try:
        with patch.object(module, "memory_of_worst_device", counted):
            plan = fn(model, cluster, global_batch)
    except _EnoughError:
        return f"For {name} parameters it tries more than {TRIES} plans."
    complaint = _complaint(plan, best)
    return f"For {name} parameters, {complaint}" if complaint else GOOD


def _complaint(plan: Any, best: Estimate) -> str:
    if not isinstance(plan, Plan):
        return f"a Plan is asked for, and this is of type {type(plan).__name__}."
    try:
        found = estimate(best.model, best.cluster, plan, best.global_batch)
    except ValueError as error:
        return f"this plan cannot be: {error}."
    shape = f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp}, {plan.schedule}, micro-batches of {plan.micro_batch}, "
    shape += f"ZeRO {plan.zero}, recompute {plan.recompute}"
    need, room = found.memory.total / 2**30, ROOM * found.capacity / 2**30
    if need > room:
        largest = max(found.memory.parts, key=lambda part: found.memory.parts[part])
        return f"{shape} needs {need:.0f} GiB, and there is room for {room:.0f}. One of its largest parts is {largest}."
    slower = found.step_time.total / best.step_time.total
    more = {part: seconds - best.step_time.parts[part] for part, seconds in found.step_time.parts.items()}
    nodes = "Its tensor ranks lie on several nodes. " * (plan.tp > best.cluster.devices_per_node)
    most = LOSSES.get(max(more, key=lambda part: more[part]), ["computing"])[0]
    where = f"fits, and its step takes {slower:.2f} times as long as it could. {nodes}What it loses most by, beside"
    return f"{shape} {where} the best: {most}." * (slower > ALIKE)


def _said(observed: list[Observed]) -> str:
    return next((one for seen in observed if (one := str(seen.values["the result"])) != GOOD), "")


priced_choice = _choice(("13B", "70B"), "A100 on a slow network", seed=0, new="a network an eighth as fast")
choose = Exercise("choose", chosen, _play_choice, _choices, priced_choice, rule=_said, by_rank=False)


# The time of a step, beside real machines


def at_peak(model: ModelSpec, plan: Plan, samples: int, network: float) -> float:
    flops = model.step_flops(samples) + model.recomputed_flops(samples, "full")
    return flops / (plan.devices * 312e12)


def with_traffic(model: ModelSpec, plan: Plan, samples: int, network: float) -> float:
    m, message = plan.micro_batches(samples), 2 * plan.micro_batch * model.sequence * model.hidden
    reductions = 6 * model.layers / plan.pp * m
    tensor = reductions * 2 * (plan.tp - 1) / plan.tp * message / 230e9
    data = 2 * (plan.dp - 1) / plan.dp * 4 * model.parameters / (plan.tp * plan.pp) / network
    bubble = (plan.pp - 1) / (plan.virtual_stages * m)
    return (at_peak(model, plan, samples, network) / 0.58 + tensor) * (1 + bubble) + data


def _play_prediction(fn: Callable, steps: str) -> dict[str, Any]:
    """Predict the steps of a table. Compared is what holds of every prediction; the rest says how good it is."""
    table = {"seen": SEEN, "unseen": UNSEEN}[steps]
    found = as_numbers([fn(*step[1:5]) for step in table])
    if not isinstance(found, torch.Tensor) or found.shape != (len(table),) or not (found > 0).all():
        return {"seconds of each step": f"{found[0]}, of the first"}
    ask = partial(fn, table[0].model)
    one, *others = (ask(plan, n, 1e10) for plan, n in ((Plan(4, 8), 512), (Plan(4, 8), 1024), (Plan(8, 8), 512)))
    twice, wider = (("as long", "longer", "shorter")[int(other > one) - int(other < one)] for other in others)
    certain = {"seconds of each step": "a number", "twice the samples": twice, "twice the replicas": wider}
    ratios = found / torch.tensor([step.seconds for step in table])
    off, usual = (ratios - 1).abs(), float(ratios.median())
    name, _, plan, samples, *_ = table[worst := int(off.argmax())]
    shape = f"{name}, dp {plan.dp} x tp {plan.tp} x pp {plan.pp}, {plan.micro_batches(samples)} micro-batches"
    far, more = max((usual, "long"), (1 / usual, "short"))
    common = f"By yours, half of the steps are {far:,.0f} times as {more} as they were, or more. " * (far > 3)
    all_off = f"By yours, all steps are too {more}. " * bool(((ratios > 1) == (usual > 1)).all())
    same = ask(Plan(pp=8), 800, 1e10) > 0.9 * ask(Plan(), 800, 1e10)
    alone = "By yours, 8 stages take as long as one, with 800 micro-batches. What do the others do meanwhile? " * same
    how = f"Furthest off, too {'long' if ratios[worst] > 1 else 'short'}: {shape}."
    return certain | {"percent off": 100 * off.mean(), "said": (alone or common + _ignored(ask) or all_off) + how}


def _ignored(ask: Callable[[Plan, int, float], float]) -> str:
    """A sentence about something that a function ignores, or puts in the wrong place; "" if these looks see nothing."""
    same = partial(math.isclose, rel_tol=1e-6)

    def lost(pp: int, network: float = 1e10) -> float:
        """What 8 tensor ranks take longer than 8 replicas, for as many samples, on a network without end."""
        return ask(Plan(tp=8, pp=pp), 800, network) - ask(Plan(dp=8, pp=pp), 6400, 1e30) / 8

    few = ask(Plan(pp=8), 8, 1e10) / ask(Plan(pp=8), 800, 1e10)
    slow, fast = (ask(Plan(dp=16), 64, network) for network in (1e10, 1e11))
    looks = {
        "8 tensor ranks lose less on a faster network between nodes. Where are they?": not same(lost(1), lost(1, 1e11)),
        "8 tensor ranks lose over half as much in one of 8 stages. Whose layers are there?": 2 * lost(8) > lost(1) > 0,
        f"8 samples through 8 stages take {few:.2%} of the time of 800. How many turns has each?": few < 0.017,
        "8 tensor ranks take as long as 8 replicas. What do they send, and how often?": same(lost(1) + 1, 1),
        "a step takes as long on a network ten times as fast. What do replicas send over it?": same(slow, fast),
    }
    return next((f"By yours, {text} " for text, is_so in looks.items() if is_so), "")


def _certain(observed: list[Observed]) -> list[Any]:
    return [{n: v for n, v in seen.values.items() if not n.endswith(("[percent off]", "[said]"))} for seen in observed]


def _where_it_is_off(observed: list[Observed]) -> str:
    return str(observed[0].values.get("the result[said]", ""))


levels = Budget("percent off on average", 12, 9, with_traffic)
tables = [Case("the ten steps of the table", 2, lambda _: ("seen",))], Case("twelve others", 2, lambda _: ("unseen",))
by_table = partial(Exercise, compared=_certain, rule=_where_it_is_off, budget=levels, by_rank=False)
predict_step = by_table("predict_step", at_peak, _play_prediction, lambda seed: tables[0], tables[1])
