"""Questions about 16 bits: why a training ends badly (Q9), what is kept in 32 bits, and who skips a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import data
from course_lib.experiments.ablations import RoundedWeights
from course_lib.figures import axis
from course_lib.mechanisms import batches
from course_lib.mechanisms.mixed_precision import LossScaler, MasterWeights
from course_lib.model import GPTConfig, TinyGPT
from course_lib.questions.asking import choice, each, number
from course_lib.questions.forms import Reading
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.questions.units import BYTES
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


REMEDIES: dict[str, tuple[str, dict[str, object]]] = {
    "products": ("products in 32 bits", {"compute": torch.float32}),
    "workers": ("a single worker", {"workers": 1}),
    "batch": ("batches of twice the size", {"batch_size": 2 * BATCH}),
    "kept": ("weights kept in 32 bits", {"weights": torch.float32}),
}


def _without(suspect: str, run: Run) -> Outcome:
    """Train in 16 bits, in 32, and in 16 with one thing changed: which of the two is the last one like?"""
    name, change = REMEDIES[suspect]
    sixteen, thirty_two = last_loss(run), last_loss(replace(run, weights=torch.float32, compute=torch.float32))
    changed = last_loss(replace(run, **change))  # type: ignore[arg-type]
    won, lost = sixteen - changed, sixteen - thirty_two
    right = won > lost / 2
    said = (
        f"Tried with {name}: the training ends {'nearly as well as' if right else 'worse than'} the one in 32 bits. "
        f"Loss after {STEPS} steps: {axis.number(sixteen)} in 16 bits, {axis.number(thirty_two)} in 32 bits, "
        f"{axis.number(changed)} with {name}."
    )
    return Outcome(right, said, shown=lost > 0 and right is (suspect == "kept"))


# What is kept in 32 bits costs memory


def bytes_per_weight(dtype: torch.dtype, keeps: type[MasterWeights] | type[RoundedWeights]) -> dict[str, int]:
    """What AdamW's training holds for each weight, by what it is, when a backward pass has just ended."""
    model = TinyGPT(CONFIG, dtype=dtype)
    optimizer: Any = keeps(model.parameters(), torch.optim.AdamW)
    inputs, targets = data.examples([(37, 48)])
    for _ in range(2):  # the first step makes AdamW's numbers
        optimizer.step()
        data.answer_loss(model(inputs).float(), targets).backward()
    weights = list(model.parameters())
    moments = [number for state in optimizer.optimizer.state.values() for number in state.values() if number.dim()]
    masters = [weight for weight in optimizer.parameters if weight not in set(weights)]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    parts: dict[str, list[Any]] = {
        "weights": weights,
        "gradients": gradients,
        "AdamW": moments,
        "master weights": masters,
    }
    n = sum(weight.numel() for weight in weights)
    return {name: sum(tensor.nbytes for tensor in tensors) // n for name, tensors in parts.items()}


def _slips() -> dict[str, float]:
    return {"all_in_16": 1 / 2, "no_master": 3 / 4}


def _count_bytes() -> Reading:
    parts = bytes_per_weight(torch.float16, MasterWeights)
    listed = ", ".join(f"{name} {size}" for name, size in parts.items())
    total = sum(parts.values())
    return Reading(total, f"Counted on a small model, in bytes for each weight: {listed}; together {total}.")


# An overflow on one rank


def _overflow(what: str) -> Outcome:
    replicas = launch(_train_with_overflow, 4, (what,)).results
    broken = not all(replica.isfinite().all() for replica in replicas)
    equal = all(torch.equal(replica, replicas[0]) for replica in replicas)
    verdict = "equal" if equal else "different"
    said = f"Run on 4 ranks, with an overflow on rank 3: afterwards the replicas are {verdict}"
    said += ", and the weights of rank 3 are no numbers." if broken else "."
    return Outcome(equal and not broken, said, shown=equal is (what == "together") and broken is (what == "nobody"))


def _train_with_overflow(rank: int, what: str) -> Tensor:
    """Four steps of equal replicas; before the third update, a gradient on rank 3 is not finite."""
    model = TinyGPT(CONFIG, dtype=torch.float16)
    groups: list[dist.ProcessGroup] = []  # of ranks to agree with: none at all
    agreed = LossScaler(2.0**10, groups=None if what == "together" else groups)
    scaler = None if what == "nobody" else agreed
    master = MasterWeights(model.parameters(), torch.optim.AdamW, scaler, lr=1e-3)
    problems, _ = data.train_test_split()
    for step, (inputs, targets) in enumerate(islice(data.minibatches(problems, BATCH), 4)):
        loss = data.answer_loss(model(inputs).float(), targets)
        (scaler.scale(loss) if scaler else loss).backward()
        if step == 2 and rank == 3:
            for weight in model.blocks[0].parameters():
                weight.grad = torch.full_like(weight, 0.0 if what == "zero" else torch.inf)
        master.step()
    return torch.cat([weight.detach().flatten() for weight in master.parameters])


QUESTIONS: dict[str, Family] = {
    "Q9": Family(Run(), choice(each(_without, REMEDIES)), _draw_run, lambda run: {"workers": run.workers}),
    "bytes_per_weight": Family(None, number(BYTES, _count_bytes, _slips, tolerance=0.0)),
    "one_overflow": Family(None, choice(each(_overflow, ("alone", "nobody", "together", "zero")))),
}
