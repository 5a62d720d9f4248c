"""The checks of layer-wise model parallelism: right solutions beside brute force, one process and real modules."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch import nn

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import Case
from course_lib.planner import simulate
from course_lib.schedules import SCHEDULES
from lessons.L04_layerwise_model_parallelism import checks
from tests.classroom.checks.prices import counted
from tests.lessons.L04_layerwise_model_parallelism import solutions as s


def asked(exercise: Exercise, seed: int) -> list[Any]:
    """The arguments for which ranks ask in all cases."""
    return [
        one for case in exercise.all_cases(seed) for rank in range(case.world_size) for one in case.arguments(rank)[0]
    ]


def cheapest_of_all(costs: list[int], n_stages: int) -> int:
    """The lowest cost by brute force: any layer on any stage, if stages are in order and none is empty."""
    best = sum(costs)
    for moves in product((0, 1), repeat=len(costs) - 1):  # whether a stage begins after each layer
        if sum(moves) == n_stages - 1:
            totals = [costs[0]]
            for cost, begins in zip(costs[1:], moves, strict=True):
                totals = [*totals, cost] if begins else [*totals[:-1], totals[-1] + cost]
            best = min(best, max(totals))
    return best


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("program", [checks.split, *s.RIGHT[checks.split_layers]], ids=lambda one: one.__name__)
def test_no_split_has_a_cheaper_dearest_stage(program: Callable, seed: int) -> None:
    for costs, n_stages in asked(checks.split_layers, seed):
        stages = [list(stage) for stage in program(list(costs), n_stages)]
        assert [*chain(*stages)] == list(range(len(costs)))
        assert len(stages) == n_stages and all(stages)
        assert max(sum(costs[i] for i in stage) for stage in stages) == cheapest_of_all(costs, n_stages)


def test_the_split_that_the_exercise_draws_is_the_best() -> None:
    drawn = [2, 2, 3, 3, 4, 8]
    assert checks.split(drawn, 3) == [range(3), range(3, 5), range(5, 6)]
    assert (cheapest_of_all(drawn, 3), max(2 + 2, 3 + 3, 4 + 8)) == (8, 12)


@pytest.mark.parametrize("case", checks.forward_and_backward.all_cases(3), ids=lambda case: case.text)
def test_the_right_gradients_and_losses_are_those_of_one_process_to_the_last_bit(case: Case) -> None:
    ranks = [case.arguments(rank) for rank in range(case.world_size)]
    whole = nn.Sequential(*(stage for stage, *_ in ranks))
    _, minibatches, loss_fn, _ = ranks[0]
    left = [programs[0].values for programs in checks.forward_and_backward.run_right(case).results]
    for i, (inputs, targets) in enumerate(minibatches):
        loss = loss_fn(whole(inputs), targets)
        loss.backward()
        assert [torch.equal(loss, v) if isinstance(v := one[f"the result[loss of minibatch {i}]"], torch.Tensor) else v
                for one in left] == [*["None"] * (len(left) - 1), True]  # fmt: skip
    for (stage, *_), values in zip(ranks, left, strict=True):
        for name, parameter in stage.named_parameters():
            mine = values[f"{name}.grad"]
            assert mine == "None" if parameter.grad is None else torch.equal(mine, parameter.grad)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_right_bytes_are_those_of_real_modules(seed: int) -> None:
    for widths, stages, samples in asked(checks.who_holds_what, seed):
        assert [list(rank) for rank in checks.held(widths, stages, samples)] == s.counted(widths, stages, samples)


# The price


SENT, HELD, IDLE, CALLS = (
    "bytes a rank sends",
    "bytes of extra memory on a rank",
    "idle time (emulated)",
    "operations they take",
)


def test_the_dearest_stage_decides_how_long_the_others_wait() -> None:
    (model,) = checks.split_layers.price_case.arguments(0)[0]
    seconds = [sum(model[0][i] for i in stage) for stage in s.by_a_limit(*model)]
    idle = simulate(SCHEDULES["gpipe"](4, 8), seconds, [2 * one for one in seconds]).idle_fraction()
    assert counted(checks.split_layers, s.by_a_limit)[IDLE][0] == round(100 * idle)
    assert max(seconds) == cheapest_of_all(*model)


def test_a_rank_sends_hidden_states_and_a_gradient_and_is_busy_for_a_quarter_of_the_time() -> None:
    price = counted(checks.forward_and_backward, s.with_two_functions)
    assert price[CALLS] == (2, 2)
    widest = 4 + 2 * 3  # the last rank's input; the rank before it also returns 3 samples of 4 + 2 * 2
    assert price[SENT] == (3 * 8 * (widest + 8),) * 2
    assert price[IDLE] == (75, 75)


def test_the_fullest_rank_is_the_price_of_a_split() -> None:
    (network,) = checks.who_holds_what.price_case.arguments(0)[0]
    fullest = max(sum(rank) for rank in s.counted(*network))
    assert fullest <= counted(checks.who_holds_what, s.layer_by_layer)[HELD][0] <= fullest + 1_000
