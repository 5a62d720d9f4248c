"""Training steps that explorers, questions and lessons run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib import data
from course_lib.classroom.runs.training import SMALL, train
from course_lib.mechanisms import batches
from course_lib.mechanisms.data_parallel import DataParallel
from course_lib.mechanisms.pipeline import run_schedule
from course_lib.model import GPTConfig, TinyGPT
from course_lib.ranks import Pace, launch
from course_lib.schedules import Schedule
from course_lib.timeline import COMPUTE_KINDS, Span, Timeline

TINY = 8  # width of a stage that stands for a larger one
BUCKET = 0.4  # buckets so small that there are three, as a large model fills several of 25 MiB


def after_barrier(timeline: Timeline) -> Timeline:
    """The timeline after the last barrier at which all ranks met.

    Raises ValueError if there was none.
    """
    spans: list[Span] = []
    for rank in range(timeline.world_size):
        own = [span for span in timeline.spans if span.rank == rank]  # names of operations
        barriers = [number for number, span in enumerate(own) if span.name == "barrier"]
        if not barriers:
            raise ValueError(f"rank {rank} met the others at no barrier; call dist.barrier() where the step begins")
        met = own[barriers[-1]].end
        for number, span in enumerate(own):
            # A span without duration at this moment may have come before the barrier.
            if span.end > met if span.kind in COMPUTE_KINDS else number > barriers[-1]:
                spans.append(span)
    return replace(timeline, spans=spans)


def held_up(timeline: Timeline) -> Timeline:
    """The timeline without background transfers: computation, waits and exposed transfers."""
    return replace(timeline, spans=[span for span in timeline.spans if not span.background])


def training_step(
    world_size: int,
    batch_size: int,
    pace: Pace | None = None,
    overlap: bool = True,
    config: GPTConfig = SMALL,
) -> Timeline:
    """Train with data parallelism on real ranks; the timeline of one step.

    batch_size: samples of the whole minibatch. One sample is one unit of `work` for the pace.

    Raises ValueError if there are fewer samples than ranks.
    """
    if batch_size < world_size:
        raise ValueError(f"batch_size={batch_size} is less than world_size={world_size}; every rank needs a sample")
    return after_barrier(launch(_train, world_size, (batch_size, overlap, config), pace=pace).timeline)


def _train(rank: int, batch_size: int, overlap: bool, config: GPTConfig) -> None:
    model = TinyGPT(config)
    size = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
    # Buckets are there for the overlap. Without it, one message costs less than three.
    replica = DataParallel(model, bucket_mb=BUCKET * size if overlap else size, overlap=overlap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    minibatch = data.fixed_examples(batch_size)
    share = batches.split(minibatch, dist.get_world_size())[rank]

    first = [part[:1] for part in share]  # the first step makes buffers
    train(replica, _met([first, share]), data.answer_loss, optimizer, combine=replica.finish)


def _met(minibatches: Iterable[Sequence[torch.Tensor]]) -> Iterator[Sequence[torch.Tensor]]:
    """The minibatches, with a barrier before each."""
    for minibatch in minibatches:
        dist.barrier()
        yield minibatch


def pipeline_step(schedule: Schedule, pace: Pace, layers: Sequence[int] | None = None) -> Timeline:
    """One forward and backward pass of a pipeline on real ranks; its timeline.

    layers: the number of layers of each stage; a layer is one unit of `work` for the pace. None: one each.
    """
    layers = [1] * schedule.n_stages if layers is None else list(layers)
    return held_up(launch(_flow, schedule.n_ranks, (schedule, layers), pace=pace).timeline)


def _flow(rank: int, schedule: Schedule, layers: Sequence[int]) -> None:
    # Tiny stages: their time comes from the pace.
    stages = {stage: nn.Linear(TINY, TINY) for stage in schedule.stages_of(rank)}
    minibatch = torch.randn(schedule.n_micro_batches, TINY)
    run_schedule(schedule, stages, minibatch, minibatch, F.mse_loss, work={stage: layers[stage] for stage in stages})
