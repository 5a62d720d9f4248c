"""Training steps with plain data parallelism and with the three stages of ZeRO, which shard the replicas' state.

stage   made of                                        each of N ranks holds, for each parameter
0       DataParallel                                   4 + 4 + 8 bytes
1       ShardedOptimizer                               4 + 4 + 8 / N, and a shard of the mean gradient, 4 / N
2       ShardedOptimizer, gradients="sharded"          4 + 4 / N + 8 / N
3       FullySharded                                   4 / N + 4 / N + 8 / N, and whole layers for a moment
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from course_lib import data
from course_lib.classroom.runs.holding import FOUR_LAYERS
from course_lib.classroom.runs.steps import after_barrier
from course_lib.classroom.runs.training import flat, shares
from course_lib.instruments.ledger import Bytes, Ledger
from course_lib.mechanisms.data_parallel import DataParallel
from course_lib.mechanisms.sharding import FullySharded, ShardedOptimizer
from course_lib.model import TinyGPT
from course_lib.ranks import Pace, launch
from course_lib.timeline import Timeline, compute

STAGES = {0: "data parallelism", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
BUCKET = 0.2  # MiB: a layer of FOUR_LAYERS, so there are as many messages as with ZeRO-3


class ShardedStep(NamedTuple):
    """One measured step of a training.

    timeline: of that step.  held: bytes on each rank just before its update.
    activations: peak bytes of activations on each rank.  weights: all weights before the step, in one vector.
    """

    timeline: Timeline
    held: list[Bytes]
    activations: list[int]
    weights: Tensor


def sharded_step(stage: int, ranks: int, pace: Pace | None = None, **how: Any) -> ShardedStep:
    """Train FOUR_LAYERS on real ranks for a step or more, and measure the next one.

    pace: a minibatch is one unit of its `work`.
    how: steps=1 before the measured one; samples=32 of a minibatch; dtype=torch.float32;
        optimizer_cls=torch.optim.AdamW; prefetch=True, as in `FullySharded`; recompute=False, or True for layers
        that keep only their input, and recompute their other activations.

    Raises ValueError for an unknown stage.
    """
    if stage not in STAGES:
        raise ValueError(f"stage={stage!r} is unknown; choose one of {', '.join(map(str, STAGES))}")
    train = partial(_train, stage=stage, **how)
    run = launch(train, ranks, pace=pace)
    held, activations, weights = zip(*run.results, strict=True)
    if how.get("recompute"):  # the ledger sees only what a reentrant checkpoint recomputes, which are the same tensors
        activations = tuple(result[1] for result in launch(partial(train, use_reentrant=True), ranks).results)
    return ShardedStep(after_barrier(run.timeline), list(held), list(activations), weights[0])


def _train(
    rank: int,
    stage: int,
    samples: int = 32,
    steps: int = 1,
    recompute: bool = False,
    use_reentrant: bool = False,
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> tuple[Bytes, int, Tensor]:
    model = TinyGPT(FOUR_LAYERS, seed=rank, dtype=dtype)
    if recompute:
        compute_again(model, use_reentrant)
    module, optimizer, finish = shard(model, stage, **how)
    *first, last = shares(rank, samples, steps + 1)
    for share in first:
        _step(module, optimizer, finish, share, recompute)
    weights = flat(module.state_dict().values())
    dist.barrier()
    with Ledger(module, getattr(optimizer, "inner", optimizer)) as ledger:
        _step(module, optimizer, finish, last, recompute)
    (held,) = (sample.held for sample in ledger.samples if sample.event == "step")
    return held, max(sample.held.activations for sample in ledger.samples), weights


def shard(
    model: TinyGPT, stage: int, prefetch: bool = True, optimizer_cls: Any = torch.optim.AdamW
) -> tuple[nn.Module, Any, Callable[[], Any]]:
    """The module to train, its optimizer, and the call between backward and update."""
    if stage == 0:
        replica = DataParallel(model, bucket_mb=BUCKET)
        return replica, optimizer_cls(replica.parameters(), lr=1e-3), replica.finish
    if stage == 3:
        sharded = FullySharded(model, prefetch=prefetch)
        return sharded, optimizer_cls(sharded.parameters(), lr=1e-3), lambda: None
    gradients: Any = {1: "local", 2: "sharded"}[stage]
    optimizer = ShardedOptimizer(model.parameters(), optimizer_cls, gradients=gradients, bucket_mb=BUCKET, lr=1e-3)
    return model, optimizer, optimizer.finish


def _step(module: nn.Module, optimizer: Any, finish: Callable[[], Any], share: Any, recompute: bool) -> None:
    (inputs, targets), work = share, 1 / dist.get_world_size()
    with compute("forward", work=work):
        loss = data.answer_loss(module(inputs), targets)
    with compute("backward", work=work, includes="forward" if recompute else ""):
        loss.backward()
    finish()
    optimizer.step()
    optimizer.zero_grad()


def compute_again(model: TinyGPT, use_reentrant: bool = False) -> None:
    """Let each layer keep only its input, and recompute its activations when backward needs them."""
    for layer in list(model.blocks)[1:-1]:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=use_reentrant)
