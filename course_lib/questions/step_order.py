"""Q2: the events of one training step, in order. The order is a program."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from course_lib import data
from course_lib.experiments.training import flat, shares
from course_lib.figures import gantt
from course_lib.mechanisms.data_parallel import average_gradients
from course_lib.model import TinyGPT
from course_lib.questions.asking import ordering
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.questions.replicas import SAME, TINY, distance, draw_workers
from course_lib.ranks import Link, Pace, RankFailed, launch
from course_lib.timeline import compute

STEPS = 6

# Q2. The events of one step, in order


WHYS = ("needs", "cleared", "one_behind", "no_gradient", "alone")
SOLUTION = ("split", "forward", "backward", "all_reduce", "update", "clear")
FEW_SECONDS = Pace({"forward": 0.02, "backward": 0.04, "optimizer": 0.01}, Link(latency=0.0002))


class Worker:
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
    """Do the events of each step in this order; the weights after every step, [steps, weights]."""
    worker = Worker(rank, workers, steps)
    history = []
    for _ in range(steps):
        for event in order:
            getattr(worker, event)()
        history.append(flat(worker.model.parameters()))
    return torch.stack(history)


def _run_in(workers: int, order: tuple[str, ...]) -> Outcome:
    try:
        replicas = launch(follow, workers, (order, workers, STEPS)).results
    except RankFailed as error:
        return Outcome(False, f"It cannot be run: {error.__cause__}.", "needs")
    (alone,) = launch(follow, 1, (SOLUTION, workers, STEPS)).results
    right, said, why = _judge(order, replicas, alone)
    drift = {n: distance([replica[n - 1] for replica in replicas], replicas[0][n - 1]) for n in (1, STEPS // 2, STEPS)}
    apart = ", ".join(f"{far:.2g} after step {n}" for n, far in drift.items())
    emulated = launch(follow, workers, (order, workers, 2), pace=FEW_SECONDS)
    picture = gantt(emulated.timeline, title="Two steps in this order")
    return Outcome(right, f"{said} How far they are apart: {apart}.", why, pictures=(picture,))


def _judge(order: tuple[str, ...], replicas: list[Tensor], alone: Tensor) -> tuple[bool, str, str]:
    """Right or not, what the run showed, and what that means, by its name in the prose."""
    same, equal = distance(replicas, alone) < SAME, distance(replicas, replicas[0]) == 0
    if same:
        said = "The replicas stay equal to the last bit, and it is the training of one process with all shares."
        return True, said, ""
    if all(torch.equal(history[0], history[-1]) for history in replicas):
        said = "The replicas stay equal, because none of them ever changes: nobody learns anything."
        return False, said, "cleared"
    if equal and distance([history[1:] for history in replicas], alone[:-1]) < SAME:
        said = "The replicas stay equal, but they are always one step behind one process."
        return False, said, "one_behind"
    said = "The replicas drift apart, and nothing ever brings them together again."
    if order.index("all_reduce") < order.index("backward"):
        return False, said, "no_gradient"
    return False, said, "alone"


QUESTIONS: dict[str, Family] = {
    "Q2": Family(4, ordering(_run_in, *WHYS), draw_workers, lambda workers: {"workers": workers}),
}
