"""Questions about 16 bits: why a training ends badly (Q9), what is kept in 32 bits, and who skips a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import data
from course_lib.experiments.ablations import RoundedWeights
from course_lib.experiments.training import flat, gradients_of, moments_of, shares, size_of, train
from course_lib.figures import axis
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
class Training:
    """One training. weights: what they are kept in; compute: what forward and backward are done in."""

    weights: torch.dtype = torch.bfloat16
    compute: torch.dtype = torch.bfloat16
    workers: int = 2
    batch_size: int = BATCH
    learning_rate: float = 3e-4
    seed: int = 0


@cache
def last_loss(case: Training) -> float:
    """The mean loss of the last ten steps, in 32 bits. (The trainings that all answers are compared with run once.)"""
    return launch(_train, case.workers, (case,)).results[0]


def _train(rank: int, case: Training) -> float:
    model = TinyGPT(CONFIG, seed=case.seed, dtype=case.compute)
    weights = list(model.parameters())
    kept = [weight.detach().to(case.weights) for weight in weights]
    optimizer = torch.optim.AdamW(kept, lr=case.learning_rate)
    optimizer.register_step_post_hook(lambda *_: _copy(kept, weights))
    minibatches = shares(rank, case.batch_size, STEPS, case.seed)
    losses = train(model, minibatches, data.answer_loss, optimizer, combine=partial(_average, weights, kept))
    return sum(losses[-10:]) / 10


def _average(weights: list[nn.Parameter], kept: list[Tensor]) -> None:
    """Give what is kept the mean of the ranks' gradients, taken in 32 bits."""
    mean = flat(weight.grad for weight in weights if weight.grad is not None).float()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    for weight, own, piece in zip(weights, kept, mean.split([own.numel() for own in kept]), strict=True):
        own.grad, weight.grad = piece.view_as(own).to(own.dtype), None


def _copy(kept: list[Tensor], weights: list[nn.Parameter]) -> None:
    for weight, own in zip(weights, kept, strict=True):
        weight.detach().copy_(own)


# Q9. Fast, and then it ends badly


REMEDIES: dict[str, tuple[str, dict[str, object]]] = {
    "products": ("products in 32 bits", {"compute": torch.float32}),
    "workers": ("a single worker", {"workers": 1}),
    "batch": ("batches of twice the size", {"batch_size": 2 * BATCH}),
    "kept": ("weights kept in 32 bits", {"weights": torch.float32}),
}


def _without(suspect: str, case: Training) -> Outcome:
    """Train in 16 bits, in 32, and in 16 with one thing changed: which of the two is the last one like?"""
    name, change = REMEDIES[suspect]
    sixteen, thirty_two = (
        last_loss(case),
        last_loss(replace(case, weights=torch.float32, compute=torch.float32)),
    )
    changed = last_loss(replace(case, **change))  # type: ignore[arg-type]
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
    parts: dict[str, Sequence[Tensor]] = {
        "weights": weights,
        "gradients": gradients_of(model),
        "AdamW": moments_of(optimizer.optimizer),
        "master weights": [weight for weight in optimizer.parameters if weight not in set(weights)],
    }
    n = sum(weight.numel() for weight in weights)
    return {name: size_of(tensors) // n for name, tensors in parts.items()}


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
    steps = count()
    master = MasterWeights(model.parameters(), torch.optim.AdamW, scaler, lr=1e-3)

    def overflow() -> None:
        if rank == 3 and next(steps) == 2:
            for weight in model.blocks[0].parameters():
                weight.grad = torch.full_like(weight, 0.0 if what == "zero" else torch.inf)

    same = islice(data.minibatches(data.train_test_split()[0], BATCH), 4)
    train(model, same, data.answer_loss, master, scaler, combine=overflow)
    return flat(master.parameters)


QUESTIONS: dict[str, Family] = {
    "Q9": Family(
        Training(),
        choice(each(_without, REMEDIES)),
        lambda random: Training(workers=4, seed=random.randrange(1, 100)),
        lambda case: {"workers": case.workers},
    ),
    "bytes_per_weight": Family(
        None, number(BYTES, _count_bytes, lambda: {"all_in_16": 1 / 2, "no_master": 3 / 4}, tolerance=0.0)
    ),
    "one_overflow": Family(None, choice(each(_overflow, ("alone", "nobody", "together", "zero")))),
}
