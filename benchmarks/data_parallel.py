"""Step time of our DataParallel against PyTorch's DistributedDataParallel: same model, same ranks, one run.

The two take turns, step by step, so that other load on the machine hits both. Ours allows parameters that only some
ranks have used, as DistributedDataParallel does with find_unused_parameters=True; by default it does less.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._turns import NOTE, Turns
from course_lib import data, launch
from course_lib.mechanisms.data_parallel import DataParallel
from course_lib.model import GPTConfig, TinyGPT

WORLD_SIZE = 2
STEPS = 41
WARM_UP = 5


@dataclass(frozen=True)
class Case:
    name: str
    shape: GPTConfig
    batch_size: int  # samples of each rank


CASES = (
    Case("0.1 M parameters", GPTConfig(), 32),
    Case("1.6 M parameters", GPTConfig(layers=2, hidden=256), 32),
    Case("12.6 M parameters", GPTConfig(layers=4, hidden=512), 8),
)


def main() -> None:
    """Print the median step time of both, in milliseconds, and their ratio."""
    print(f"One training step on {WORLD_SIZE} ranks, median of {STEPS} steps each, taking turns")
    print(f"{'model':<20}{'unused parameters':<20}{'DataParallel':>15}{'DDP':>15}{'ratio':>20}")
    for case, allows_unused in itertools.product(CASES, (True, False)):
        by_rank = launch(step_times, WORLD_SIZE, (case, allows_unused), timeout=300).results
        turns = Turns.of(by_rank)
        ours, theirs = turns.medians
        names = f"{case.name:<20}{'both' if allows_unused else 'ours alone':<20}"
        print(f"{names}{ours * 1e3:>12.2f} ms{theirs * 1e3:>12.2f} ms{turns.ratio:>20}", flush=True)
    print(NOTE)


def step_times(rank: int, case: Case, allows_unused: bool) -> tuple[list[float], list[float]]:
    """Seconds of each step on this rank, ours and DistributedDataParallel's."""
    ours = DataParallel(TinyGPT(case.shape))
    theirs = nn.parallel.DistributedDataParallel(TinyGPT(case.shape), find_unused_parameters=allows_unused)
    problems, _ = data.train_test_split()
    batches = data.minibatches(problems, case.batch_size, seed=rank)
    steps = [_step_of(ours, ours.finish), _step_of(theirs, lambda: None)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(WARM_UP + STEPS):
        inputs, targets = next(batches)
        for which in (0, 1) if turn % 2 else (1, 0):
            dist.barrier()
            started = time.perf_counter()
            steps[which](inputs, targets)
            if turn >= WARM_UP:
                seconds[which].append(time.perf_counter() - started)
    return seconds


def _step_of(model: nn.Module, finish: Callable[[], None]) -> Callable[[Tensor, Tensor], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs: Tensor, targets: Tensor) -> None:
        data.answer_loss(model(inputs), targets).backward()
        finish()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
