"""What the lesson on pipeline parallelism says is so."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from course_lib import RunError, data, launch, questions
from course_lib.mechanisms.layerwise import split_layers
from course_lib.mechanisms.schedules import SCHEDULES, as_text, peak_in_flight
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import simulate
from course_lib.timeline import Timeline
from course_lib.widgets.micro_batches import SIZES, MicroBatchSetting
from course_lib.widgets.pipeline import LAYERS, MICRO_BATCHES, NAMES, STAGES, PipelineSetting
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "pipeline_parallelism"
numbers, shown, shows = lesson(NAME).numbers, lesson(NAME).shown, lesson(NAME).shows
IDLE, TABLE = "runs = {m: step(", "peaks = [peak / stages_each"


def busy(micro_batches: int) -> float:
    """Percent of the time, with four stages."""
    return 100 - numbers(IDLE, f"m = {micro_batches:2}:")[1]


def actions(name: str, rank: int, micro_batches: int, stages: int = 4) -> list[str]:
    """What a rank does in each turn, "" for nothing, with F and B of one turn each."""
    row = as_text(SCHEDULES[name](stages, micro_batches)).splitlines()[rank].removeprefix(f"rank {rank}  ")
    turns = 2 * (micro_batches + stages - 1)
    return [row.ljust(3 * turns)[3 * turn : 3 * turn + 3].strip() for turn in range(turns)]


def all_busy(direction: str) -> int:
    """In how many turns of GPipe, with four stages and micro-batches, all devices go in this direction."""
    turns = zip(*(actions("gpipe", rank, 4) for rank in range(4)), strict=True)
    return sum(all(action.startswith(direction) for action in turn) for turn in turns)


def messages(stages: int, micro_batches: int = 8) -> int:
    return 2 * (stages - 1) * micro_batches


def held(schedule: str, micro_batches: int) -> float:
    return numbers("def activations(", f"{schedule:<5} {micro_batches:2} micro-batches")[-1]


def row(schedule: str) -> list[float]:
    """The simulator's: idle in percent, the most that each of four ranks holds, of so many."""
    return numbers(TABLE, f"{schedule:<17} idle")[-6:]


def seconds(samples: int) -> float:
    return numbers("best size by the formula", f"b = {samples:2}:")[1]


@lru_cache
def explored(stages: int, micro_batches: int, name: str, moved: int = 0) -> Timeline:
    return PipelineSetting(stages, micro_batches, name, moved).run()


def sized(size: int, stages: int, overhead: float = 0.008) -> MicroBatchSetting:
    return MicroBatchSetting(size, stages, overhead, 32)


def _nearest(ideal: float) -> int:
    return min(SIZES, key=lambda size: abs(size - ideal))


def best_size(stages: int, overhead: float = 0.008) -> int:
    return min(SIZES, key=lambda size: sized(size, stages, overhead).predict().modelled)


def gaps(schedule: str, rank: int, micro_batches: int = 8) -> float:
    """How long a rank does nothing between its first action and its last, if all actions take 1."""
    spans = simulate(SCHEDULES[schedule](4, micro_batches), 1, 1, 1).of(rank)
    work = sorted((span for span in spans if span.kind != "wait"), key=lambda span: span.start)
    return work[-1].end - work[0].start - sum(span.duration for span in work)


def in_pytorch(rank: int, samples: int, schedule: Any, stages_each: int) -> dict[str, torch.Tensor]:
    """The gradients of the lesson's model that rank has, of four micro-batches of so many samples."""
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
    "need 0.16 s to bring the minibatch forward through their own layers, their **stage**, and 0.32 s to bring its "
    "gradients back": lambda: (
        "0.16 / micro_batches, 0.32 / micro_batches" in lesson(NAME).code("def step(name, stages")
        and shows("def step(name, stages", f"{4 * (0.16 + 0.32):.2f} s, emulated")
    ),
    "At any moment one device works and three wait": lambda: shows("def step(name, stages", "computed 25% of the time"),
    "A bit less than a half: in each direction there are seven short turns in place of four long ones, and a short "
    "turn is a quarter of a long one.": lambda: numbers("pieces.makespan")[0] == 44 and round(100 * 7 / 4 / 4) == 44,
    "In one of the seven all four devices work at the same time.": lambda: all_busy("F") == all_busy("B") == 1,
    "the last device has it at both ends of the step, the first in the middle": lambda: (
        [bool(action) for action in actions("gpipe", 3, 4)] == [False] * 3 + [True] * 8 + [False] * 3
        and [bool(action) for action in actions("gpipe", 0, 4)] == [True] * 4 + [False] * 6 + [True] * 4
    ),
    "the first one has done all of its own $p-1$ turns before the last has": lambda: (
        actions("gpipe", 3, 4).index("F3") - actions("gpipe", 0, 4).index("F3") == 4 - 1
    ),
    "Twelve, and the formula is right, to the last digit.": lambda: (
        busy(12) == 80
        and max(busy(m) for m in (1, 2, 4, 8)) < 80
        and all(len(set(numbers(IDLE, f"m = {m:2}:")[1:3])) == 1 for m in (1, 2, 4, 8, 12, 16))
    ),
    "With many micro-batches four devices come close to being four times as fast as one": lambda: (
        4 - 4 * 1000 / (1000 + 4 - 1) < 0.02 and numbers(IDLE, "m = 16:")[-1] > 3.3
    ),
    "The minibatch has 30 samples, so four micro-batches cannot even be equally large.": lambda: (
        "data.minibatches(problems, 30)" in lesson(NAME).code("shape = GPTConfig(") and 30 % 4 != 0
    ),
    "with twice the stages you need about twice the micro-batches to stay where you are": lambda: (
        abs(7 / (16 + 7) - 3 / (8 + 3)) < 0.05
    ),
    "A rule of thumb is $m \\ge 4p$ (Huang et al. 2019). Then the bubble is less than a fifth.": lambda: all(
        (p - 1) / (4 * p + p - 1) < 1 / 5 for p in range(2, 1000)
    ),
    "It is the same gradient, so it is the same training": lambda: (
        shown("each parameter on one rank").count("the same up to rounding: True") == 4
    ),
    "Ranks 1 and 2 send activations down and gradients up, the outer ones only one of them. (The 512 bytes on top say "
    "once what the tensors look like.)": lambda: shows(
        "hidden = 30 *", "122,880 bytes\n", str([f"{n:,}" for n in (122_880 + 512, 245_760 + 512, 246_272, 122_880)])
    ),
    "That is little": lambda: numbers("hidden = 30 *", "for comparison")[-1] > 245_760 * 5,
    "All eight, on every rank.": lambda: shows("in_flight(all_forward_first", "each holds those of up to 8"),
    "With twice the micro-batches, to make the bubble smaller, it is twice as many. (Each is half as large if the "
    "minibatch stays the same, so this comes to the activations of the whole minibatch": lambda: (
        peak_in_flight(SCHEDULES["gpipe"](4, 16)) == [2 * 8] * 4
        and held("gpipe", 4) == held("gpipe", 8) == held("gpipe", 16)
    ),
    "The bubble is exactly as large": lambda: shows("compare=all_forward_first", "below it emulated, 660 ms, exactly"),
    "Rank $r$ holds no more than $p - r$ micro-batches, *however many there are*.": lambda: all(
        peak_in_flight(SCHEDULES["1f1b"](4, m)) == [4, 3, 2, 1] for m in (4, 8, 64)
    ),
    "more micro-batches do not only make the bubble smaller, they also save memory": lambda: (
        held("1f1b", 4) > 1.9 * held("1f1b", 8) > 1.9 * 1.9 * held("1f1b", 16)
    ),
    "Rank 0 wants a gradient of micro-batch 0 before it sends out number 1": lambda: shows(
        "validate(schedule_of(", "rank 0 waits forever in B of micro-batch 0"
    ),
    "A micro-batch passes each rank twice.": lambda: all(
        len(SCHEDULES["interleaved_1f1b"](8, 8).stages_of(rank)) == 2 for rank in range(4)
    ),
    "So far small micro-batches cost nothing. Then 1,000 of them would be best": lambda: (
        (bubbles := [3 / (m + 3) for m in (1, 10, 100, 1000)]) == sorted(bubbles, reverse=True)
    ),
    "which takes half as long, so the bubble is half as long": lambda: (
        simulate(SCHEDULES["1f1b"](4, 8), 1, 0.5, 0.5).makespan - 16
        == 2 * (simulate(SCHEDULES["interleaved_1f1b"](8, 8), 0.5, 0.25, 0.25).makespan - 16)
    ),
    "more than twice as many messages (seven borders between eight small stages, where there were three)": lambda: (
        (messages(4), messages(8)) == (48, 112)
    ),
    "1F1B gives memory back and asks nothing for it.": lambda: (
        row("1f1b")[0] == row("gpipe")[0] and max(row("1f1b")[1:5]) < min(row("gpipe")[1:5])
    ),
    "interleaving on every rank, and zero bubble on all ranks but the first": lambda: (
        all(more > less for more, less in zip(row("interleaved_1f1b")[1:5], row("1f1b")[1:5], strict=True))
        and row("zb_h1")[1] == row("1f1b")[1]
        and all(more > less for more, less in zip(row("zb_h1")[2:5], row("1f1b")[2:5], strict=True))
    ),
    "The last rank still begins $p-1$ turns late, 3 of 27.": lambda: (
        row("zb_h1")[0] == round(100 * 3 / 27) and simulate(SCHEDULES["zb_h1"](4, 8), 1, 1, 1).makespan == 27
    ),
    "`zb_h2` has none, and holds up to $2p-1$ micro-batches for it": lambda: (
        max(gaps("zb_h2", rank) for rank in range(4)) < 1e-9 < gaps("zb_h1", 0)
        and max(peak_in_flight(SCHEDULES["zb_h2"](4, 8))) == 2 * 4 - 1
    ),
    "The model and the minibatch stay the same.": lambda: (
        {
            sum(PipelineSetting(p, 8, name, moved).layers)
            for p in STAGES
            for name in ("gpipe", "interleaved_1f1b")
            for moved in (0, 1, 2)
        }
        == {LAYERS}
        and len({round(PipelineSetting(4, m, "gpipe", 0).predict().busy(0), 9) for m in MICRO_BATCHES}) == 1
    ),
    "so there is a best size in between, at": lambda: (
        min((1, 2, 4, 8, 16, 32), key=seconds) == 4 and numbers("best size by", "best size")[-1] == 5.3
    ),
    "The model and the minibatch stay the same, so with more stages each has less to compute.": lambda: (
        len({round(p * sum(sized(4, p, 0.0).seconds.values()), 9) for p in STAGES}) == 1
    ),
    # The answers to the tasks of the two explorers.
    "The bubble, from 75% to 16% of the time. What the devices compute stays as long as it is.": lambda: (
        [f"{explored(4, m, 'gpipe').idle_fraction():.0%}" for m in (1, 16)] == ["75%", "16%"]
        and len({round(explored(4, m, "gpipe").busy(0), 9) for m in (1, 16)}) == 1
    ),
    "With `gpipe` every rank holds all micro-batches, however many there are. With `1f1b` the four ranks hold four, "
    "three, two and one.": lambda: all(
        [peak_in_flight(SCHEDULES[name](4, m)) for name in ("gpipe", "1f1b")] == [[m] * 4, [4, 3, 2, 1]]
        for m in MICRO_BATCHES
        if m >= 4
    ),
    "`zb_h1` both times. Its devices are idle for 23% of the time, and for 13% with 16 micro-batches; those of `gpipe` "
    "and `1f1b` for 47% and 30%.": lambda: all(
        min(NAMES, key=lambda name: explored(8, m, name).makespan) == "zb_h1"
        and [f"{explored(8, m, name).idle_fraction():.0%}" for name in ("zb_h1", "gpipe", "1f1b")] == [zb, one, one]
        for m, zb, one in ((8, "23%", "47%"), (16, "13%", "30%"))
    ),
    "with four stages, eight micro-batches and `gpipe`, a step takes 720 ms in place of 594. A better schedule helps: "
    "with `interleaved_1f1b` it takes 576": (
        lambda: (
            [round(1000 * explored(4, 8, "gpipe", moved).makespan) for moved in (2, 0)] == [720, 594]
            and round(1000 * explored(4, 8, "interleaved_1f1b", 2).makespan) == 576
        )
    ),
    "the best is 4, and the formula says 5.3.": lambda: best_size(4) == 4 and f"{sized(4, 4).ideal:.1f}" == "5.3",
    "with $h = 0$ its best size is 0.": lambda: sized(4, 4, 0.0).ideal == 0 and best_size(4, 0.0) == 1,
    "Smaller, by the formula from 6.5 samples with two stages to 4.9 with eight.": lambda: (
        [f"{sized(4, p).ideal:.1f}" for p in (2, 8)] == ["6.5", "4.9"]
    ),
    "micro-batches have to be half as large as is best, and a step takes 266 ms in place of 220.": lambda: (
        [round(1000 * sized(size, 4).run().makespan) for size in (2, 4)] == [266, 220]
        and [sized(size, 4).predict().held for size in (2, 4)] == [8, 16]
    ),
    "Is the best size where the formula says?": lambda: (
        [best_size(p) for p in STAGES] == [_nearest(sized(4, p).ideal) for p in STAGES]
    ),
    "Take the overhead away. Which size is best now": lambda: {best_size(p, 0.0) for p in STAGES} == {1},
    "More stages: does the best size become smaller or larger? Which part of each column grows?": lambda: (
        all(sized(4, p).ideal > sized(4, q).ideal and best_size(p) >= best_size(q) for p, q in pairwise(STAGES))
        and all(
            sized(b, p).predict().idle < sized(b, q).predict().idle
            and sized(b, p).predict().overhead == sized(b, q).predict().overhead
            and sized(b, p).predict().computing > sized(b, q).predict().computing
            for p, q in pairwise(STAGES)
            for b in SIZES
        )
    ),
    "Leave memory for 8 samples only. What do you pay for it?": lambda: (
        sized(4, 4).predict().held > 8 and sized(2, 4).predict().modelled > 1.1 * sized(4, 4).predict().modelled
    ),
    "With 64 stages and 64 samples the bubble is half of the time.": lambda: round(63 / (64 + 63), 1) == 0.5,
    "They take 28 of its samples, so that four micro-batches are equal": lambda: (
        "inputs[:28], targets[:28]" in lesson(NAME).code("inputs, targets = inputs[")
        and 28 % 4 == 0
        and shows("launch(in_pytorch", "ScheduleGPipe the same gradients as ours, to the last bit: True")
        and shows("launch(in_pytorch", "Schedule1F1B  the same gradients as ours, to the last bit: True")
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
    "GPipe holds all $m$ micro-batches, 1F1B at most $p$.": lambda: (
        row("gpipe")[1:5] == [8] * 4 and max(row("1f1b")[1:5]) == 4
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)


def test_the_case_of_the_pipeline_nobody_dares_to_change() -> None:
    ((_, answer),) = questions.load("tune_a_pipeline").form.explanations()
    assert max(peak_in_flight(SCHEDULES["1f1b"](8, 8))) == 8 == max(peak_in_flight(SCHEDULES["gpipe"](8, 8)))
    interleaved = SCHEDULES["interleaved_1f1b"](16, 32)
    most, before = (max(peak_in_flight(one)) for one in (interleaved, SCHEDULES["1f1b"](8, 32)))
    assert f"the fullest device holds {most / 2 * 2:.0f} samples where it held {before * 2}" in answer
    assert messages(16) > 2 * messages(8)
    assert 0.09 < simulate(interleaved, 0.5, 0.5, 0.5).idle_fraction() < 0.11
