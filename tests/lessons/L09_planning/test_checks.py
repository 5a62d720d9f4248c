"""The checks of planning: right solutions beside the planner, the ledger and the bytes that ranks really send."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from course_lib import launch
from course_lib.instruments.ledger import count
from course_lib.mechanisms.fully_sharded import FullySharded
from course_lib.planner import Cluster, ModelSpec, Plan, estimate
from lessons.L09_planning import checks
from tests.classroom.checks.prices import counted
from tests.lessons.L09_planning import solutions as s

EVEN = ModelSpec(8, 64, 8, 32, 4096, tied_embeddings=False)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_right_bytes_are_the_planner_s(zero: int, precision: str) -> None:
    memory = estimate(EVEN, Cluster(), Plan(8, zero=zero, precision=precision), 8).memory
    expected = (memory.parameters, memory.gradients, memory.optimizer)
    assert checks.held(EVEN.parameters, 8, 1, 1, zero, precision) == expected


def test_tensor_ranks_and_stages_share_nearly_evenly() -> None:
    model = ModelSpec(80, 8192, 64, 4096, 512)
    memory = estimate(model, Cluster(nodes=8), Plan(2, 8, 4, zero=1), 64).memory
    mine = checks.held(model.parameters, 2, 8, 4, 1, "bf16")
    assert sum(mine) == pytest.approx(memory.parameters + memory.gradients + memory.optimizer, rel=0.02)


def held_by_a_rank(rank: int) -> tuple[int, int, int]:
    """Bytes of a rank after a step of ZeRO-3 in 32 bits: parameters, gradients, Adam's state without step counts."""
    model = FullySharded(torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 8, bias=False)))
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 16)).sum().backward()
    adam.step()
    found = count(model, adam)
    counts = sum(state["step"].numel() * state["step"].element_size() for state in adam.state.values())
    return found.parameters, found.gradients, found.optimizer - counts


def test_the_ledger_finds_the_right_bytes_on_four_ranks() -> None:
    assert set(launch(held_by_a_rank, 4).results) == {checks.held(16 * 16 + 16 * 8, 4, 1, 1, 3, "fp32")}


@pytest.mark.parametrize(
    ("plan", "stage"),
    [
        (Plan(8), 0),
        (Plan(4, 2, zero=1), 0),
        (Plan(8, zero=3), 0),
        (Plan(1, 2, 4), 1),
        (Plan(1, 4, 2), 0),
        (Plan(1, 2, 4), 2),
    ],
)
def test_the_right_traffic_is_the_planner_s(plan: Plan, stage: int) -> None:
    found = estimate(EVEN, Cluster(), plan, 32)
    held = estimate(EVEN, Cluster(), Plan(plan.dp, plan.tp, plan.pp), 32).memory.parameters // 2
    message, m = 2 * EVEN.sequence * EVEN.hidden, plan.micro_batches(32)
    mine = checks.sent(int(held), EVEN.layers // plan.pp, message, m, plan.dp, plan.tp, plan.pp, stage, plan.zero)
    theirs = [found.flows[kind].bytes if kind in found.flows else 0 for kind in ("data", "tensor", "pipeline")]
    assert mine == pytest.approx(theirs, rel=1e-9)


def plans_of(exercise: Any) -> list[Any]:
    return exercise.price_case.arguments(0)[0]


def test_four_ranks_send_what_the_right_traffic_is() -> None:
    (plan,) = plans_of(checks.step_traffic)
    assert counted(checks.step_traffic, s.by_rings)["bytes a rank sends"][0] == sum(checks.sent(*plan))


def test_a_rank_holds_what_the_right_bytes_are() -> None:
    (plan,) = plans_of(checks.state_bytes)
    assert counted(checks.state_bytes, s.by_the_planner)["bytes of extra memory on a rank"][0] == sum(
        checks.held(*plan)
    )


def test_the_right_choice_fits_and_is_nearly_the_best() -> None:
    """One seed only, as each takes six searches; nbval runs the solution with another one."""
    for case in checks.choose.all_cases(0):
        for rank in range(case.world_size):
            model, cluster, global_batch, _, best = case.arguments(rank)
            found = estimate(model, cluster, checks.chosen(model, cluster, global_batch), global_batch)
            assert found.memory.total <= 0.9 * found.capacity
            assert found.step_time.total <= 1.05 * best.step_time.total
            assert best.memory.total <= 0.9 * best.capacity


def test_what_is_wrong_with_a_plan_is_said_once() -> None:
    def one_replica_each(model: ModelSpec, cluster: Cluster, global_batch: int) -> Plan:
        return Plan(dp=32)

    said = str(checks.choose(one_replica_each))
    assert "micro-batches of 1, ZeRO 0, recompute none fits, and its step takes 1.20 times as long as it could" in said
    assert said.count("fits, and its step takes") == 1


def test_a_choice_has_no_place() -> None:
    facts = dict(checks.choose(lambda model, cluster, global_batch: None).facts)
    assert "Where" not in facts


def looked_up(model: ModelSpec, plan: Plan, samples: int, network: float) -> float:
    return max(step.seconds for step in checks.SEEN if step.model.parameters <= max(model.parameters, 2e9))


def steps_in_a_second(model: ModelSpec, plan: Plan, samples: int, network: float) -> float:
    return plan.devices * 312e12 / model.step_flops(samples)


def shorter_with_more_samples(model: ModelSpec, plan: Plan, samples: int, network: float) -> float:
    return 1e4 / samples / plan.devices


@pytest.mark.parametrize(
    ("predict", "idea"),
    [
        (lambda model, plan, samples, network: 20.0, "constant"),
        (looked_up, "constant"),
        (lambda model, plan, samples, network: samples / 100, "devices_forgotten"),
        (lambda model, plan, samples, network: 20.0 / plan.devices, "samples_forgotten"),
        (steps_in_a_second, "speed"),
        (shorter_with_more_samples, ""),
    ],
)
def test_a_prediction_is_told_which_way_it_goes(predict: Any, idea: str) -> None:
    assert checks.predict_step(predict).idea == idea
