"""Questions about sharding: which stage is enough, and what stage 3 sends that stage 1 does not."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from course_lib import data
from course_lib.experiments.sharded import FOUR_LAYERS, STAGES, sharded_step
from course_lib.experiments.steps import after_barrier
from course_lib.experiments.training import shares
from course_lib.figures import memory_by_part
from course_lib.figures.axis import memory_size
from course_lib.model import TinyGPT
from course_lib.questions.asking import choice, each
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.ranks import launch

# Which stage is enough?


class Training(NamedTuple):
    """So many billion parameters, on so many devices of so many gigabytes."""

    billions: int
    devices: int
    gigabytes: int

    def needed(self, stage: int) -> float:
        """GB for parameters, gradients and optimizer state in 32 bits, by the formulas of the ZeRO paper."""
        shards = (4, 4, 8)[3 - stage :]  # bytes for each parameter of what is cut, the optimizer's first
        return self.billions * (16 - sum(shards) * (1 - 1 / self.devices))


def _draw_training(random: Random) -> Training:
    return Training(*random.choice([(6, 4, 80), (12, 4, 96), (30, 8, 80), (20, 8, 120), (3, 4, 80)]))


def _hold(name: str, case: Training) -> Outcome:
    """Train a small model on devices that are as small in proportion: does it fit, and would less be enough?"""
    stage = int(name)
    step = sharded_step(stage, case.devices)
    parameters = step.weights.numel()
    room = round(parameters * case.gigabytes / case.billions)
    held = max(one.total for one in step.held)
    fits = held <= room
    less = fits and stage > 0 and max(one.total for one in sharded_step(stage - 1, case.devices).held) <= room
    end = f"it fits, but {STAGES[stage - 1]} is enough" if less else "it fits" if fits else "it does not fit"
    said = (
        f"Tried with {parameters:,} parameters on {case.devices} ranks, and devices that are as small in proportion, "
        f"{memory_size(room)}. With {STAGES[stage]} each holds {memory_size(held)} just before the update: {end}."
    )
    picture = memory_by_part({STAGES[stage]: step.held[0]}, room, title="What rank 0 holds just before the update")
    return Outcome(fits and not less, said, shown=fits is (case.needed(stage) <= case.gigabytes), pictures=(picture,))


# What does stage 3 send that stage 1 does not?


def _train_and_keep(rank: int) -> None:
    """PyTorch's stage 3, keeping the parameters from forward to backward."""
    model = TinyGPT(FOUR_LAYERS)
    for block in (*model.blocks, model):
        fully_shard(block, reshard_after_forward=False)
    for inputs, targets in shares(rank, 32, 2):
        dist.barrier()
        data.answer_loss(model(inputs), targets).backward()


# How to do without what an option says, in words and for `sharded_step`; None is `_train_and_keep`.
WITHOUT: dict[str, tuple[str, dict[str, Any] | None]] = {
    "nothing": ("Once more", {}),
    "state": ("With SGD, which has no state", {"optimizer_cls": torch.optim.SGD}),
    "parameters": ("With the parameters kept from forward to backward, as `fully_shard` of PyTorch can", None),
    "activations": ("With half of the samples, and so half of the activations", {"samples": 16}),
}


@cache
def _sent(stage: int, ranks: int) -> int:
    """Bytes of rank 0 in a step; all options are compared with the same two."""
    return sharded_step(stage, ranks).timeline.bytes_sent(0)


def _send_without(option: str, ranks: int) -> Outcome:
    """Take away what stage 3 is said to send on top of stage 1: does the difference go with it?"""
    words, how = WITHOUT[option]
    if how is None:
        step = after_barrier(launch(_train_and_keep, ranks).timeline)
    else:
        step = sharded_step(3, ranks, **how).timeline
    one, three = (_sent(stage, ranks) for stage in (1, 3))
    sent = step.bytes_sent(0)
    right = abs(sent - one) < 0.01 * (three - one)
    said = (
        f"Each of {ranks} ranks sends {one:,} bytes in a step with stage 1, and {three:,} with stage 3. "
        f"{words}, stage 3 sends {sent:,}: the difference is {'gone' if right else 'still there'}."
    )
    return Outcome(right, said, shown=right == (option == "parameters"))


QUESTIONS: dict[str, Family] = {
    "enough_stage": Family(
        Training(10, 8, 80),
        choice(each(_hold, map(str, STAGES))),
        _draw_training,
        lambda case: {**case._asdict(), **{f"stage_{stage}": f"{case.needed(stage):.3g}" for stage in STAGES}},
    ),
    "stage_3_sends": Family(4, choice(each(_send_without, WITHOUT)), lambda random: 2, lambda ranks: {"ranks": ranks}),
}
