"""A training job, in one description: model, plan, recipe, data, cluster, and what happens to it.

A change takes effect at a report and stays; a fault, a setting that somebody touched and a repair are all changes:

    Job(dp=8)                                                       as it was planned
    .after(Change(120, {"slow": (5, 1.15)}))                        device 5 is throttled from report 120 on
    .after(Change(160, {"slow": None}, resume=120))                 replaced, from the checkpoint of step 120

So everything that is seen of a job comes from running the one description, and no signal is drawn by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from course_lib.ranks import Link, Pace
from course_lib.schedules import SCHEDULES, Schedule, peak_in_flight

LAYERS = 16
UPDATE = 0.2  # seconds of the optimizer
ACTIVATIONS, GRADIENTS = 4_000, 80_000  # bytes of a sample between two layers; parameters of a layer
REPORT, CHECKPOINT = 10, 10  # steps between two reports; reports between two checkpoints
INSIDE, BETWEEN = Link(1e-3, 20e6), Link(2e-3, 2.5e6)
LEARNED = ("rate", "master_weights", "fixed", "order", "bad", "corrupt", "seed")  # of no matter to the clock
TIMED = (  # of no matter to the training
    *("forward", "overhead", "layers", "buckets", "overlap", "in_turn", "between"),
    *("slow", "weak", "loading", "stuck", "saving", "patience"),
)


@dataclass(frozen=True)
class Change:
    """A change of a job's fields. at: the first report for which it is in force.  often: the share of reports.

    resume: the checkpoint from which the job goes on, as the number of its step; None: it just goes on.
    minutes: for which the job stands still before that report.
    """

    at: int
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    often: float = 1.0
    resume: int | None = None
    minutes: float = 0.0

    def is_in_force(self, report: int) -> bool:
        return self.at <= report and (self.often == 1 or Random(f"{self.at} {report}").random() < self.often)


@dataclass(frozen=True)
class Job:
    """A job's settings and faults; by default everything is right.

    dp, pp, tp: how the devices share the work.  samples: of a minibatch.  micro_batches: of each replica.
    layers: of each stage; () for equal numbers.
    forward: seconds of a device for a layer and a sample; the backward pass takes twice as long.
    overhead: what each pass of a layer takes beside its samples, in samples.
    buckets: messages for a replica's gradients.  overlap: whether each leaves as soon as its layers are done.

    rate: the learning rate.  master_weights: whether the optimizer keeps its numbers in 32 bits.
    fixed: a loss scale that does not adapt; None: it does.  sums: the dtype in which gradients are added up.
    together: who agrees on gradients: "all", in one ring or on two "levels"; the replicas of each "node"; or "none".
        "local" is as "node", and all agree on their weights from time to time (`training`).
    order: of the data: "shuffled", "sorted", or "same", if all replicas read the same.
    bad: a shard with broken samples, and the share of its minibatches.

    nodes, in_turn: where ranks sit: on one node after the other, or dealt out to them in turn.
    slow: a slow device, and how many times as long it takes.  corrupt: a device that computes wrong numbers.
    weak: a node whose link carries less, and what it carries.
    loading: a node that waits for its data, and how many seconds a step.  stuck: a rank that hangs, and how (`step`).
    saving: seconds of a checkpoint; 0: none is written.
    patience: seconds after which the watchdog ends a job that waits.
    """

    dp: int = 8
    pp: int = 1
    tp: int = 1
    samples: int = 64
    micro_batches: int = 2
    layers: tuple[int, ...] = ()
    forward: float = 0.03
    overhead: float = 0.0
    buckets: int = 8
    overlap: bool = True
    rate: float = 3e-3
    master_weights: bool = True
    fixed: float | None = None
    sums: torch.dtype = torch.float32
    together: str = "all"
    order: str = "shuffled"
    bad: tuple[int, float] | None = None
    in_turn: bool = False
    nodes: int = 4
    between: Link = BETWEEN
    slow: tuple[int, float] | None = None
    corrupt: int | None = None
    weak: tuple[int, Link] | None = None
    loading: tuple[int, float] | None = None
    stuck: tuple[str, int] | None = None
    saving: float = 20.0
    patience: float = 600.0
    seed: int = 0
    changes: tuple[Change, ...] = ()

    def but(self, **fields: Any) -> Job:
        return replace(self, **fields)

    def after(self, *changes: Change) -> Job:
        return replace(self, changes=(*self.changes, *changes))

    def at(self, report: int, always: bool = False) -> Job:
        """The settings in force at a report. always: what comes and goes is there, too."""
        own = (one for one in self.changes if one.at <= report and (always or one.is_in_force(report)))
        fields = {field: value for change in own for field, value in change.fields.items()}
        return replace(self, changes=(), **fields)

    def clocked(self, step: int) -> Job:
        """The job as the clock sees it at a step: settings that only change what is learned make no other step.

        A checkpoint is part of it only where something hangs. Else it just adds its time.
        """
        saves = (step + 1) % CHECKPOINT == 0
        hangs = self.stuck or (saves and self.saving > self.patience)
        return self._as_by_default(LEARNED).but(saving=self.saving if hangs else 0.0)

    @property
    def trained(self) -> Job:
        """The job as the training sees it: settings that only change a step's time make no other training."""
        return self._as_by_default(TIMED)

    def _as_by_default(self, names: Sequence[str]) -> Job:
        return replace(self, changes=(), **{name: getattr(Job, name) for name in names})

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def per_node(self) -> int:
        return self.world // self.nodes

    @property
    def of_stages(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return self.layers or (LAYERS // self.pp,) * self.pp

    @property
    def micro_batch(self) -> float:
        """Samples of a micro-batch."""
        return self.samples / self.dp / self.micro_batches

    @property
    def schedule(self) -> Schedule:
        return SCHEDULES["1f1b"](self.pp, self.micro_batches)

    @property
    def memory(self) -> list[float]:
        """The peak bytes of each rank, by the formulas of the planner.

        Weights, gradients and Adam's moments take 16 bytes for each parameter, or 8 if all are in 16 bits. For the
        backward pass a layer keeps 5 + 12/tp times the bytes of its output (Korthikanti et al. 2022, without the part
        that a fused attention kernel does not keep).
        """
        state = GRADIENTS * (16 if self.master_weights else 8) / self.tp
        kept = ACTIVATIONS * (5 + 12 / self.tp) * self.micro_batch
        of_layers = [state + kept * in_flight for in_flight in peak_in_flight(self.schedule)]
        stages = [rank // self.tp % self.pp for rank in range(self.world)]
        return [self.of_stages[stage] * of_layers[stage] for stage in stages]

    @property
    def configuration(self) -> list[str]:
        layers = ", ".join(map(str, self.of_stages))
        scale = "that adapts" if self.fixed is None else f"of {self.fixed:,.0f}"
        return [
            f"{self.dp} replicas of {self.pp} x {self.tp} devices (stages x tensor ranks), {self.per_node} on a node",
            f"{self.samples} samples in a minibatch, {self.micro_batches} micro-batches, stages of {layers} layers",
            f"gradients in up to {self.buckets} messages; a node sends {self.between.bandwidth / 1e6:.2f} MB a second",
            f"float16, 32-bit sums and master weights, a loss scale {scale}, a learning rate of {self.rate:g}",
        ]

    @property
    def pace(self) -> Pace:
        device = {"forward": self.forward, "backward": 2 * self.forward, "optimizer": UPDATE, "other": 1.0}
        slow = {rank: self.slow[1] for rank in range(self.world) if self.slow and self.device(rank) == self.slow[0]}
        weak = {self.weak[0]: self.weak[1]} if self.weak else {}
        return Pace(device, INSIDE, self.between, self.per_node, slow, self.nodes if self.in_turn else None, weak)

    def place(self, rank: int) -> tuple[int, int]:
        """A rank's node, and its number there."""
        return (rank % self.nodes, rank // self.nodes) if self.in_turn else divmod(rank, self.per_node)

    def node(self, rank: int) -> int:
        return self.place(rank)[0]

    def device(self, rank: int) -> int:
        node, number = self.place(rank)
        return node * self.per_node + number
