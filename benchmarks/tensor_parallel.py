"""Step time and memory of our tensor parallelism against DTensor's parallelize_module: same model and data, one run.

The two take turns, step by step, so that other load on the machine hits both.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel

from benchmarks._turns import NOTE, Turns
from course_lib import data, launch
from course_lib.mechanisms.tensor_parallel import parallelize, sum_partial_gradients, vocab_parallel_cross_entropy
from course_lib.model import GPTConfig, TinyGPT

WORLD_SIZE = 2
STEPS = 15
WARM_UP = 3

Step = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Case:
    name: str
    shape: GPTConfig
    batch_size: int
    sequence_parallel: bool


CASES = [
    Case(name, shape, batch_size, sequence_parallel)
    for sequence_parallel in (False, True)
    for name, shape, batch_size in (
        ("0.1 M parameters", GPTConfig(), 32),
        ("12.6 M parameters", GPTConfig(layers=4, hidden=512), 8),
    )
]


class Measured(NamedTuple):
    """Measurements on one rank: seconds of each step, and the peak bytes of a step."""

    seconds: list[float]
    peak: int


def main() -> None:
    """Print the median step time and the peak memory of both, and their ratios."""
    print(f"One training step on {WORLD_SIZE} ranks, median of {STEPS} steps each, taking turns; peak memory of a rank")
    print(f"{'model':<42}{'ours':>9}{'DTensor':>12}{'ratio':>18}{'ours':>11}{'DTensor':>10}{'ratio':>8}")
    for case in CASES:
        by_rank = launch(compare, WORLD_SIZE, (case,), timeout=300).results
        turns = Turns.of([measured.seconds for measured in both] for both in by_rank)
        ours, theirs = turns.medians
        our_peak, their_peak = (max(one.peak for one in way) for way in zip(*by_rank, strict=True))
        name = f"{case.name}{', sequence parallel' if case.sequence_parallel else ''}"
        print(
            f"{name:<42}{ours * 1e3:>6.1f} ms{theirs * 1e3:>9.1f} ms{turns.ratio:>18}"
            f"{our_peak / 1e6:>8.1f} MB{their_peak / 1e6:>7.1f} MB{our_peak / their_peak:>8.2f}",
            flush=True,
        )
    print(NOTE)


def compare(rank: int, case: Case) -> tuple[Measured, Measured]:
    """Measure a step of ours and of DTensor's."""
    models = TinyGPT(case.shape), TinyGPT(case.shape)  # both are cut in place
    steps = our_step(models[0], case), torch_step(models[1], case)
    problems, _ = data.train_test_split()
    batches = data.minibatches(problems, case.batch_size)
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(WARM_UP + STEPS):
        inputs, targets = next(batches)
        for which in (0, 1) if turn % 2 else (1, 0):
            dist.barrier()
            started = time.perf_counter()
            steps[which](inputs, targets)
            if turn >= WARM_UP:
                seconds[which].append(time.perf_counter() - started)
    peaks = [held_bytes(model) + peak_bytes(step, *next(batches)) for model, step in zip(models, steps, strict=True)]
    return Measured(seconds[0], peaks[0]), Measured(seconds[1], peaks[1])


def our_step(model: nn.Module, case: Case) -> Step:
    model = parallelize(model, sequence_parallel=case.sequence_parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs: Tensor, targets: Tensor) -> None:
        vocab_parallel_cross_entropy(model(inputs), targets, case.shape.vocab).backward()
        sum_partial_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_step(model: nn.Module, case: Case) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallel.parallelize_module(model, mesh, torch_plan(case.shape.layers, case.sequence_parallel))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs: Tensor, targets: Tensor) -> None:
        with parallel.loss_parallel():
            data.answer_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_plan(layers: int, sequence_parallel: bool) -> dict[str, parallel.ParallelStyle]:
    """The plan for parallelize_module that cuts a TinyGPT, with inputs converted once for all layers that take them."""
    between = Shard(1) if sequence_parallel else Replicate()
    head = f"blocks.{layers + 1}"
    plan: dict[str, parallel.ParallelStyle] = {
        "blocks.0.token": parallel.RowwiseParallel(input_layouts=Replicate()),
        f"{head}.output": parallel.ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence_parallel:
        plan["blocks.0"] = parallel.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=between)
        plan[f"{head}.norm"] = parallel.SequenceParallel()
    for block in (f"blocks.{layer + 1}" for layer in range(layers)):
        for part, columns, row in (("attention", ("query", "key", "value"), "out"), ("mlp", ("up",), "down")):
            plan[f"{block}.{part}"] = parallel.PrepareModuleInput(
                input_layouts=between, desired_input_layouts=Replicate()
            )
            plan |= {f"{block}.{part}.{name}": parallel.ColwiseParallel() for name in columns}
            plan[f"{block}.{part}.{row}"] = parallel.RowwiseParallel(output_layouts=between)
            if sequence_parallel:
                plan[f"{block}.{part}_norm"] = parallel.SequenceParallel()
    return plan


def held_bytes(model: nn.Module) -> int:
    """Bytes that this rank holds between steps: parameters and the two moments of AdamW."""
    own = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return 3 * sum(parameter.nbytes for parameter in own)


def peak_bytes(step: Step, inputs: Tensor, targets: Tensor) -> int:
    """The peak bytes that a step allocates, on top of those held before it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints a line
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step(inputs, targets)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes))


if __name__ == "__main__":
    main()
