"""Step time and memory of FullySharded and ShardedOptimizer against fully_shard and ZeroRedundancyOptimizer.

Same model, same data, same ranks, one run. The two take turns, step by step, so that other load on the machine
hits both. Memory is the peak bytes of one rank's tensors during a step, with activations, from all allocations that
torch's profiler sees.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks._turns import NOTE, Turns
from course_lib import data, launch
from course_lib.mechanisms.sharding import FullySharded, ShardedOptimizer
from course_lib.model import GPTConfig, TinyGPT

WORLD_SIZE = 2
WARM_UP = 4

Step = Callable[[Tensor, Tensor], None]
Way = Callable[[TinyGPT], Step]


@dataclass(frozen=True)
class Case:
    name: str
    shape: GPTConfig
    batch_size: int  # samples of each rank
    steps: int


CASES = (
    Case("0.1 M parameters", GPTConfig(), 32, 41),
    Case("12.6 M parameters", GPTConfig(layers=4, hidden=512), 32, 15),
)


@dataclass(frozen=True)
class Cost:
    """seconds of each step; peak: bytes of tensors at the worst moment of a step."""

    seconds: list[float]
    peak: int


def main() -> None:
    """Print the median step time and the memory of both, and their ratios."""
    print(f"One training step with AdamW on {WORLD_SIZE} ranks, median of the slower rank, taking turns")
    print(f"{'model':<19}{'ours':<25}{'PyTorch':<30}{'ms':>8}{'ms':>8}{'ratio':>18}{'MB':>9}{'MB':>9}{'ratio':>7}")
    for case in CASES:
        for our_name, ours, their_name, theirs in PAIRS:
            by_rank = launch(compare, WORLD_SIZE, (case, ours, theirs), timeout=300).results
            turns = Turns.of([cost.seconds for cost in costs] for costs in by_rank)
            times = turns.medians
            peaks = [max(costs[way].peak for costs in by_rank) for way in (0, 1)]
            print(
                f"{case.name:<19}{our_name:<25}{their_name:<30}"
                f"{times[0] * 1e3:>8.2f}{times[1] * 1e3:>8.2f}{turns.ratio:>18}"
                f"{peaks[0] / 1e6:>9.2f}{peaks[1] / 1e6:>9.2f}{peaks[0] / peaks[1]:>7.2f}",
                flush=True,
            )
    print(NOTE)


def compare(rank: int, case: Case, *ways: Way) -> list[Cost]:
    """The cost of a step on this rank, for each of the ways."""
    warnings.simplefilter("ignore")
    problems, _ = data.train_test_split()
    batches = data.minibatches(problems, case.batch_size, seed=rank)
    for way in ways:
        way(TinyGPT(case.shape))(*next(batches))  # so torch's one-time allocations count for neither
    # torch's profiler misses some of the memory that gloo's threads free, and counts it as held; so take the least.
    peaks = [min(peak_bytes(way, case, batches) for _ in range(5)) for way in ways]
    steps = [way(TinyGPT(case.shape)) for way in ways]
    seconds: list[list[float]] = [[] for _ in ways]
    for turn in range(WARM_UP + case.steps):
        inputs, targets = next(batches)
        for number in (0, 1) if turn % 2 else (1, 0):
            dist.barrier()
            started = time.perf_counter()
            steps[number](inputs, targets)
            if turn >= WARM_UP:
                seconds[number].append(time.perf_counter() - started)
    return [Cost(*cost) for cost in zip(seconds, peaks, strict=True)]


def peak_bytes(way: Way, case: Case, batches: Iterator[tuple[Tensor, Tensor]]) -> int:
    """The peak bytes of tensors during the fourth step, counted from before the model was built."""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # else each use of the profiler prints a line
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = way(TinyGPT(case.shape))
        for _ in range(3):
            step(*next(batches))
        with record_function("measured"):
            step(*next(batches))
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begin = next(number for number, event in enumerate(events) if event.name() == "measured")
    changes = [event.nbytes() if event.name() == "[memory]" else 0 for event in events]
    return max(list(itertools.accumulate(changes))[begin:])


def fully_sharded(model: TinyGPT) -> Step:
    sharded = FullySharded(model)
    return training_step(sharded, AdamW(sharded.parameters()))


def torch_fully_shard(model: TinyGPT) -> Step:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return training_step(model, AdamW(model.parameters()))


def sharded_optimizer(model: TinyGPT) -> Step:
    return training_step(model, ShardedOptimizer(model.parameters(), AdamW))


def sharded_gradients(model: TinyGPT) -> Step:
    return training_step(model, ShardedOptimizer(model.parameters(), AdamW, gradients="sharded"))


def torch_zero_redundancy(model: TinyGPT) -> Step:
    replica = nn.parallel.DistributedDataParallel(model)
    return training_step(replica, ZeroRedundancyOptimizer(replica.parameters(), AdamW))


PAIRS = (
    ("FullySharded", fully_sharded, "fully_shard", torch_fully_shard),
    ("ShardedOptimizer", sharded_optimizer, "DDP, ZeroRedundancyOptimizer", torch_zero_redundancy),
    ('... gradients="sharded"', sharded_gradients, "DDP, ZeroRedundancyOptimizer", torch_zero_redundancy),
)


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(inputs: Tensor, targets: Tensor) -> None:
        data.answer_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
