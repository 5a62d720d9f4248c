"""The checks of pipeline parallelism: right solutions beside one process and the simulator, and their prices."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import Case
from course_lib.classroom.runs.events import KEPT
from course_lib.planner import simulate
from course_lib.schedules import SCHEDULES
from lessons.L05_pipeline_parallelism import checks
from tests.classroom.checks.prices import counted, verdict_on
from tests.lessons.L05_pipeline_parallelism import solutions as s


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_right_lists_are_the_course_s_schedules(name: str) -> None:
    for n_stages in range(1, 7):
        for m in range(1, 12):
            lists = [checks.listed(name, stage, n_stages, m) for stage in range(n_stages)]
            assert lists == SCHEDULES[name](n_stages, m).actions


def test_the_right_interleaved_lists_are_those_of_the_course_and_of_pytorch() -> None:
    for p, each, m in itertools.product((2, 3, 4), (2, 3), (1, 2, 3)):
        lists = [checks.interleaved(rank, p, each, m * p) for rank in range(p)]
        assert lists == SCHEDULES["interleaved_1f1b"](p * each, m * p, each).actions
        assert lists == [s.of_pytorch(rank, p, each, m * p) for rank in range(p)]


@pytest.mark.parametrize("case", checks.run_actions.cases(3), ids=lambda case: case.text)
def test_the_right_gradients_are_those_of_one_process_with_the_whole_minibatch(case: Case) -> None:
    ranks = [in_this_process(case, rank) for rank in range(case.world_size)]
    whole = nn.Sequential(*(module for _, module, *_ in ranks))
    _, _, inputs, targets, loss_fn, _ = ranks[0]
    loss_fn(whole(torch.cat(inputs)), torch.cat(targets)).backward()
    for (_, module, *_), programs in zip(ranks, checks.run_actions.run_right(case).results, strict=True):
        for name, parameter in module.named_parameters():
            mine = programs[0].values[f"{name}.grad"]
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-12, atol=1e-14)


def in_this_process(case: Case, rank: int) -> Any:
    """The arguments of a rank, made in this process, with the number of ranks patched in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "get_world_size", lambda: case.world_size)
        return case.arguments(rank)


def plans(exercise: Exercise, seed: int) -> list[Any]:
    return [
        plan for case in exercise.all_cases(seed) for rank in range(case.world_size) for plan in case.arguments(rank)[0]
    ]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_right_bubble_is_the_simulator_s(seed: int) -> None:
    for forward, backward, m in plans(checks.bubble, seed):
        simulated = simulate(SCHEDULES["gpipe"](len(forward), m), forward, backward).idle_fraction()
        assert checks.idle_share(forward, backward, m) == pytest.approx(simulated, rel=1e-12)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_right_number_is_the_best_of_all_that_were_simulated_and_no_other_is_as_good(seed: int) -> None:
    for samples, n_stages, overhead, per_sample, room in set(plans(checks.best_micro_batches, seed)):
        steps = {}
        for m in (m for m in range(1, samples + 1) if samples % m == 0):
            schedule, seconds = SCHEDULES["1f1b"](n_stages, m), overhead + per_sample * samples / m
            if checks.peak_in_flight(schedule)[0] * samples / m <= room:
                steps[m] = simulate(schedule, seconds, seconds).makespan
        shortest, *others = sorted(steps, key=lambda m: steps[m])
        assert checks.best(samples, n_stages, overhead, per_sample, room) == shortest
        assert not others or steps[others[0]] > steps[shortest] * (1 + 1e-9)


# The price


HELD, IDLE, CALLS = "bytes of extra memory on a rank", "idle time (emulated)", "operations they take"


def test_1f1b_holds_four_of_eight_micro_batches_and_is_idle_for_3_turns_of_11() -> None:
    price = counted(checks.pipeline_actions, s.with_a_limit)
    assert price[IDLE] == (round(100 * 3 / 11),) * 2
    assert 4 * KEPT <= price[HELD][0] < 5 * KEPT
    gpipe = SCHEDULES["gpipe"](4, 8)
    assert checks.peak_in_flight(gpipe)[0] == 8
    assert simulate(gpipe, 1, 2).idle_fraction() == pytest.approx(3 / 11)


def test_with_two_stages_on_a_rank_the_bubble_is_half_as_long() -> None:
    price = counted(checks.interleaved_actions, s.by_step_numbers)
    assert price[IDLE] == (round(100 * 3 / (2 * 8 + 3)),) * 2
    assert 11 * KEPT <= price[HELD][0] < 12 * KEPT
    assert checks.peak_in_flight(SCHEDULES["interleaved_1f1b"](8, 8))[0] == 11


def test_a_stage_sends_a_message_each_way_and_is_idle_no_longer_than_the_bubble() -> None:
    price = counted(checks.run_actions, s.with_handles)
    assert price[CALLS] == (12, 12)
    assert price[IDLE] == (round(100 * 3 / 9),) * 2


def test_the_emulated_step_is_idle_as_long_as_the_formula_says() -> None:
    verdict = verdict_on(checks.bubble, s.simulated)
    ((forward, backward, m),) = checks.bubble.price_case.arguments(0)[0]
    assert verdict.idle.timeline.idle_fraction() == pytest.approx(checks.idle_share(forward, backward, m), rel=1e-9)


def test_the_best_number_of_micro_batches_is_run() -> None:
    ((samples, n_stages, overhead, per_sample, _),) = checks.best_micro_batches.price_case.arguments(0)[0]
    timeline = verdict_on(
        checks.best_micro_batches, s.by_size
    ).idle.timeline  # 16 would make a smaller bubble, but a longer step
    assert 2 * (16 + 3) * (overhead + per_sample * samples / 16) > timeline.makespan / 0.001
    assert timeline.makespan == pytest.approx(0.001 * 2 * (8 + 3) * (overhead + per_sample * samples / 8), rel=1e-9)
    assert timeline.idle_fraction() == pytest.approx((n_stages - 1) / (8 + n_stages - 1), rel=1e-9)
