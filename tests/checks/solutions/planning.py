"""Solutions to the exercise on planning, as students write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from course_lib import checks
from course_lib.checks.exercise import Exercise
from course_lib.checks.planning import chosen, held, sent
from course_lib.planner import Plan, estimate
from course_lib.planner.communication import bytes_sent
from course_lib.planner.memory import model_state

# state_bytes, right


def by_the_planner(parameters: int, dp: int, tp: int, pp: int, zero: int, precision: str) -> Any:
    return model_state(-(-parameters // (tp * pp)), Plan(dp, tp, pp, zero=zero, precision=precision))


def in_one_division(parameters: int, dp: int, tp: int, pp: int, zero: int, precision: str) -> list[int]:
    """Rounded up once: the same as rounding after each cut."""
    sizes = [2, 2, 4 + 4 + 4] if precision == "bf16" else [4, 4, 4 + 4]
    return [
        size * math.ceil(Fraction(parameters, tp * pp * (dp if zero >= stage else 1)))
        for size, stage in zip(sizes, (3, 2, 1), strict=True)
    ]


def step_by_step(parameters: int, dp: int, tp: int, pp: int, zero: int, precision: str) -> Any:
    numbers = [(parameters + tp * pp - 1) // (tp * pp)] * 3
    for stage in range(1, zero + 1):
        numbers[-stage] = (numbers[-stage] + dp - 1) // dp
    weights, gradients, adam = numbers
    if precision == "fp32":
        return 4 * weights, 4 * gradients, 8 * adam
    return 2 * weights, 2 * gradients, 12 * adam


def by_cutting(parameters: int, dp: int, tp: int, pp: int, zero: int, precision: str) -> Any:
    """Real pieces, the largest of which is the first."""
    mine = torch.zeros(parameters, dtype=torch.bool).tensor_split(tp * pp)[0]
    share = mine.tensor_split(dp)[0]
    one, state = (2, 12) if precision == "bf16" else (4, 8)
    rows = [len(share if zero >= stage else mine) for stage in (3, 2, 1)]
    return torch.tensor(rows) * torch.tensor([one, one, state])


# state_bytes, wrong


def all_in_one(parameters: int, dp: int, tp: int, pp: int, zero: int, precision: str) -> int:
    return sum(held(parameters, dp, tp, pp, zero, precision))


def of_all_devices(parameters: int, dp: int, tp: int, pp: int, zero: int, precision: str) -> list[int]:
    return [dp * one for one in held(parameters, dp, tp, pp, zero, precision)]


def in_numbers(parameters: int, dp: int, tp: int, pp: int, zero: int, precision: str) -> list[float]:
    weights, gradients, adam = held(parameters, dp, tp, pp, zero, precision)
    return [weights / 2, gradients / 2, adam / 2]


def optimizer_first(parameters: int, dp: int, tp: int, pp: int, zero: int, precision: str) -> list[int]:
    return list(reversed(held(parameters, dp, tp, pp, zero, precision)))


def prints_bytes(parameters: int, dp: int, tp: int, pp: int, zero: int, precision: str) -> None:
    print(held(parameters, dp, tp, pp, zero, precision))


# step_traffic, right


def by_rings(
    parameters: int, layers: int, message: int, micro_batches: int, dp: int, tp: int, pp: int, stage: int, zero: int
) -> Any:
    """With what the planner knows of rings."""
    weights = 2.0 * parameters
    data = bytes_sent("all_reduce", weights, dp)
    if zero == 3:
        gathered, scattered = (bytes_sent(op, weights, dp) for op in ("all_gather", "reduce_scatter"))
        data = micro_batches * (2 * gathered + scattered)
    tensor = micro_batches * layers * 4 * bytes_sent("all_reduce", message, tp)
    return data, tensor, sum(0 <= stage + way < pp for way in (-1, 1)) * micro_batches * message / tp


def exactly(
    parameters: int, layers: int, message: int, micro_batches: int, dp: int, tp: int, pp: int, stage: int, zero: int
) -> Any:
    data = Fraction(2 * parameters * (dp - 1), dp) * (3 * micro_batches if zero == 3 else 2)
    tensor = Fraction(8 * message * (tp - 1), tp) * layers * micro_batches
    pipeline = Fraction(message, tp) * micro_batches * len({0, pp - 1} - {stage} if pp == 2 else [])
    if pp > 2:
        pipeline = Fraction(message, tp) * micro_batches * (1 if stage in (0, pp - 1) else 2)
    return [float(data), float(tensor), float(pipeline)]


def message_by_message(
    parameters: int, layers: int, message: int, micro_batches: int, dp: int, tp: int, pp: int, stage: int, zero: int
) -> Any:
    """Counted as it happens."""
    data = tensor = pipeline = 0.0
    for _ in range(micro_batches):
        for is_forward in (True, False):
            for _ in range(layers):
                tensor += 2 * 2 * (tp - 1) * message / tp
            if (is_forward and stage < pp - 1) or (not is_forward and stage > 0):
                pipeline += message / tp
        if zero == 3:
            data += 3 * (dp - 1) * 2 * parameters / dp
    if zero < 3:
        data = 4 * parameters * (dp - 1) / dp
    return data, tensor, pipeline


def as_tensors(
    parameters: int, layers: int, message: int, micro_batches: int, dp: int, tp: int, pp: int, stage: int, zero: int
) -> Tensor:
    passes = torch.tensor([3 * micro_batches if zero == 3 else 2, 8 * layers * micro_batches], dtype=torch.float64)
    sizes, n = torch.tensor([2 * parameters, message]), torch.tensor([dp, tp], dtype=torch.float64)
    both = passes * sizes * (n - 1) / n
    borders = (pp > 1) + (0 < stage < pp - 1)
    return torch.cat([both, torch.tensor([borders * micro_batches * message / tp], dtype=torch.float64)])


# step_traffic, wrong


def all_traffic(
    parameters: int, layers: int, message: int, micro_batches: int, dp: int, tp: int, pp: int, stage: int, zero: int
) -> float:
    return sum(sent(parameters, layers, message, micro_batches, dp, tp, pp, stage, zero))


def of_all_replicas(
    parameters: int, layers: int, message: int, micro_batches: int, dp: int, tp: int, pp: int, stage: int, zero: int
) -> Any:
    data, *others = sent(parameters, layers, message, micro_batches, dp, tp, pp, stage, zero)
    return dp * data, *others


def in_bits(
    parameters: int, layers: int, message: int, micro_batches: int, dp: int, tp: int, pp: int, stage: int, zero: int
) -> Any:
    return [8 * one for one in sent(parameters, layers, message, micro_batches, dp, tp, pp, stage, zero)]


def pipeline_before_tensor(
    parameters: int, layers: int, message: int, micro_batches: int, dp: int, tp: int, pp: int, stage: int, zero: int
) -> Any:
    data, tensor, pipeline = sent(parameters, layers, message, micro_batches, dp, tp, pp, stage, zero)
    return data, pipeline, tensor


def nothing_of_it(
    parameters: int, layers: int, message: int, micro_batches: int, dp: int, tp: int, pp: int, stage: int, zero: int
) -> Any:
    return sent(parameters, layers, message, micro_batches, 1, tp, pp, stage, zero)


# choose, right


def two_kinds(model: Any, cluster: Any, global_batch: int) -> Plan:
    """Replicas with ZeRO, or a pipeline: the faster of both."""
    best, shortest = None, math.inf
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8):
            for micro_batch in (1, 2, 4):
                for recompute in ("none", "selective", "full"):
                    plan = Plan(32 // tp // pp or 1, tp, pp, micro_batch, recompute=recompute, zero=1 if pp > 1 else 3)
                    plan = replace(plan, sequence_parallel=tp > 1, schedule="zb_h1" if pp > 1 else "1f1b")
                    for one in [plan] if pp > 1 else [plan, replace(plan, zero=1)]:
                        try:
                            found = estimate(model, cluster, one, global_batch)
                        except ValueError:
                            continue
                        if found.memory.total < 0.9 * found.capacity and found.step_time.total < shortest:
                            best, shortest = one, found.step_time.total
    assert best
    return best


def without_what_never_wins(model: Any, cluster: Any, global_batch: int) -> Plan:
    """Sixteen devices or more for one replica are too many here, and recomputing everything is too slow."""
    found = []
    cuts = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4, 8) if tp * pp <= 16]
    for tp, pp in cuts:
        for micro_batch in (1, 2, 4):
            for recompute in ("none", "selective"):
                for zero in (1, 3) if pp == 1 else (1,):
                    how: dict[str, Any] = {"schedule": "zb_h1" if pp > 1 else "1f1b", "sequence_parallel": tp > 1}
                    plan = Plan(32 // (tp * pp), tp, pp, micro_batch, zero=zero, recompute=recompute, **how)
                    if global_batch % (plan.dp * micro_batch) == 0:
                        found.append(estimate(model, cluster, plan, global_batch))
    found.sort(key=lambda one: one.step_time.total)
    return next(one.plan for one in found if one.memory.total <= 0.9 * one.capacity)


def with_more_room(model: Any, cluster: Any, global_batch: int) -> Plan:
    """A plan that leaves more than was asked for is welcome, where it costs nothing."""
    found, first = [], chosen(model, cluster, global_batch)
    for plan in [replace(first, micro_batch=size) for size in (1, 2, 4)]:
        try:
            found.append(estimate(model, cluster, plan, global_batch))
        except ValueError:
            continue
    found = [one for one in found if one.memory.total <= 0.9 * one.capacity]
    shortest = min(one.step_time.total for one in found)
    near = [one for one in found if one.step_time.total <= 1.01 * shortest]
    return min(near, key=lambda one: one.memory.total).plan


def the_simplest_of_the_fastest(model: Any, cluster: Any, global_batch: int) -> Plan:
    """Of two that are good, that with fewer stages."""
    plans = [search(model, cluster, global_batch) for search in (chosen, without_what_never_wins)]
    return min(plans, key=lambda plan: plan.pp)


# choose, wrong


def across_nodes(model: Any, cluster: Any, global_batch: int) -> Plan:
    return Plan(2, 16, 1, 1, zero=1, sequence_parallel=True)


def replicas_alone(model: Any, cluster: Any, global_batch: int) -> Plan:
    return Plan(32)


def too_large(model: Any, cluster: Any, global_batch: int) -> Plan:
    return Plan(32, micro_batch=2, zero=2)


def too_few_devices(model: Any, cluster: Any, global_batch: int) -> Plan:
    return Plan(1, 8, 2)


def as_a_dictionary(model: Any, cluster: Any, global_batch: int) -> Any:
    return {"dp": 32, "tp": 1, "pp": 1}


def long_pipeline(model: Any, cluster: Any, global_batch: int) -> Plan:
    return Plan(2, 1, 16)


RIGHT: dict[Exercise, list[Callable[..., object]]] = {
    checks.state_bytes: [by_the_planner, in_one_division, step_by_step, by_cutting],
    checks.step_traffic: [by_rings, exactly, message_by_message, as_tensors],
    checks.choose: [two_kinds, without_what_never_wins, with_more_room, the_simplest_of_the_fastest],
}

WRONG: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.state_bytes: {
        all_in_one: "not even of the right type",
        of_all_devices: "not what was asked for",
        in_numbers: "2 times too small",
        optimizer_first: "in the wrong order",
        prints_bytes: "not even of the right type",
    },
    checks.step_traffic: {
        all_traffic: "not even of the right type",
        of_all_replicas: "A rank sends its gradients to all others, whole",
        in_bits: "8 times too large",
        pipeline_before_tensor: "in the wrong order",
        nothing_of_it: "not what was asked for",
    },
    checks.choose: {
        across_nodes: "Its tensor ranks lie on several nodes",
        replicas_alone: "1.20 times as long as it could",
        too_large: "Most of it is for",
        too_few_devices: "makes 16 devices, but the cluster has 32",
        as_a_dictionary: "a Plan is asked for, and this is of type dict",
        long_pipeline: "longer than the best goes into: bubble",
    },
}
