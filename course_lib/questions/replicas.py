"""Questions about replicas: what each gets (Q4), how they all learn the same (Q1), and a step in order (Q2)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import data
from course_lib.experiments.step_order import SOLUTION, follow
from course_lib.experiments.training import TINY, flat, shares, train
from course_lib.figures import gantt
from course_lib.mechanisms import batches
from course_lib.mechanisms.data_parallel import average_gradients
from course_lib.model import TinyGPT
from course_lib.questions.asking import choice, each, ordering
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.ranks import Link, Pace, RankFailed, launch
from course_lib.timeline import compute

STEPS = 5
SAME = 1e-9  # how far two trainings in 64-bit numbers drift apart by rounding alone, with much to spare
OTHER_WORKERS = (2, 3, 4, 6)
ORDINALS = {2: "half", 3: "a third", 4: "a quarter", 6: "a sixth", 8: "an eighth"}


def distance(replicas: list[Tensor], other: Tensor) -> float:
    """The largest difference of any weight of any replica."""
    return max((replica - other).abs().max().item() for replica in replicas)


# Q4. What does each worker get?


class Sharing(NamedTuple):
    """A minibatch of so many samples, on so many workers."""

    samples: int
    workers: int


# Whether the samples are split, and whether the model is.
SPLITS = {
    "parts_of_all": (False, True),
    "replicas_of_shares": (True, False),
    "replicas_of_all": (False, False),
    "parts_of_shares": (True, True),
}


def _share_out(option: str, case: Sharing) -> Outcome:
    splits_samples, splits_model = SPLITS[option]
    pace = Pace({"forward": 0.4 / case.samples})  # what one worker needs for the whole minibatch, in seconds
    try:
        run = launch(_worker, case.workers, (case, splits_samples, splits_model), pace=pace)
    except RankFailed as error:
        return Outcome(False, found={"error": error.message}, shown=splits_model)
    times = sum(run.results) // case.samples
    found = {"own": run.results[0], "once": times == 1, "times": times}
    passes = [span for span in run.timeline.spans if span.kind == "forward"]
    picture = gantt(replace(run.timeline, spans=passes), title="The forward passes of this answer")
    return Outcome(times == 1, found=found, shown=not splits_model, pictures=(picture,))


def _worker(rank: int, case: Sharing, splits_samples: bool, splits_model: bool) -> int:
    """Compute the loss of what this worker has been given. Returns its number of samples."""
    minibatch = data.fixed_examples(case.samples)
    inputs, targets = batches.split(minibatch, case.workers)[rank] if splits_samples else minibatch
    blocks = TinyGPT(replace(TINY, layers=case.workers - 2 or 1)).blocks
    part = blocks[rank : rank + 1] if splits_model else blocks
    dist.barrier()
    with compute("forward", work=len(inputs)):
        data.answer_loss(part(inputs), targets)
    return len(inputs)


# Q1. What must happen after the gradients are there?


def _nothing(model: nn.Module) -> None:
    pass


def _send_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)


def _average_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.detach())
        parameter.detach().div_(dist.get_world_size())


# What ranks do before an update and after it, and what becomes of their replicas.
UPDATES = {
    "own": (_nothing, _nothing, "drift"),
    "first_rank": (_nothing, _send_weights, "wrong"),
    "mean_gradient": (average_gradients, _nothing, "right"),
    "mean_weights": (_nothing, _average_weights, "wrong"),
}


def _train(rank: int, option: str, workers: int) -> Tensor:
    """A few steps on this rank's share of minibatches for `workers`; on one rank, that is all of them."""
    before, after, _ = UPDATES[option]
    model = TinyGPT(TINY, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer.register_step_post_hook(lambda *_: after(model))
    train(model, shares(rank, 8 * workers, STEPS), data.answer_loss, optimizer, combine=partial(before, model))
    return flat(model.parameters())


def _compare_trainings(option: str, workers: int) -> Outcome:
    replicas = launch(_train, workers, (option, workers)).results
    (alone,) = launch(_train, 1, ("own", workers)).results
    apart, off = distance(replicas, replicas[0]), distance(replicas, alone)
    found = "drift" if apart else "wrong" if off > SAME else "right"
    numbers = {"steps": STEPS, "workers": workers, "apart": apart, "off": off, "is_another": off > SAME}
    return Outcome(found == "right", found=numbers, shown=found == UPDATES[option][-1])


# Q2. The events of one step, in order

STEPS_IN_ORDER = 6
FEW_SECONDS = Pace({"forward": 0.02, "backward": 0.04, "optimizer": 0.01}, Link(latency=0.0002))


def _run_in(workers: int, order: tuple[str, ...]) -> Outcome:
    try:
        replicas = launch(follow, workers, (order, workers, STEPS_IN_ORDER)).results
    except RankFailed as error:
        return Outcome(False, why="needs", found={"error": error.__cause__})
    (alone,) = launch(follow, 1, (SOLUTION, workers, STEPS_IN_ORDER)).results
    wrong = _what_is_wrong(order, replicas, alone)
    shown = (1, STEPS_IN_ORDER // 2, STEPS_IN_ORDER)
    drift = {n: distance([history[n - 1] for history in replicas], replicas[0][n - 1]) for n in shown}
    apart = ", ".join(f"{far:.2g} after step {n}" for n, far in drift.items())
    emulated = launch(follow, workers, (order, workers, 2), pace=FEW_SECONDS)
    picture = gantt(emulated.timeline, title="Two steps in this order")
    return Outcome(not wrong, why=wrong, found={"apart": apart}, pictures=(picture,))


def _what_is_wrong(order: tuple[str, ...], replicas: list[Tensor], alone: Tensor) -> str:
    """By its name in the prose; "" if nothing is."""
    if distance(replicas, alone) < SAME:
        return ""
    if all(torch.equal(history[0], history[-1]) for history in replicas):
        return "cleared"
    is_equal = distance(replicas, replicas[0]) == 0
    if is_equal and distance([history[1:] for history in replicas], alone[:-1]) < SAME:
        return "one_behind"
    return "no_gradient" if order.index("all_reduce") < order.index("backward") else "alone"


QUESTIONS: dict[str, Family] = {
    "Q4": Family(
        Sharing(512, 8),
        choice(each(_share_out, SPLITS)),
        [Sharing(each * workers, workers) for workers in (3, 4, 6, 8) for each in (16, 32, 48, 64)],
        lambda case: {**case._asdict(), "share": case.samples // case.workers, "part": ORDINALS[case.workers]},
    ),
    "Q1": Family(8, choice(each(_compare_trainings, UPDATES)), OTHER_WORKERS, lambda workers: {"workers": workers}),
    "Q2": Family(4, ordering(_run_in), OTHER_WORKERS, lambda workers: {"workers": workers}),
}
