"""Q9: training in 16 bits is fast and ends badly. Each suspect is taken away, on a real training."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import data
from course_lib.mechanisms import batches
from course_lib.model import GPTConfig, TinyGPT
from course_lib.ranks import launch

CONFIG = GPTConfig(layers=1, hidden=32, heads=2)
STEPS, BATCH = 150, 64


@dataclass(frozen=True)
class Run:
    """One training. weights: what they are kept in; compute: what forward and backward are done in."""

    weights: torch.dtype = torch.bfloat16
    compute: torch.dtype = torch.bfloat16
    workers: int = 2
    batch_size: int = BATCH
    learning_rate: float = 3e-4
    seed: int = 0

    def last_loss(self) -> float:
        """The mean loss of the last ten steps, computed in 32 bits."""
        return launch(_train, self.workers, (self,)).results[0]


def _train(rank: int, run: Run) -> float:
    """Data parallelism with AdamW. The gradients are averaged, and the loss is measured, in 32 bits."""
    model = TinyGPT(CONFIG, seed=run.seed, dtype=run.compute)
    kept = [parameter.detach().to(run.weights) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(kept, lr=run.learning_rate)
    problems, _ = data.train_test_split()
    losses = []
    for batch in islice(data.minibatches(problems, run.batch_size, run.seed), STEPS):
        inputs, targets = batches.split(batch, dist.get_world_size())[rank]
        loss = data.answer_loss(model(inputs).float(), targets)
        loss.backward()
        losses.append(loss.item())
        _update(list(model.parameters()), kept, optimizer)
    return sum(losses[-10:]) / 10


def _update(parameters: list[torch.nn.Parameter], kept: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    for parameter, own in zip(parameters, kept, strict=True):
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        dist.all_reduce(gradient)
        own.grad = (gradient / dist.get_world_size()).to(own.dtype)
        parameter.grad = None
    optimizer.step()
    for parameter, own in zip(parameters, kept, strict=True):
        parameter.detach().copy_(own)
