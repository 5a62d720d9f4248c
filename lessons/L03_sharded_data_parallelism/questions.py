"""Questions about sharding: the stage that is enough, and the bytes that only stage 3 sends."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from course_lib import data
from course_lib.classroom.questions.asking import choice, each
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Seeded
from course_lib.classroom.runs.steps import after_barrier
from course_lib.classroom.runs.training import shares
from course_lib.figures import memory_by_part
from course_lib.model import TinyGPT
from course_lib.ranks import launch
from lessons.L03_sharded_data_parallelism.runs import FOUR_LAYERS, STAGES, sharded_step

# Which stage is enough?


class MemoryBudget(NamedTuple):
    """A model of `billions` parameters, on `devices` devices with `gigabytes` of memory each."""

    billions: int
    devices: int
    gigabytes: int

    def needed(self, stage: int) -> float:
        """GB per device for parameters, gradients and optimizer state in 32 bits, by the formulas of the ZeRO paper."""
        shards = (4, 4, 8)[3 - stage :]  # bytes per parameter that are sharded, the optimizer's first
        return self.billions * (16 - sum(shards) * (1 - 1 / self.devices))


def _hold(name: str, case: MemoryBudget) -> Outcome:
    """Train a small model with memory in proportion: does it fit, and would a lower stage be enough?"""
    stage = int(name)
    step = sharded_step(stage, case.devices)
    parameters = step.weights.numel()
    room = round(parameters * case.gigabytes / case.billions)
    held = max(one.total for one in step.held)
    fits = held <= room
    less = fits and stage > 0 and max(one.total for one in sharded_step(stage - 1, case.devices).held) <= room
    found: dict[str, object] = {"parameters": parameters, "ranks": case.devices, "room": room, "held": held}
    found |= {"stage": STAGES[stage], "fits": fits, "less": less, "before": STAGES.get(stage - 1)}
    picture = memory_by_part({STAGES[stage]: step.held[0]}, room, title="What rank 0 holds just before the update")
    is_shown = fits is (case.needed(stage) <= case.gigabytes)
    return Outcome(fits and not less, found=found, shown=is_shown, pictures=(picture,))


# What does stage 3 send that stage 1 does not?


def _train_and_keep(rank: int) -> None:
    """Train with PyTorch's stage 3, keeping the parameters from forward to backward."""
    from torch.distributed.fsdp import fully_shard  # seconds in a notebook; ranks have it

    model = TinyGPT(FOUR_LAYERS)
    for block in (*model.blocks, model):
        fully_shard(block, reshard_after_forward=False)
    for inputs, targets in shares(rank, 32, 2):
        dist.barrier()
        data.answer_loss(model(inputs), targets).backward()


# option: arguments that remove its traffic; None: `_train_and_keep`
WITHOUT: dict[str, dict[str, Any] | None] = {
    "nothing": {},
    "state": {"optimizer_cls": torch.optim.SGD},
    "parameters": None,
    "activations": {"samples": 16},
}


@cache
def _sent(stage: int, ranks: int) -> int:
    """The bytes that rank 0 sends in a step; cached, as every option is compared with the same two stages."""
    return sharded_step(stage, ranks).timeline.bytes_sent(0)


def _send_without(option: str, ranks: int) -> Outcome:
    """Remove the extra traffic of stage 3 that the option names: does the difference to stage 1 disappear?"""
    how = WITHOUT[option]
    if how is None:
        step = after_barrier(launch(_train_and_keep, ranks).timeline)
    else:
        step = sharded_step(3, ranks, **how).timeline
    one, three = (_sent(stage, ranks) for stage in (1, 3))
    sent = step.bytes_sent(0)
    right = abs(sent - one) < 0.01 * (three - one)
    found = {"ranks": ranks, "one": one, "three": three, "option": option, "sent": sent, "gone": right}
    return Outcome(right, found=found, shown=right == (option == "parameters"))


QUESTIONS: dict[str, Seeded] = {
    "enough_stage": Seeded(
        MemoryBudget(10, 8, 80),
        choice(each(_hold, map(str, STAGES))),
        [MemoryBudget(*one) for one in ((6, 4, 80), (12, 4, 96), (30, 8, 80), (20, 8, 120), (3, 4, 80))],
        lambda case: {**case._asdict(), **{f"stage_{stage}": f"{case.needed(stage):.3g}" for stage in STAGES}},
    ),
    "stage_3_sends": Seeded(4, choice(each(_send_without, WITHOUT)), (2,), lambda ranks: {"ranks": ranks}),
}
