"""The bytes that every rank holds during a training step, moment by moment: whole tensors, or only its shard.

Real ranks count their own bytes whenever a layer begins or ends, forward and backward, and around the update.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from course_lib import data
from course_lib.classroom.runs.steps import after_barrier
from course_lib.classroom.runs.training import shares, train
from course_lib.figures.holdings import Moment
from course_lib.instruments.ledger import Ledger
from course_lib.model import GPTConfig, TinyGPT
from course_lib.ranks import Link, Pace, launch
from course_lib.timeline import Timeline, now, progress

FOUR_LAYERS = GPTConfig(layers=4)
PACE = Pace({"forward": 0.0025, "backward": 0.005, "optimizer": 0.0}, Link(latency=0.0002, bandwidth=80e6))
Setup = Callable[[nn.Module], tuple[nn.Module, Any, Callable[[], Any]]]


class HeldStep(NamedTuple):
    """A training step, and what each rank held: `moments[rank]`, in order. whole: bytes of all parameters."""

    timeline: Timeline
    moments: list[list[Moment]]
    whole: int


def held_step(setup: Setup, ranks: int = 4, samples: int = 32) -> HeldStep:
    """Train FOUR_LAYERS on real ranks for a step, and follow the next one.

    setup: makes of a model the module to train, its optimizer, and what to call between backward and update.
    """
    run = launch(_train, ranks, (setup, samples), pace=PACE)
    whole = sum(parameter.nbytes for parameter in TinyGPT(FOUR_LAYERS).parameters())
    return HeldStep(after_barrier(run.timeline), run.results, whole)


def _train(rank: int, setup: Setup, samples: int) -> list[Moment]:
    model = TinyGPT(FOUR_LAYERS, seed=rank)
    module, optimizer, finish = setup(model)
    moments: list[Moment] = []
    first, second = shares(rank, samples, 2)
    train(module, [first], data.answer_loss, optimizer, combine=finish)
    dist.barrier()
    with Ledger(model, getattr(optimizer, "inner", optimizer)) as ledger:

        def note(what: str) -> None:
            moments.append(Moment(now(), what, ledger.now, _gathered(model)))

        def combine() -> None:
            note("waits for gradients")
            finish()
            note("updates its weights")

        _follow(model, note)
        note("begins")
        train(module, [second], data.answer_loss, optimizer, combine=combine)
        note("is done")
    return moments


def _follow(model: TinyGPT, note: Callable[[str], object]) -> None:
    """Note when a block begins, forward and backward, and let the emulated clock know how far forward is."""
    names = ["the embedding", *(f"layer {number}" for number in range(1, len(model.blocks) - 1)), "the head"]
    for number, (block, name) in enumerate(zip(model.blocks, names, strict=True), 1):
        block.register_forward_pre_hook(lambda *_, name=name: note(f"computes {name}"))
        block.register_forward_hook(
            partial(_has_computed, number / len(names), partial(note, f"computes {name} backward"))
        )


def _has_computed(share: float, back: Callable[[], object], _: Any, inputs: Any, output: Tensor) -> None:
    progress(share)
    output.register_hook(lambda _: back())


def _gathered(model: nn.Module) -> int:
    """Bytes of layers that are whole only while they compute."""
    named = [(module, name, own) for module in model.modules() for name, own in module.named_parameters(recurse=False)]
    return sum(getattr(module, name).nbytes - own.nbytes for module, name, own in named)
