"""Training steps that explorers and questions run, for lessons to call by themselves as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib import data
from course_lib.mechanisms import batches
from course_lib.mechanisms.data_parallel import DataParallel
from course_lib.mechanisms.layerwise import LayerWise, stage_bytes
from course_lib.mechanisms.ledger import Bytes, Ledger
from course_lib.mechanisms.pipeline import run_schedule
from course_lib.model import GPTConfig, TinyGPT
from course_lib.ranks import Pace, launch
from course_lib.schedules import Schedule
from course_lib.timeline import COMPUTE_KINDS, Span, Timeline, compute, rehearsal

# Small, so that sixteen ranks on two cores really compute in less time than the devices they stand for.
SMALL = GPTConfig(layers=1, hidden=32, heads=2)
TINY = 8  # width of a stage that stands for a larger one
Ran = TypeVar("Ran")
BUCKET = 0.4  # of the model: three of them, as a large model fills some of 25 MiB


def training_step(
    world_size: int,
    batch_size: int,
    pace: Pace | None = None,
    overlap: bool = True,
    config: GPTConfig = SMALL,
    repeat: int = 1,
) -> Timeline:
    """Train with data parallelism on real ranks; the timeline of one step, of `repeat` steps the fastest.

    batch_size: samples of the whole minibatch. One sample is one unit of `work` for the pace.

    Raises ValueError if there are fewer samples than ranks.
    """
    if batch_size < world_size:
        raise ValueError(f"batch_size={batch_size} is less than world_size={world_size}; every rank needs a sample")
    run = launch(_train, world_size, (batch_size, overlap, config, repeat), pace=pace)
    # Whatever else the computer does can only slow a step down.
    return min(last_steps(run.timeline, repeat), key=lambda step: step.makespan)


def steady(run: Callable[[], Timeline], predicted: float, attempts: int = 3) -> Timeline:
    """A paced run, once more if it took over 2% longer than predicted: a busy computer can only make it longer."""
    shortest = run()
    for _ in range(attempts - 1):
        if shortest.makespan < 1.02 * predicted:
            break
        shortest = min(shortest, run(), key=lambda timeline: timeline.makespan)
    return shortest


def fastest(run: Callable[[], Ran], timeline: Callable[[Ran], Timeline], repeat: int) -> Ran:
    """Of `repeat` runs the fastest: whatever else the computer does can only slow one down.

    Paced runs that are not disturbed take equally long. If the two fastest do not, within 1%, there are up to twice as
    many more.

    timeline: of what a run returns.
    """
    runs = sorted((run() for _ in range(repeat)), key=lambda ran: timeline(ran).makespan)
    for _ in range(2 * repeat if repeat > 1 and timeline(runs[0]).origin == "paced" else 0):
        if timeline(runs[1]).makespan < 1.01 * timeline(runs[0]).makespan:
            break
        runs = sorted([*runs, run()], key=lambda ran: timeline(ran).makespan)
    return runs[0]


def pipeline_step(
    schedule: Schedule, pace: Pace | None = None, layers: Sequence[int] | None = None, repeat: int = 2
) -> Timeline:
    """One forward and backward pass of a pipeline on real ranks, from its first computation to its last.

    Of `repeat` runs the fastest, as in `fastest`.

    What travels in the background, and so holds nobody up, is left out.

    layers: how many each stage has; one layer is one unit of `work` for the pace. None: one each.

    Raises ValueError if that is not one number for each stage.
    """
    layers = [1] * schedule.n_stages if layers is None else list(layers)
    if len(layers) != schedule.n_stages:
        raise ValueError(f"layers={layers} has {len(layers)} numbers for {schedule.n_stages} stages; give one for each")
    return fastest(lambda: _pipeline_step(schedule, layers, pace), lambda step: step, repeat)


def _pipeline_step(schedule: Schedule, layers: Sequence[int], pace: Pace | None) -> Timeline:
    timeline = launch(_flow, schedule.n_ranks, (schedule, layers), pace=pace).timeline
    spans = [span for rank, row in enumerate(schedule.actions) for span in _last(timeline.of(rank), len(row))]
    start = min(span.start for span in spans if span.kind in COMPUTE_KINDS)
    cut = (span._replace(start=max(span.start, start)) for span in spans)
    return Timeline([span for span in cut if span.start < span.end], timeline.world_size, timeline.origin)


def _last(spans: list[Span], n: int) -> Iterator[Span]:
    """A rank's last n computations, and what held it up between them or before."""
    computed = [span for span in spans if span.kind in COMPUTE_KINDS]
    earlier = max((span.end for span in computed[:-n]), default=0.0)
    for span in spans:
        if span.start >= earlier and span.end <= computed[-1].end and not span.background:
            yield span


class LayerWiseStep(NamedTuple):
    """A training step of `LayerWise`, and the most that each rank held in it."""

    timeline: Timeline
    held: list[Bytes]


def layerwise_step(
    world_size: int,
    samples: int,
    config: GPTConfig = SMALL,
    cut: str = "number",
    pace: Pace | None = None,
    repeat: int = 2,
) -> LayerWiseStep:
    """Forward and backward of a model that is cut between its layers, on real ranks; a block is one unit of `work`.

    Of `repeat` runs the fastest, as in `fastest`.

    cut: "number" for equal numbers of blocks, "bytes" for stages that are equal in these.

    Raises ValueError for another cut.
    """
    if cut not in CUTS:
        raise ValueError(f"cut={cut!r} is unknown; choose one of {', '.join(CUTS)}")
    return fastest(lambda: _layerwise_step(world_size, samples, config, cut, pace), lambda step: step.timeline, repeat)


def _layerwise_step(world_size: int, samples: int, config: GPTConfig, cut: str, pace: Pace | None) -> LayerWiseStep:
    run = launch(_train_stage, world_size, (samples, config, cut), pace=pace)
    start = max(span.start for span in run.timeline.of(0) if span.kind == "forward")
    return LayerWiseStep(_since(run.timeline, start), run.results)


def _since(timeline: Timeline, start: float) -> Timeline:
    """What is computed from start on, and what held ranks up meanwhile."""
    end = max(span.end for span in timeline.spans if span.kind in COMPUTE_KINDS)
    spans = [span for span in timeline.spans if span.end > start and not span.background]
    cut = (span._replace(start=max(span.start, start), end=min(span.end, end)) for span in spans)
    return Timeline([span for span in cut if span.start < span.end], timeline.world_size, timeline.origin)


def _train_stage(rank: int, samples: int, config: GPTConfig, cut: str) -> Bytes:
    """A step that makes buffers, one with the ledger, and one for the timeline."""
    minibatch = data.examples([(10 + sample % 90, 99 - sample % 90) for sample in range(samples)])
    blocks = TinyGPT(config).blocks
    chain = LayerWise(blocks, costs=CUTS[cut](blocks))
    optimizer = torch.optim.AdamW(chain.parameters())
    with rehearsal():
        _train_chain(chain, optimizer, *minibatch)
        with Ledger(chain, optimizer) as ledger:
            _train_chain(chain, optimizer, *minibatch)
    dist.barrier()
    _train_chain(chain, optimizer, *minibatch)
    return ledger.peak.held


def _train_chain(
    chain: LayerWise, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> None:
    output = chain(inputs)
    chain.backward(None if output is None else data.answer_loss(output, targets))
    optimizer.step()
    optimizer.zero_grad()


def _block_bytes(blocks: nn.Sequential) -> list[float]:
    return [float(size) for size in stage_bytes(blocks, [range(i, i + 1) for i in range(len(blocks))])]


def _alike(blocks: nn.Sequential) -> list[float]:
    return [1.0] * len(blocks)


CUTS = {"number": _alike, "bytes": _block_bytes}


def last_steps(timeline: Timeline, n: int = 1) -> list[Timeline]:
    """The last n training steps of a run, each from its forward pass to the end of its optimizer's step.

    Raises ValueError if some rank has marked fewer than n forward passes or optimizer steps.
    """
    steps: list[list[Span]] = [[] for _ in range(n)]
    for rank in range(timeline.world_size):
        spans = timeline.of(rank)
        starts = [span.start for span in spans if span.kind == "forward"][-n:]
        ends = [span.end for span in spans if span.kind == "optimizer"][-n:]
        if (marked := min(len(starts), len(ends))) < n:
            raise ValueError(f"n={n} steps are not in this timeline; rank {rank} has marked {marked}")
        for step, start, end in zip(steps, starts, ends, strict=True):
            # A barrier that took no time ends when the step begins, and is no part of it.
            step += [span for span in spans if start <= span.start and start < span.end <= end]
    return [Timeline(step, timeline.world_size, timeline.origin) for step in steps]


def after_barrier(timeline: Timeline) -> Timeline:
    """What every rank did after the last barrier at which all met."""
    spans: list[Span] = []
    for rank in range(timeline.world_size):
        met = max(span.end for span in timeline.of(rank) if span.name == "barrier")
        spans += [span for span in timeline.of(rank) if span.start >= met and span.name != "barrier"]
    return Timeline(spans, timeline.world_size, timeline.origin)


def _flow(rank: int, schedule: Schedule, layers: Sequence[int]) -> None:
    # Stages of next to nothing, so that eight ranks on two cores keep up with the devices they stand for.
    stages = {stage: nn.Linear(TINY, TINY) for stage in schedule.stages_of(rank)}
    minibatch = torch.randn(schedule.n_micro_batches, TINY)
    first = Schedule([[action for action in row if action.micro_batch == 0] for row in schedule.actions])
    with rehearsal():
        run_schedule(first, stages, minibatch, minibatch, F.mse_loss)
    dist.barrier()
    run_schedule(schedule, stages, minibatch, minibatch, F.mse_loss, work={stage: layers[stage] for stage in stages})


def _train(rank: int, batch_size: int, overlap: bool, config: GPTConfig, repeat: int) -> None:
    model = TinyGPT(config)
    size = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
    # Buckets are there for the overlap. Without it, one message costs less than three.
    replica = DataParallel(model, bucket_mb=BUCKET * size if overlap else size, overlap=overlap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    minibatch = data.examples([(10 + sample % 90, 99 - sample % 90) for sample in range(batch_size)])
    inputs, targets = batches.split(minibatch, dist.get_world_size())[rank]

    def step() -> None:
        dist.barrier()
        with compute("forward", work=len(inputs)):
            loss = data.answer_loss(replica(inputs), targets)
        with compute("backward", work=len(inputs)):
            loss.backward()
        replica.finish()
        with compute("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    with rehearsal():
        step()  # makes buffers and counts shares
    for _ in range(repeat):
        step()
