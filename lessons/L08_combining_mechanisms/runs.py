"""Runs of eight ranks as a mesh on two machines of four: one training step of `hybrid`.

    machine 0   rank 0  1  2  3             a fast link between the ranks of a machine, a slow one between machines
    machine 1   rank 4  5  6  7

Devices and links are emulated. Bytes are counted in the trace, and the updated weights are compared with those of one
process with all samples and the whole model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import data
from course_lib.classroom.runs.steps import after_barrier
from course_lib.classroom.runs.training import train
from course_lib.mechanisms import hybrid, tensor_parallel
from course_lib.mechanisms.mesh import AXES
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import ModelSpec
from course_lib.ranks import Link, Pace, launch
from course_lib.schedules import SCHEDULES, Schedule
from course_lib.timeline import Span, Timeline
from lessons.L08_combining_mechanisms import exact_bytes

Sizes = tuple[int, int, int]
OneProcess = tuple[dict[str, Tensor], dict[str, float]]

CONFIG = GPTConfig(layers=4, hidden=32, heads=8)  # so small that eight ranks on two cores are done in a blink
MODEL = ModelSpec(CONFIG.layers, CONFIG.hidden, CONFIG.heads, CONFIG.sequence, CONFIG.vocab, tied_embeddings=False)
SAMPLES, PER_MACHINE = 64, 4
SECONDS, UPDATE = 0.005, 0.004  # a sample in a layer: forward, and each half of the backward; the optimizer
INSIDE, BETWEEN = Link(0.0002, 25e6), Link(0.002, 5e6)  # inside a machine, between machines
EARLY: dict[str, Any] = {"gradients": "sharded", "bucket_mb": 0.07}  # buckets of about a layer
AXIS_OF = {"all_reduce": "tp", "isend": "pp", "all_to_all": "dp", "all_gather": "dp"}
# The largest gradient is about 1, and so is the largest weight. So an update is a thousand times as large as the
# weights, and a wrong gradient cannot hide behind them.
RATE = 1000.0
# In 32 bits, one rounding for each number of the longest sum, a weight's gradient over all tokens (measured: 0.000001).
# In 16 bits, twice the largest measured: 0.02, and 0.15 for the sums of eight tensor ranks, rounded seven times; small
# mistakes show in 32 bits only.
ROUNDING = {torch.float32: SAMPLES * CONFIG.sequence * torch.finfo(torch.float32).eps / 2, torch.bfloat16: 0.3}


class MeshStep(NamedTuple):
    """A training step on a mesh.

    sent: bytes by axis ("tp", "pp", "dp", and "all" for the loss, all-reduced over all ranks), source and target.
    off: the largest difference of a weight from one process's, as a share of the largest move in its tensor.
    transfers: the spans of all messages, by axis, source and target.
    """

    timeline: Timeline
    sent: dict[str, dict[tuple[int, int], int]]
    off: float
    transfers: dict[str, dict[tuple[int, int], list[Span]]]


class HybridExperiment(NamedTuple):
    """An arrangement of ranks. sizes: of dp, pp and tp.  between: the link between machines.

    overlap: replicas send gradients while the backward pass still runs. It is for one micro-batch.

    Ranks share the work equally: all numbers are powers of two, with no more stages than layers, and no more
    replicas x micro-batches than samples.
    """

    sizes: Sizes
    micro_batches: int = 4
    name: str = "1f1b"
    dtype: torch.dtype = torch.float32
    between: Link = BETWEEN
    samples: int = SAMPLES
    overlap: bool = False

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def words(self) -> str:
        return " x ".join(f"{axis} {n}" for axis, n in zip(AXES, self.sizes, strict=True))

    @property
    def schedule(self) -> Schedule:
        return SCHEDULES[self.name](self.sizes[1], self.micro_batches)

    @property
    def seconds(self) -> float:
        """Seconds of a forward action, and of each half of a backward one. All stages and micro-batches are equal."""
        dp, pp, tp = self.sizes
        return SECONDS * (self.samples / dp / self.micro_batches) * (CONFIG.layers / pp) / tp

    @property
    def pace(self) -> Pace:
        device = {**dict.fromkeys(("forward", "backward", "weight_grad"), self.seconds), "optimizer": UPDATE}
        return Pace(device, INSIDE, self.between, PER_MACHINE)

    @property
    def predicted(self) -> exact_bytes.Hybrid:
        """The planner's prediction of the bytes held and sent."""
        return exact_bytes.Hybrid(MODEL, self.sizes, self.samples, self.dtype.itemsize)

    def group(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from this one at most in their place on this axis."""
        stride = math.prod(self.sizes[AXES.index(axis) + 1 :])
        n = self.sizes[AXES.index(axis)]
        first = rank - rank // stride % n * stride
        return list(range(first, first + n * stride, stride))

    @lru_cache(maxsize=32)  # noqa: B019  (on an emulated clock, it comes out the same each time)
    def run(self) -> MeshStep:
        """Run one step with ZeRO-1 on real ranks, at the pace of the devices and links that they stand for."""
        how = self.sizes, self.schedule, self.dtype, self.samples, _one_process(self.samples), self.overlap
        run = launch(_train, self.ranks, how, pace=self.pace)
        step = after_barrier(run.timeline)
        transfers = self._who_sent_what(step)
        sent = {
            axis: {pair: sum(span.bytes for span in spans) for pair, spans in of_axis.items()}
            for axis, of_axis in transfers.items()
        }
        return MeshStep(step, sent, max(run.results), transfers)

    def is_right(self, step: MeshStep) -> bool:
        """Whether the updated weights are those of one process, up to rounding."""
        return step.off < ROUNDING[self.dtype]

    def _who_sent_what(self, step: Timeline) -> dict[str, dict[tuple[int, int], list[Span]]]:
        """The transfers on each axis, by source and target.

        Each axis has operations of its own, except for the last all-reduce, which is that of the loss.
        A collective counts as its ring: each rank sends to the next on its axis, and the last to the first.
        """
        sent: dict[str, dict[tuple[int, int], list[Span]]] = {axis: defaultdict(list) for axis in (*AXES, "all")}
        for rank in range(step.world_size):
            moved = [span for span in step.of(rank) if span.kind == "transfer" and span.name in AXIS_OF and span.bytes]
            loss = [span for span in moved if span.name == "all_reduce"][-1]
            for span in moved:
                axis = "all" if span is loss else AXIS_OF[span.name]
                group = list(range(self.ranks)) if axis == "all" else self.group(rank, axis)
                following = group[(group.index(rank) + 1) % len(group)]
                sent[axis][rank, following if span.peer is None else span.peer].append(span)
        return sent


@lru_cache(maxsize=64)
def predicted_to_send(experiment: HybridExperiment) -> list[dict[str, int]]:
    """Predicted bytes that each rank sends, by axis."""
    return [experiment.predicted.sent(rank) for rank in range(experiment.ranks)]


def _train(
    rank: int, sizes: Sizes, schedule: Schedule, dtype: torch.dtype, samples: int, alone: OneProcess, overlap: bool
) -> float:
    """Train a step; return the largest error of the rank's weights, as a share of the largest move in the tensor."""
    mesh = hybrid.Mesh(*sizes)
    part = hybrid.ModelPart(TinyGPT(CONFIG, dtype=dtype), mesh, schedule)
    early = EARLY if overlap else {}
    optimizer = hybrid.make_optimizer(part, torch.optim.SGD, lr=RATE, **early)
    inputs, targets = data.fixed_examples(samples)
    dist.barrier()
    hybrid.train_step(part, optimizer, inputs, targets)
    where, tp, (after, moved) = tensor_parallel.placements(part), mesh.group("tp"), alone
    off = [
        (value - where[name].shard(after[name], tp)).abs().max().item() / moved[name]
        for name, value in part.state_dict().items()
    ]
    mesh.close()
    return max(off)


@lru_cache(maxsize=4)
def _one_process(samples: int) -> OneProcess:
    """The weights of one process after the step, in 32 bits, and the largest move in each tensor."""
    model = TinyGPT(CONFIG)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, [data.fixed_examples(samples)], data.answer_loss, torch.optim.SGD(model.parameters(), lr=RATE))
    after = model.state_dict()
    moved = {name: (after[name] - before[name]).abs().max().item() for name in after}
    least = 0.01 * max(moved.values())  # the gradient of a key's bias is only rounding
    return after, {name: max(distance, least) for name, distance in moved.items()}
