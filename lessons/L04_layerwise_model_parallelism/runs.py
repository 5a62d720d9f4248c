"""A training step of a model that is cut between its layers, for the lesson and its explorer."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from course_lib import data
from course_lib.classroom.runs.steps import after_barrier, held_up
from course_lib.classroom.runs.training import SMALL
from course_lib.instruments.ledger import Bytes, Ledger
from course_lib.mechanisms.layerwise import LayerWise, stage_bytes
from course_lib.model import GPTConfig, TinyGPT
from course_lib.ranks import Pace, launch
from course_lib.timeline import Timeline


class LayerWiseStep(NamedTuple):
    """A training step of `LayerWise`, and the most that each rank held in it."""

    timeline: Timeline
    held: list[Bytes]


def layerwise_step(
    world_size: int, samples: int, pace: Pace, config: GPTConfig = SMALL, cut: str = "number"
) -> LayerWiseStep:
    """One pass, forward and backward, of a model cut between its layers, on real ranks; a block is one unit of `work`.

    cut: "number" for equal numbers of blocks, "bytes" for equal bytes.

    Raises ValueError for another cut.
    """
    if cut not in CUTS:
        raise ValueError(f"cut={cut!r} is unknown; choose one of {', '.join(CUTS)}")
    run = launch(_train_stage, world_size, (samples, config, cut), pace=pace)
    return LayerWiseStep(held_up(after_barrier(run.timeline)), run.results)


def _train_stage(rank: int, samples: int, config: GPTConfig, cut: str) -> Bytes:
    """Train one stage: an update with zero gradients makes the optimizer's state, then comes the recorded step."""
    inputs, targets = data.fixed_examples(samples)
    blocks = TinyGPT(config).blocks
    chain = LayerWise(blocks, costs=CUTS[cut](blocks))
    optimizer = torch.optim.AdamW(chain.parameters())
    for parameter in chain.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    with Ledger(chain, optimizer) as ledger:
        output = chain(inputs)
        chain.backward(None if output is None else data.answer_loss(output, targets))
        optimizer.step()
        optimizer.zero_grad()
    return ledger.peak.held


def _block_bytes(blocks: nn.Sequential) -> list[int]:
    return stage_bytes(blocks, [range(i, i + 1) for i in range(len(blocks))])


CUTS = {"number": lambda blocks: None, "bytes": _block_bytes}
