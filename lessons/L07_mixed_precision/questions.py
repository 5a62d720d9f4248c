"""Questions about 16 bits: a training that ends badly (Q9), numbers kept in 32 bits, skipped steps, the gain."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from course_lib import data
from course_lib.classroom.questions.asking import choice, each, number, open_case
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Seeded
from course_lib.classroom.questions.units import BYTES
from course_lib.classroom.runs.events import Grid, run_batch
from course_lib.classroom.runs.training import SMALL, flat, gradients_of, moments_of, shares, size_of, train
from course_lib.figures import gantt, loss_at_end, loss_curves, lost_time
from course_lib.figures.axis import duration
from course_lib.instruments.ledger import Bytes, Ledger
from course_lib.mechanisms import batches
from course_lib.mechanisms.collectives import all_reduce_in
from course_lib.mechanisms.data_parallel import DataParallel
from course_lib.mechanisms.mixed_precision import LossScaler, MasterWeights
from course_lib.model import TinyGPT
from course_lib.ranks import Link, Pace, launch
from course_lib.timeline import Timeline, compute
from lessons.L07_mixed_precision.runs import RoundedWeights, average_into, share_moved

STEPS, BATCH = 150, 64


@dataclass(frozen=True)
class TrainingSetup:
    """One training. weights: the dtype in which they are kept; compute: that of forward and backward.

    sums: the dtype in which the ranks' gradients are added up.
    """

    weights: torch.dtype = torch.bfloat16
    compute: torch.dtype = torch.bfloat16
    sums: torch.dtype = torch.bfloat16
    workers: int = 2
    learning_rate: float = 3e-4
    seed: int = 0


@cache
def last_loss(case: TrainingSetup) -> float:
    """The mean loss of the last ten steps, in 32 bits. (Cached: all answers are compared with the same trainings.)"""
    return launch(_train, case.workers, (case,)).results[0]


def _train(rank: int, case: TrainingSetup) -> float:
    model = TinyGPT(SMALL, seed=case.seed, dtype=case.compute)
    kept = flat(model.parameters()).to(case.weights)
    optimizer = torch.optim.AdamW([kept], lr=case.learning_rate)
    optimizer.register_step_post_hook(lambda *_: vector_to_parameters(kept.to(case.compute), model.parameters()))
    minibatches, combine = shares(rank, BATCH, STEPS, case.seed), partial(average_into, kept, model, case.sums)
    losses = train(model, minibatches, data.answer_loss, optimizer, combine=combine)
    return sum(losses[-10:]) / 10


# Q9. Fast, and then it ends badly


REMEDIES: dict[str, tuple[str, dict[str, object]]] = {
    "products": ("products in 32 bits", {"compute": torch.float32}),
    "sums": ("gradients added up in 32 bits", {"sums": torch.float32}),
    "rate": ("half the learning rate", {"learning_rate": 1.5e-4}),
    "kept": ("weights kept in 32 bits", {"weights": torch.float32}),
}


def _without(suspect: str, case: TrainingSetup) -> Outcome:
    """Train in 16 bits, in 32, and in 16 with one thing changed: does the change bring most of the loss back?"""
    name, change = REMEDIES[suspect]
    sixteen = last_loss(case)
    thirty_two = last_loss(replace(case, weights=torch.float32, compute=torch.float32, sums=torch.float32))
    changed = last_loss(replace(case, **change))  # type: ignore[arg-type]
    right = sixteen - changed > (sixteen - thirty_two) / 2
    found = {"change": name, "right": right, "steps": STEPS, "losses": (sixteen, thirty_two, changed)}
    return Outcome(right, found=found, shown=sixteen > thirty_two and right is (suspect == "kept"))


# The memory of keeping numbers in 32 bits


def bytes_per_weight(dtype: torch.dtype, keeps: type[MasterWeights] | type[RoundedWeights]) -> dict[str, int]:
    """Bytes of a training with AdamW for each weight, just after a second micro-batch's backward pass, by kind."""
    model = TinyGPT(SMALL, dtype=dtype)
    optimizer: Any = keeps(model.parameters(), torch.optim.AdamW)
    inputs, targets = data.examples([(37, 48)])
    for then in ("step", "accumulate", "nothing"):  # the first step makes AdamW's state
        data.answer_loss(model(inputs).float(), targets).backward()
        getattr(optimizer, then, lambda: None)()
    weights = list(model.parameters())
    masters = [weight for weight in optimizer.master_parameters if weight not in set(weights)]
    sums = [master.grad for master in masters]
    parts = (weights, gradients_of(model), sums, moments_of(optimizer.optimizer), masters)
    of_each = (size_of(part) // sum(weight.numel() for weight in weights) for part in parts)
    return dict(zip(("weights", "gradients", "sums", "AdamW", "master"), of_each, strict=True))


def _count_bytes() -> Outcome:
    held = bytes_per_weight(torch.bfloat16, MasterWeights)
    return Outcome(None, found=held | {"total": sum(held.values())}, measured=sum(held.values()))


# An overflow in one place


def _overflow(what: str) -> Outcome:
    start, whole = flat(TinyGPT(SMALL, dtype=torch.float16).parameters()), launch(_train_shares, 1).results[0]
    weights = launch(_train_shares, 4, (what,)).results[0]
    broken = not weights.isfinite().all()
    right = ((weights - whole).norm() < 0.1 * (whole - start).norm()).item()
    return Outcome(right, found={"right": right, "broken": broken}, shown=right is (what == "together"))


def _train_shares(rank: int, what: str = "together") -> Tensor:
    """Train with averaged gradients for four steps; each rank updates a chunk of the masters and all gather them.

    In the third step the last number of the mean gradient overflows, in the chunk of the last rank.
    """
    model, ranks = TinyGPT(SMALL, dtype=torch.float16), dist.get_world_size()
    own, mean = (flat(model.parameters()).float() for _ in range(2))
    mine = [nn.Parameter(own.tensor_split(ranks)[rank].clone())]
    alone = dist.new_group([rank], use_local_synchronization=True)  # so a rank agrees with nobody
    scaler = LossScaler(2.0**10, group=None if what == "together" else alone)
    optimizer = torch.optim.AdamW(mine, lr=1e-3)
    for step, (inputs, targets) in enumerate(shares(rank, BATCH, 4)):
        scaler.scale(data.answer_loss(model(inputs).float(), targets)).backward()
        average_into(mean, model, torch.float16)
        gradient: Any = mean.grad
        if step == 2:
            gradient[-1] = 0.0 if what == "zero" else torch.inf
        mine[0].grad = gradient.tensor_split(ranks)[rank].clone()
        if scaler.unscale_and_update(mine) or what == "nobody":
            optimizer.step()
        chunks = [torch.empty_like(chunk) for chunk in own.tensor_split(ranks)]
        dist.all_gather(chunks, mine[0].detach())
        vector_to_parameters(torch.cat(chunks).half(), model.parameters())
    return torch.cat(chunks)


# Rationale for mixed precision


class PrecisionRecipe(NamedTuple):
    """A recipe for precision: the dtype to compute in, and the optimizer's way to keep weights."""

    dtype: torch.dtype
    keeps: type[MasterWeights] | type[RoundedWeights]


RECIPES = {
    "float32": PrecisionRecipe(torch.float32, RoundedWeights),
    "everything in float16": PrecisionRecipe(torch.float16, RoundedWeights),
    "mixed": PrecisionRecipe(torch.float16, MasterWeights),
}


class RankReport(NamedTuple):
    """Rank 0's report of a training. losses: of each step.  sent: bytes, in all steps.

    activations: peak bytes.  states: peak bytes of weights, gradients and optimizer, per parameter.
    """

    losses: list[float]
    sent: int
    activations: int
    states: float


def train_by(recipe: PrecisionRecipe, workers: int = 4, steps: int = 40) -> RankReport:
    """Train data-parallel with AdamW on real ranks, to the end or until the loss is not a number."""
    run = launch(_train_by, workers, (recipe, steps))
    losses, held, parameters = run.results[0]
    states = max(one.parameters + one.gradients + one.optimizer for one in held)
    activations = max(one.activations for one in held)
    return RankReport(losses, run.timeline.bytes_sent(0), activations, states / parameters)


def _train_by(rank: int, recipe: PrecisionRecipe, steps: int) -> tuple[list[float], list[Bytes], int]:
    replica = DataParallel(TinyGPT(SMALL, dtype=recipe.dtype))
    scaler = LossScaler() if recipe.keeps is MasterWeights else None
    optimizer: Any = recipe.keeps(replica.parameters(), torch.optim.AdamW, scaler, lr=3e-3)
    with Ledger(replica.module, optimizer.optimizer) as ledger:
        losses = train(replica, shares(rank, 64, steps), data.answer_loss, optimizer, scaler, combine=replica.finish)
    return losses, [sample.held for sample in ledger.samples], sum(p.numel() for p in replica.parameters())


def _recipes() -> Outcome:
    trained = {name: train_by(recipe) for name, recipe in RECIPES.items()}
    before, naive, mixed = trained.values()
    is_broken = not math.isfinite(naive.losses[-1])
    right = is_broken and mixed.activations < 0.6 * before.activations and mixed.sent < 0.55 * before.sent
    ends = [loss_at_end(one.losses) for one in (before, mixed)]
    found = {"before": before, "mixed": mixed, "steps": len(before.losses), "is_broken": is_broken, "ends": ends}
    found |= {"worked": len(naive.losses) - 1}
    picture = loss_curves({name: one.losses for name, one in trained.items()}, title="The same training, three times")
    right = right and mixed.states >= before.states and abs(ends[1] - ends[0]) < 0.1 * (before.losses[0] - ends[0])
    return Outcome(None, found=found, shown=right, pictures=(picture,))


# Diagnosing and improving training efficiency

FEW, MANY = Grid(4, 16), Grid(4, 64)


def added_up(dtype: torch.dtype, micro_batches: int = MANY.micro_batches) -> float:
    """The error of a gradient in bfloat16 that was added up in dtype, as a share of its length."""
    model = TinyGPT(SMALL, dtype=torch.bfloat16)
    whole = data.examples([(10 + sample, 90 - sample) for sample in range(micro_batches)])
    exact, total = torch.zeros(()).double(), torch.zeros((), dtype=dtype)
    for inputs, targets in batches.micro_batches(whole, micro_batches):
        loss = data.answer_loss(model(inputs).float(), targets)
        own = flat(torch.autograd.grad(loss, list(model.parameters())))
        exact, total = exact + own.double(), total + own.to(dtype)
    return ((total - exact).norm() / exact.norm()).item()


def _move(rank: int, keeps: type[MasterWeights] | type[RoundedWeights]) -> float:
    """The share of weights, or of master weights, that move in a bfloat16 step at a learning rate of 0.00001."""
    model = TinyGPT(SMALL, dtype=torch.bfloat16)
    optimizer = keeps(model.parameters(), torch.optim.AdamW, lr=1e-5)
    before = [weight.detach().clone() for weight in optimizer.master_parameters]
    train(model, shares(rank, 64, 1), data.answer_loss, optimizer)
    return share_moved(before, optimizer.master_parameters)


def _two_faults() -> Outcome:
    whole, cut = run_batch("naive", FEW.devices, 1), run_batch("1f1b", *FEW)
    rounded, master = (launch(_move, 1, (keeps,)).results[0] for keeps in (RoundedWeights, MasterWeights))
    off = [added_up(dtype) for dtype in (torch.bfloat16, torch.float32)]
    idle = [whole.idle_fraction(), cut.idle_fraction()]
    is_better = all(map(math.isclose, idle, [1 - 1 / FEW.devices, FEW.least_idle]))
    is_rescued = rounded < 0.2 < 0.9 < master
    found = {"is_better": is_better, "is_rescued": is_rescued, "idle": idle, "moved": (rounded, master), "off": off}
    picture = gantt(cut, whole, title="In 16 micro-batches, and below it the whole batch")
    return Outcome(None, found=found, shown=is_better and is_rescued and off[0] > 100 * off[1], pictures=(picture,))


# Optimizing language-model training efficiency

CUT = Grid(4, 8)
MICRO_BATCHES = CUT.micro_batches
GPUS, ROOM = 8, 4  # sequences that a GPU has room for
COMPUTING, EXCHANGING = 1.2, 0.8  # seconds of a step


class Way(NamedTuple):
    """A way to take a step. is_each: exchange after each micro-batch.  speed: of a device, relative to float32."""

    is_each: bool
    dtype: torch.dtype
    speed: float

    def run(self) -> tuple[Timeline, Tensor]:
        """Run one step on 4 ranks. Returns its timeline and the gradient."""
        pace = Pace({"forward": 0.006 / self.speed, "backward": 0.012 / self.speed}, Link(0.0005, 1.8e6))
        run = launch(_step, 4, (self,), pace=pace)
        return run.timeline, run.results[0]


WAYS = {
    "8 exchanges in float32": Way(True, torch.float32, 1.0),
    "1 exchange in float32": Way(False, torch.float32, 1.0),
    "1 exchange, mixed precision": Way(False, torch.bfloat16, 2.0),
}


def _step(rank: int, way: Way) -> Tensor:
    """Compute the mean gradient of micro-batches of 4 samples, added up in 32 bits and sent in way.dtype."""
    model = TinyGPT(SMALL, dtype=way.dtype)
    minibatch = data.fixed_examples(16 * MICRO_BATCHES)
    share = batches.split(minibatch, dist.get_world_size())[rank]
    all_reduce = all_reduce_in(way.dtype, torch.float32)
    total = torch.zeros(sum(weight.numel() for weight in model.parameters()))
    for i, micro_batch in enumerate(batches.micro_batches(share, MICRO_BATCHES)):
        own = _gradient(model, i, *micro_batch)
        total += all_reduce(own) if way.is_each else own
    return total if way.is_each else all_reduce(total)


def _gradient(model: TinyGPT, i: int, inputs: Tensor, targets: Tensor) -> Tensor:
    """The gradient of micro-batch i, in float32."""
    with compute("forward", micro_batch=i, work=len(inputs)):
        loss = data.answer_loss(model(inputs).float(), targets) / MICRO_BATCHES / dist.get_world_size()
    with compute("backward", micro_batch=i, work=len(inputs)):
        gradients = torch.autograd.grad(loss, list(model.parameters()))
    return flat(gradients).float()


def _ways() -> Outcome:
    runs = {name: way.run() for name, way in WAYS.items()}
    often, once, mixed = (timeline for timeline, _ in runs.values())
    first, second, rounded = (gradient for _, gradient in runs.values())
    off, off_mixed = (((one - first).norm() / first.norm()).item() for one in (second, rounded))
    sent = [timeline.bytes_sent(0) for timeline in (often, once, mixed)]
    lines = "; ".join(f"{name}: {duration(timeline.makespan)} for a step" for name, (timeline, _) in runs.items())
    found = {"sent": sent, "is_same": off < 1e-5, "lines": lines, "off": off_mixed}
    times = lost_time({name: timeline for name, (timeline, _) in runs.items()}, title="Where the time goes")
    two = gantt(mixed, often, title="One exchange in mixed precision, and below it eight in float32")
    right = sent[0] == 8 * sent[1] == 16 * sent[2] and off < 1e-5
    right = right and off_mixed < 0.05 and often.makespan > once.makespan > mixed.makespan
    return Outcome(None, found=found, shown=right, pictures=(times, two))


SETUPS = [TrainingSetup(workers=4, seed=seed) for seed in range(1, 100)]
QUESTIONS: dict[str, Seeded] = {
    "Q9": Seeded(TrainingSetup(), choice(each(_without, REMEDIES)), SETUPS, lambda case: {"workers": case.workers}),
    "bytes_per_weight": Seeded(
        None, number(BYTES, _count_bytes, lambda: {"one_gradient": 4 / 5, "only_sums": 9 / 10}, tolerance=0.0)
    ),
    "one_overflow": Seeded(None, choice(each(_overflow, ("alone", "nobody", "together", "zero")))),
    "why_mixed_precision": Seeded(None, open_case(_recipes)),
    "diagnose_efficiency": Seeded(None, open_case(_two_faults)),
    "optimize_training": Seeded(None, open_case(_ways)),
}
