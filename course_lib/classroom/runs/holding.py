"""What every rank holds during a training step, moment by moment: whole, or only its shard.

Real ranks count their own bytes whenever a layer begins or ends, forward and backward, and around the update.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from course_lib import data
from course_lib.classroom.runs.steps import after_barrier
from course_lib.classroom.runs.training import shares
from course_lib.figures.holdings import Moment
from course_lib.instruments.ledger import Ledger
from course_lib.instruments.watch import tensors_in
from course_lib.model import GPTConfig, TinyGPT
from course_lib.ranks import Link, Pace, launch
from course_lib.timeline import Timeline, compute, now, progress

FOUR_LAYERS = GPTConfig(layers=4)
PACE = Pace({"forward": 0.08, "backward": 0.16, "optimizer": 0.0}, Link(latency=0.0002, bandwidth=80e6))
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
    _step(module, optimizer, finish, first, lambda what: None)
    dist.barrier()
    with Ledger(model, getattr(optimizer, "inner", optimizer)) as ledger:
        note = lambda what: moments.append(Moment(now(), what, ledger.now, _gathered(model)))  # noqa: E731
        _follow(model, note)
        note("begins")
        _step(module, optimizer, finish, second, note)
        note("is done")
    return moments


def _step(module: nn.Module, optimizer: Any, finish: Callable[[], Any], share: Any, note: Callable[[str], Any]) -> None:
    (inputs, targets), work = share, 1 / dist.get_world_size()
    with compute("forward", work=work):
        loss = data.answer_loss(module(inputs), targets)
    with compute("backward", work=work):
        loss.backward()
    note("waits for gradients")
    finish()
    note("updates its weights")
    optimizer.step()
    optimizer.zero_grad()


def _follow(model: TinyGPT, note: Callable[[str], Any]) -> None:
    """Note when a block begins, forward and backward, and let the emulated clock know how far forward is."""
    blocks = list(model.blocks)
    for number, block in enumerate(blocks):
        name = "the embedding" if block is blocks[0] else "the head" if block is blocks[-1] else f"layer {number}"
        block.register_forward_pre_hook(lambda *_, name=name: note(f"computes {name}"))
        block.register_forward_hook(partial(_has_computed, (number + 1) / len(blocks), name, note))


def _has_computed(share: float, name: str, note: Callable[[str], Any], _: Any, inputs: Any, outputs: Any) -> None:
    progress(share)
    for tensor in tensors_in(outputs):
        if tensor.requires_grad:
            tensor.register_hook(lambda _: note(f"computes {name} backward"))


def _gathered(model: nn.Module) -> int:
    """Bytes of layers that are whole only while they compute."""
    named = [(module, name, own) for module in model.modules() for name, own in module.named_parameters(recurse=False)]
    return sum(getattr(module, name).nbytes - own.nbytes for module, name, own in named)
