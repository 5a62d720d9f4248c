"""Our pipelines against those of torch.distributed.pipelining: same schedule, same model and data, same ranks, one run.

The two take turns, step by step, so that other load on the machine hits both. A step is forward and backward over a
minibatch; its gradients are thrown away. Memory is the peak of tensors' bytes during one more step, on the rank that
needs most, without parameters.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as theirs
from torch import Tensor, nn

from benchmarks._turns import NOTE, Turns
from course_lib import data, launch
from course_lib.mechanisms.pipeline import run_schedule
from course_lib.model import GPTConfig, TinyGPT
from course_lib.schedules import SCHEDULES, Schedule

WORLD_SIZE = 2
MICRO_BATCHES = 8
WARM_UP = 2
MB = 2**20

THEIRS: dict[str, Any] = {
    "naive": None,
    "gpipe": theirs.ScheduleGPipe,
    "1f1b": theirs.Schedule1F1B,
    "interleaved_1f1b": theirs.ScheduleInterleaved1F1B,
    "zb_h1": theirs.ScheduleInterleavedZeroBubble,  # with one stage on each rank
    "zb_h2": None,
    "zbv": theirs.ScheduleZBVZeroBubble,
    "dualpipev": theirs.ScheduleDualPipeV,
}
ONE_STAGE_EACH = ("naive", "gpipe", "1f1b", "zb_h1", "zb_h2")

Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    name: str
    shape: GPTConfig
    batch_size: int
    steps: int


CASES = (
    Case("0.2 M parameters", GPTConfig(layers=4), 32, 21),
    Case("12.6 M parameters", GPTConfig(layers=4, hidden=512), 32, 21),
)


def main() -> None:
    """Print the median step time of both, their ratio, and the memory of each."""
    print(f"One step with {MICRO_BATCHES} micro-batches on {WORLD_SIZE} ranks, taking turns")
    for case in CASES:
        kept = case.batch_size * case.shape.sequence * case.shape.hidden * torch.float32.itemsize / MB
        print(f"\n{case.name}, median of {case.steps} steps each. PyTorch's memory is without what it receives into,")
        print(f"{kept:.2f} MB on each rank for each stage, which it keeps from step to step; ours is with it.")
        print(f"{'schedule':<18}{'ours':>12}{'PyTorch':>12}{'ratio':>18}{'memory: ours':>16}{'PyTorch':>12}")
        for name in SCHEDULES:
            print(row(name, launch(measure, WORLD_SIZE, (case, name), timeout=300).results), flush=True)
    print(f"\n{NOTE}")


def row(name: str, by_rank: list[tuple[list[list[float]], list[int]]]) -> str:
    """A row of the table: one schedule."""
    held = [max(peaks) / MB for peaks in zip(*(p for _, p in by_rank), strict=True)]
    if len(held) == 1:
        ours = statistics.median(map(max, *(times[0] for times, _ in by_rank)))
        return f"{name:<18}{ours * 1e3:>9.2f} ms{'none':>12}{'':>18}{held[0]:>13.2f} MB"
    turns = Turns.of(times for times, _ in by_rank)
    seconds = turns.medians
    times = f"{seconds[0] * 1e3:>9.2f} ms{seconds[1] * 1e3:>9.2f} ms{turns.ratio:>18}"
    return f"{name:<18}{times}{held[0]:>13.2f} MB{held[1]:>9.2f} MB"


def measure(rank: int, case: Case, name: str) -> tuple[list[list[float]], list[int]]:
    """Seconds of each step, and bytes at the peak, on this rank: ours, then PyTorch's where it has the schedule."""
    n_stages = WORLD_SIZE * (1 if name in ONE_STAGE_EACH else 2)
    schedule = SCHEDULES[name](n_stages, MICRO_BATCHES)
    inputs, targets = next(data.minibatches(data.train_test_split()[0], case.batch_size))
    steps = [our_step(schedule, case.shape, inputs, targets)]
    if THEIRS[name]:
        steps.append(their_step(rank, THEIRS[name], schedule, case.shape, inputs, targets))
    seconds: list[list[float]] = [[] for _ in steps]
    for turn in range(WARM_UP + case.steps):
        for which in range(len(steps)) if turn % 2 else reversed(range(len(steps))):
            dist.barrier()
            started = time.perf_counter()
            steps[which]()
            if turn >= WARM_UP:
                seconds[which].append(time.perf_counter() - started)
    return seconds, [peak_bytes(step) for step in steps]


def cut(model: TinyGPT, n_stages: int) -> list[nn.Module]:
    """Cut transformer layers evenly; embedding and head go to the first and last stage."""
    layers = len(model.blocks) - 2
    bounds = [0, *(1 + stage * layers // n_stages for stage in range(1, n_stages)), len(model.blocks)]
    return [model.blocks[first:last] for first, last in itertools.pairwise(bounds)]


def our_step(schedule: Schedule, shape: GPTConfig, inputs: Tensor, targets: Tensor) -> Step:
    model = TinyGPT(shape)
    stages = cut(model, schedule.n_stages)

    def step() -> None:
        run_schedule(schedule, stages, inputs, targets, data.answer_loss)
        model.zero_grad()

    return step


def their_step(rank: int, kind: Any, schedule: Schedule, shape: GPTConfig, inputs: Tensor, targets: Tensor) -> Step:
    model, n = TinyGPT(shape), schedule.n_stages
    modules, mine = cut(model, n), schedule.stages_of(rank)
    stages = [theirs.PipelineStage(modules[stage], stage, n, torch.device("cpu")) for stage in mine]
    is_single = kind in (theirs.ScheduleGPipe, theirs.Schedule1F1B)
    runtime = kind(stages[0] if is_single else stages, n_microbatches=MICRO_BATCHES, loss_fn=data.answer_loss)
    given = [inputs] if 0 in mine else []
    expected = targets if n - 1 in mine else None

    def step() -> None:
        runtime.step(*given, target=expected, losses=None if expected is None else [], return_outputs=False)
        model.zero_grad()

    return step


def peak_bytes(step: Step) -> int:
    """The peak bytes of tensors in a step, without those held before it."""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # else each use of the profiler prints a line
    dist.barrier()
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(0, *held)


if __name__ == "__main__":
    main()
