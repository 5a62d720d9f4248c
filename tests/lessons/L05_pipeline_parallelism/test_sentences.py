"""The sentences of the lesson on pipeline parallelism, with their proofs."""

from __future__ import annotations

from math import isclose
from typing import Any

import pytest
import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from course_lib import RunError, data, launch
from course_lib.classroom import questions
from course_lib.mechanisms.layerwise import split_layers
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import simulate
from course_lib.schedules import SCHEDULES, Schedule, messages_from, peak_in_flight
from lessons.L05_pipeline_parallelism.explorer import NAMES, PipelineSetting
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "pipeline_parallelism"
numbers, shown, shows = lesson(NAME).numbers, lesson(NAME).shown, lesson(NAME).shows
SIZES, IDLE = (1, 2, 4, 8, 16, 32), "runs = {m: step("


def held(schedule: str, micro_batches: int) -> float:
    return numbers("def activations(", f"{schedule:<5} {micro_batches:2} micro-batches")[-1]


def row(schedule: str) -> list[float]:
    """The simulator's row: idle time in percent, then how many micro-batches each of four ranks holds, of how many."""
    return numbers("peaks = [peak / stages_each", f"{schedule:<17} idle")[-6:]


def seconds(samples: int) -> float:
    return numbers("best size by the formula", f"b = {samples:2}:")[1]


def messages(schedule: Schedule) -> int:
    return sum(len(list(messages_from(schedule, rank))) for rank in range(schedule.n_ranks))


def makespan(*setting: Any) -> float:
    """The time that the explorer predicts. setting: stages, micro-batches, schedule, sixths moved to the last stage."""
    return PipelineSetting(*setting).predict().makespan


def in_pytorch(rank: int, samples: int, schedule: Any, stages_each: int) -> dict[str, torch.Tensor]:
    """This rank's gradients of the lesson's model in PyTorch, with four micro-batches of `samples` samples together."""
    model, n = TinyGPT(GPTConfig(layers=6), dtype=torch.float64), 4 * stages_each
    parts = [model.blocks[part.start : part.stop] for part in split_layers(8, n)]
    stages = [PipelineStage(parts[i], i, n, torch.device("cpu")) for i in range(rank, n, 4)]
    inputs, targets = data.fixed_examples(samples)
    pipeline = schedule(stages if stages_each > 1 else stages[0], n_microbatches=4, loss_fn=data.answer_loss)
    pipeline.step(*[inputs][rank:], target=targets)
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def interleaving_takes_a_list() -> bool:
    ranks = launch(in_pytorch, 4, (28, pipelining.ScheduleInterleaved1F1B, 2)).results
    theirs = {name: gradient for rank in ranks for name, gradient in rank.items()}
    model, (inputs, targets) = TinyGPT(GPTConfig(layers=6), dtype=torch.float64), data.fixed_examples(28)
    data.answer_loss(model(inputs), targets).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return all(torch.allclose(theirs[name], gradient, rtol=0, atol=1e-12) for name, gradient in gradients.items())


def unequal_micro_batches_do_not_fit() -> bool:
    with pytest.raises(RunError) as raised:
        launch(in_pytorch, 4, (30, pipelining.Schedule1F1B, 1))
    return "sends 7x8x64 float64" in str(raised.value) and "receives into 8x8x64 float64" in str(raised.value)


def operations_of_zbv() -> set[str]:
    schedule = object.__new__(pipelining.ScheduleZBVZeroBubble)
    vars(schedule).update(pp_group_size=4, _n_microbatches=8, n_local_stages=2, num_stages=8)
    return {action.computation_type.value for action in schedule._calculate_single_rank_operations(0) if action}


PROOFS: Proofs = {
    "A bit less than a half: in each direction there are seven short turns in place of four long ones, and a short "
    "turn is a quarter of a long one.": lambda: numbers("pieces.makespan")[0] == round(100 * 7 / 4 / 4),
    "That it is right to the last digit": lambda: all(
        len(set(numbers(IDLE, f"m = {m:2}:")[1:3])) == 1 for m in (1, 2, 4, 8, 12, 16)
    ),
    "With many micro-batches four devices come close to being four times as fast as one": lambda: (
        3.3 < numbers(IDLE, "m = 16:")[-1] < 4
    ),
    "To be busy for 80% of the time, $m = 4(p-1)$: 12 micro-batches for four stages, 28 for eight, 252 for "
    "64.": lambda: all(round(m / (m + p - 1), 9) == 0.8 for p, m in {4: 12, 8: 28, 64: 252}.items()),
    "It is the same gradient, so it is the same training": lambda: (
        shown("each parameter on one rank").count("the same up to rounding: True") == 4
    ),
    "That is little": lambda: numbers("hidden = 30 *", "comparison")[-1] > 5 * max(numbers("hidden = 30 *", "sent")),
    "With twice the micro-batches, to make the bubble smaller, it is twice as many. (Each is half as large if the "
    "minibatch stays the same, so this comes to the activations of the whole minibatch": lambda: (
        held("gpipe", 4) == held("gpipe", 8) == held("gpipe", 16)
    ),
    "The bubble is exactly as large": lambda: shows("compare=all_forward_first", "exactly as long"),
    "more micro-batches do not only make the bubble smaller, they also save memory": lambda: (
        held("1f1b", 4) > 1.9 * held("1f1b", 8) > 1.9 * 1.9 * held("1f1b", 16)
    ),
    "A micro-batch passes each rank twice. The pipeline is filled when the first *small* stages have been passed, "
    "which takes half as long, so the bubble is half as long.": lambda: (
        simulate(SCHEDULES["1f1b"](4, 8), 1, 0.5, 0.5).makespan - 16
        == 2 * (simulate(SCHEDULES["interleaved_1f1b"](8, 8), 0.5, 0.25, 0.25).makespan - 16)
    ),
    "more than twice as many messages (seven borders between eight small stages, where there were three)": lambda: (
        messages(SCHEDULES["interleaved_1f1b"](8, 8)) > 2 * messages(SCHEDULES["1f1b"](4, 8))
    ),
    "1F1B frees memory and asks nothing for it.": lambda: (
        row("1f1b")[0] == row("gpipe")[0] and max(row("1f1b")[1:5]) < min(row("gpipe")[1:5])
    ),
    "Interleaving asks for some of it again on every rank, and zero bubble on all ranks but the first": lambda: (
        all(more > less for more, less in zip(row("interleaved_1f1b")[1:5], row("1f1b")[1:5], strict=True))
        and row("zb_h1")[1] == row("1f1b")[1]
        and all(more > less for more, less in zip(row("zb_h1")[2:5], row("1f1b")[2:5], strict=True))
    ),
    "two small ones on each rank, so the last rank begins after turns half as long": lambda: (
        simulate(SCHEDULES["zbv"](8, 8), 0.5, 0.5, 0.5).of(3)[0].end == 3 / 2 + 0.0
    ),
    "`zb_h1` both times.": lambda: all(
        min(NAMES, key=lambda name: makespan(8, m, name, 0)) == "zb_h1" for m in (8, 16)
    ),
    "`interleaved_1f1b` has the smaller bubble, and loses as much": lambda: isclose(
        makespan(4, 8, "interleaved_1f1b", 2) - makespan(4, 8, "interleaved_1f1b", 0),
        makespan(4, 8, "gpipe", 2) - makespan(4, 8, "gpipe", 0),
    ),
    "By the formula, too small by some factor is as bad as too large by the same factor: one sample is about five "
    "times too small, and 32 are six times too large.": lambda: (
        4.5 < numbers("best size by the formula", "best size")[0] < 5.5 and 32 / 5.3 > 5.9
    ),
    "so there is a best size in between, at": lambda: seconds(1) > min(map(seconds, SIZES)) < seconds(32),
    "micro-batches have to be half as large as is best": lambda: min(SIZES, key=seconds) / 2 == 8 / 4,
    "With 64 stages and 64 samples the bubble is half of the time.": lambda: round(63 / (64 + 63), 1) == 0.5,
    "These are the real ones, on our ranks": lambda: shows(
        "launch(in_pytorch",
        "gpipe the same gradients as ours, to the last bit: True",
        "1f1b  the same gradients as ours, to the last bit: True",
    ),
    "With 30 samples in four of them, a rank expects 8 and is sent 7, and the run ends.": (
        unequal_micro_batches_do_not_fit
    ),
    "Interleaving takes a list of stages: `ScheduleInterleaved1F1B([stage_0, stage_4], ...)` on rank 0": (
        interleaving_takes_a_list
    ),
    "with `ScheduleZBVZeroBubble` and others it has I and W": lambda: operations_of_zbv() >= {"F", "I", "W"},
    "`torch/distributed/pipelining/schedules.py`, from `Schedule1F1B._step_microbatches` on": lambda: callable(
        pipelining.Schedule1F1B._step_microbatches
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)


def test_the_case_of_the_pipeline_nobody_dares_to_change() -> None:
    answer = questions.load("tune_a_pipeline").form.why
    assert max(peak_in_flight(SCHEDULES["1f1b"](8, 8))) == 8 == max(peak_in_flight(SCHEDULES["gpipe"](8, 8)))
    interleaved = SCHEDULES["interleaved_1f1b"](16, 32)
    most, before = (max(peak_in_flight(one)) for one in (interleaved, SCHEDULES["1f1b"](8, 32)))
    assert f"the fullest device holds {most / 2 * 2:.0f} samples where it held {before * 2}" in answer
    assert messages(interleaved) > 2 * messages(SCHEDULES["1f1b"](8, 32))
    assert 0.09 < simulate(interleaved, 0.5, 0.5, 0.5).idle_fraction() < 0.11
