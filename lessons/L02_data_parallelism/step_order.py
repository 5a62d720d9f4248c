"""The events of a step of data parallelism, which real ranks perform in any order, even an impossible one.

split  forward  backward  all_reduce  update  clear      a right order
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from course_lib import data
from course_lib.classroom.runs.training import TINY, flat, shares
from course_lib.mechanisms.data_parallel import average_gradients
from course_lib.model import TinyGPT
from course_lib.timeline import compute

SOLUTION = ("split", "forward", "backward", "all_reduce", "update", "clear")


class Replica:
    """One rank, with a method for each event."""

    def __init__(self, rank: int, workers: int, steps: int) -> None:
        self.model = TinyGPT(TINY, dtype=torch.float64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.shares = shares(rank, 8 * workers, steps)
        self.share: Sequence[Tensor] | None = None
        self.loss: Tensor | None = None

    def split(self) -> None:
        self.share = next(self.shares)

    def forward(self) -> None:
        if self.share is None:
            raise LookupError("forward has nothing to compute on, because no share has been taken yet")
        with compute("forward"):
            self.loss = data.answer_loss(self.model(self.share[0]), self.share[1])

    def backward(self) -> None:
        if self.loss is None:
            raise LookupError("backward has no loss to begin with, because there was no forward pass yet")
        with compute("backward"):
            self.loss.backward()

    def all_reduce(self) -> None:
        average_gradients(self.model)

    def update(self) -> None:
        with compute("optimizer"):
            self.optimizer.step()

    def clear(self) -> None:
        self.optimizer.zero_grad()


def follow(rank: int, order: tuple[str, ...], workers: int, steps: int) -> Tensor:
    """Do the events of each step in this order. Returns the weights after every step, [steps, weights]."""
    worker = Replica(rank, workers, steps)
    history = []
    for _ in range(steps):
        for event in order:
            getattr(worker, event)()
        history.append(flat(worker.model.parameters()))
    return torch.stack(history)
