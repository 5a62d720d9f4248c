"""The situation of a training job: its engineers' settings, and the faults of its machines.

A job has eight devices in two machines of four. A case starts from a healthy job; a culprit and a repair are changes to
a job, so all three are situations:

    healthy                     Job(dp=8)
    a culprit                   healthy.but(slow=(5, 1.6))
    a repair                    that.but(buckets=1)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from course_lib.ranks import Link, Pace
from course_lib.schedules import SCHEDULES, Schedule, peak_in_flight

DEVICES, PER_MACHINE = 8, 4
LAYERS = 16
FORWARD, BACKWARD, UPDATE = 0.001, 0.002, 0.01  # seconds of a device: per layer and sample; of the optimizer
ACTIVATIONS, GRADIENTS = 4_000, 160_000  # bytes, 2 per number: of a sample between two layers; of a layer
INSIDE, BETWEEN = Link(1e-5, 400e6), Link(5e-5, 50e6)


class TrainingRecipe(NamedTuple):
    """The recipe of a job: the settings that decide what it learns.

    master_weights: whether the optimizer keeps weights in 32 bits.  scale: the first loss scale.
    dynamic: whether the scale adapts.  sums: the dtype in which the replicas' gradients are added up.
    together: whether replicas agree on their gradients.  rate: the learning rate.
    bad_rank: a replica whose samples make gradients overflow.
    """

    master_weights: bool = True
    scale: float = 2.0**16
    dynamic: bool = True
    sums: torch.dtype = torch.float32
    together: bool = True
    rate: float = 3e-3
    bad_rank: int | None = None


HEALTHY = TrainingRecipe()


@dataclass(frozen=True)
class Job:
    """A job's settings and faults; by default everything is right.

    dp, pp, tp: how the devices share the work, 8 in all.  samples: of a minibatch.  micro_batches: of each replica.
    layers: of each stage; () for equal numbers.
    buckets: messages for a replica's gradients, each sent as soon as its layers are done; 1: all at the end.
    in_turn: ranks 0, 2, 4 and 6 are on machine 0, in place of 0, 1, 2 and 3.
    slow: a slow device, and how many times as long it takes.  between: the link between the machines.
    recipe: the settings that decide what the job learns.
    """

    dp: int = 8
    pp: int = 1
    tp: int = 1
    samples: int = 64
    micro_batches: int = 2
    layers: tuple[int, ...] = ()
    buckets: int = 8
    in_turn: bool = False
    slow: tuple[int, float] | None = None
    between: Link = BETWEEN
    recipe: TrainingRecipe = HEALTHY

    def but(self, **changes: object) -> Job:
        """The situation with some of its fields changed, or fields of its recipe."""
        own = {name: changes.pop(name) for name in list(changes) if name not in TrainingRecipe._fields}
        return replace(self, recipe=self.recipe._replace(**changes), **own)  # type: ignore[arg-type]

    @property
    def of_stages(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return self.layers or (LAYERS // self.pp,) * self.pp

    @property
    def micro_batch(self) -> float:
        """Samples of a micro-batch."""
        return self.samples / self.dp / self.micro_batches

    @cached_property
    def schedule(self) -> Schedule:
        return SCHEDULES["1f1b"](self.pp, self.micro_batches)

    @property
    def memory(self) -> list[float]:
        """The peak bytes of each rank, by the formulas of the planner.

        Weights, gradients and Adam's moments take 16 bytes for each parameter, or 8 if all are in 16 bits. For the
        backward pass a layer keeps 5 + 12/tp times the bytes of its output (Korthikanti et al. 2022, without the part
        that a fused attention kernel does not keep).
        """
        state = GRADIENTS * (8 if self.recipe.master_weights else 4) / self.tp
        kept = ACTIVATIONS * (5 + 12 / self.tp) * self.micro_batch
        of_layers = [state + kept * in_flight for in_flight in peak_in_flight(self.schedule)]
        stages = [rank // self.tp % self.pp for rank in range(DEVICES)]
        return [self.of_stages[stage] * of_layers[stage] for stage in stages]

    @property
    def pace(self) -> Pace:
        device = {"forward": FORWARD, "backward": BACKWARD, "optimizer": UPDATE}
        nodes = DEVICES // PER_MACHINE if self.in_turn else None
        return Pace(device, INSIDE, self.between, PER_MACHINE, dict([self.slow] if self.slow else []), nodes)

    @property
    def configuration(self) -> list[str]:
        """The engineers' settings, one line each."""
        one, adapts = self.recipe, "adapts" if self.recipe.dynamic else "is fixed"
        inside, between = (link.bandwidth / 1e6 for link in (INSIDE, self.between))
        kept, sums = 32 if one.master_weights else 16, str(one.sums).removeprefix("torch.")
        return [
            f"{self.dp} replicas, each of {self.pp} x {self.tp} devices (stages x tensor ranks)",
            f"{self.samples} samples in a minibatch, {self.micro_batches} micro-batches for each replica",
            f"layers on the stages: {', '.join(map(str, self.of_stages))}; gradients leave in {self.buckets} buckets",
            f"links: {inside:.0f} MB a second inside a machine, {between:.0f} between",
            f"float16, weights kept in {kept} bits, gradients added up in {sums}",
            f"a loss scale of {one.scale:,.0f} that {adapts}, a learning rate of {one.rate:g}",
        ]

    def machine(self, rank: int) -> int:
        return self.pace.node(rank)
