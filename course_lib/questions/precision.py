"""Q9: training in 16 bits is fast and ends badly. Each suspect is taken away, on a real training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import data
from course_lib.figures.axis import number
from course_lib.mechanisms import batches
from course_lib.model import GPTConfig, TinyGPT
from course_lib.questions.forms import Choice, Form, Option
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
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


@cache
def last_loss(run: Run) -> float:
    """The mean loss of the last ten steps, in 32 bits. (The trainings that all answers are compared with run once.)"""
    return launch(_train, run.workers, (run,)).results[0]


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
    gradients = [parameter.grad.float() for parameter in parameters if parameter.grad is not None]
    mean = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    pieces = mean.split([gradient.numel() for gradient in gradients])
    for parameter, own, piece in zip(parameters, kept, pieces, strict=True):
        own.grad = piece.view_as(own).to(own.dtype)
        parameter.grad = None
    optimizer.step()
    for parameter, own in zip(parameters, kept, strict=True):
        parameter.detach().copy_(own)


# Q9. Fast, and then it ends badly


def _draw_run(random: Random) -> Run:
    return Run(workers=4, seed=random.randrange(1, 100))


def _ask_cause(run: Run) -> tuple[str, Form]:
    text = (
        f"{run.workers} workers train a model with 16-bit numbers where 32 were used before. It is fast, and it begins "
        "well. But it ends with a worse loss than the training in 32 bits, as if small errors piled up. What is the "
        "likeliest cause?"
    )
    kept = (
        "A step changes a weight by less than its last digit, so in 16 bits most of each update is rounded away, step "
        "after step. Kept in 32 bits, the same weights take all of it up, although forward and backward are still done "
        "in 16."
    )
    products = (
        "Each product is rounded, and the errors go in all directions: they cancel, step by step. Done in 32 bits they "
        "change little, as long as the weights lose their updates."
    )
    workers = "The gradients are summed in 32 bits here, and one worker, who sums with nobody, ends just as badly."
    batch = "A larger batch makes smoother gradients, and the updates get lost all the same."
    return text, Choice(
        (
            Option("the matrix products of forward and backward are rounded", _tried(run, "products"), products),
            Option("the gradients of too many workers are mixed", _tried(run, "workers"), workers),
            Option("the batches are too small for 16 bits", _tried(run, "batch"), batch),
            Option("weights and their updates are accumulated in 16 bits", _tried(run, "kept"), kept),
        )
    )


REMEDIES: dict[str, tuple[str, dict[str, object]]] = {
    "products": ("products in 32 bits", {"compute": torch.float32}),
    "workers": ("a single worker", {"workers": 1}),
    "batch": ("batches of twice the size", {"batch_size": 2 * BATCH}),
    "kept": ("weights kept in 32 bits", {"weights": torch.float32}),
}


def _tried(run: Run, suspect: str) -> Callable[[], Outcome]:
    return partial(_without, run, suspect)


def _without(run: Run, suspect: str) -> Outcome:
    """Train in 16 bits, in 32, and in 16 with one thing changed: which of the two is the last one like?"""
    name, change = REMEDIES[suspect]
    sixteen, thirty_two = last_loss(run), last_loss(replace(run, weights=torch.float32, compute=torch.float32))
    changed = last_loss(replace(run, **change))  # type: ignore[arg-type]
    won, lost = sixteen - changed, sixteen - thirty_two
    right = won > lost / 2
    said = f"Tried with {name}: the training ends {'nearly as well as' if right else 'worse than'} the one in 32 bits."
    measured = (
        f"Loss after {STEPS} steps: {number(sixteen)} in 16 bits, {number(thirty_two)} in 32 bits, "
        f"{number(changed)} with {name}."
    )
    return Outcome(right, said, shown=lost > 0 and right is (suspect == "kept"), measured=(measured,))


QUESTIONS: dict[str, Family] = {"Q9": Family(Run(), _ask_cause, _draw_run)}
