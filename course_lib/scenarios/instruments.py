"""What one can find out about a job: what it reports anyway, and measurements that cost the cluster's time.

Every reading has the same facts in the same order, whatever is wrong, so only what they say can give it away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, nan
from typing import NamedTuple

import torch
import torch.distributed as dist

from course_lib.figures import Picture, gantt, loss_at_end, lost_time, time_breakdown
from course_lib.figures.axis import duration, number, percent
from course_lib.ranks import launch
from course_lib.scenarios.replay import replay
from course_lib.scenarios.situation import DEVICES, Situation
from course_lib.scenarios.training import RANKS, train
from course_lib.timeline import compute

MESSAGE = 1_000_000  # bytes, to try a link with


class Signals(NamedTuple):
    """What a job reports without being asked. loss: at the end, the mean of all replicas; nan if it broke off."""

    samples_per_second: float
    loss: float

    def __str__(self) -> str:
        loss = f"a loss of {number(self.loss)}" if isfinite(self.loss) else "a loss that is no number"
        return f"{self.samples_per_second:.0f} samples a second (emulated), {loss} at the end (measured)"


def signals(job: Situation) -> Signals:
    ended = [loss_at_end(one.losses) if isfinite(one.losses[-1]) else nan for one in train(job.recipe)]
    return Signals(job.samples / replay(job).makespan, sum(ended) / RANKS)


class Reading(NamedTuple):
    facts: dict[str, str]
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Instrument:
    """A measurement. minutes: of the whole cluster's time."""

    title: str
    minutes: int
    read: Callable[[Situation], Reading]


def _devices(job: Situation) -> Reading:
    timeline = launch(_compute_alone, DEVICES, pace=job.pace).timeline
    return Reading({f"device {rank}": f"{duration(timeline.busy(rank))} for a layer" for rank in range(DEVICES)})


def _compute_alone(rank: int) -> None:
    with compute("forward"):
        pass


def _links(job: Situation) -> Reading:
    """Devices 0 and 1, 4 and 5, and across, one after the other, wherever their ranks are."""
    first, second = ([rank for rank in range(DEVICES) if job.machine(rank) == node] for node in (0, 1))
    pairs = {"inside machine 0": first[:2], "inside machine 1": second[:2], "between them": [first[0], second[0]]}
    facts = {}
    for name, (source, target) in pairs.items():
        sent = launch(_send, DEVICES, (source, target), pace=job.pace).timeline
        facts[name] = f"{MESSAGE / sent.makespan / 1e6:.0f} MB a second"
    return Reading(facts)


def _send(rank: int, source: int, target: int) -> None:
    if rank == source:
        dist.send(torch.zeros(MESSAGE, dtype=torch.uint8), target)
    if rank == target:
        dist.recv(torch.zeros(MESSAGE, dtype=torch.uint8), source)


def _profile(job: Situation) -> Reading:
    step = replay(job)
    of_ranks = {f"rank {rank}": f"computes {percent(step.busy(rank) / step.makespan)}" for rank in range(DEVICES)}
    pictures = gantt(step, title="One step"), lost_time({"one step": time_breakdown(step)}, title="Where its time goes")
    return Reading(of_ranks, pictures)


def _placement(job: Situation) -> Reading:
    return Reading({f"rank {rank}": f"on machine {job.machine(rank)}" for rank in range(DEVICES)})


def _replicas(job: Situation) -> Reading:
    return Reading({f"replica {rank}": f"{one.checksum:.4f}" for rank, one in enumerate(train(job.recipe))})


def _scale(job: Situation) -> Reading:
    one = train(job.recipe)[0]
    at = {"first": one.scales[0], "half-way": one.scales[len(one.scales) // 2], "last": one.scales[-1]}
    facts = {f"loss scale, {when}": f"{scale:g}" for when, scale in at.items()}
    return Reading({**facts, "updates skipped": f"{sum(one.skipped)} of {len(one.skipped)}"})


def _gradients(job: Situation) -> Reading:
    return Reading(
        {
            f"replica {rank}": f"overflows by itself in {sum(one.overflowed)} of {len(one.overflowed)} steps"
            for rank, one in enumerate(train(job.recipe))
        }
    )


def _updates(job: Situation) -> Reading:
    moved = train(job.recipe)[0].moved
    return Reading({"the last update moved the weights by": f"{moved:.2%}" if isfinite(moved) else "no number"})


INSTRUMENTS: dict[str, Instrument] = {
    "placement": Instrument("Who sits where", 1, _placement),
    "scale": Instrument("The loss scale and the skipped updates", 2, _scale),
    "replicas": Instrument("A sum of each replica's weights", 5, _replicas),
    "profile": Instrument("One step of every rank", 5, _profile),
    "links": Instrument("Every kind of link", 10, _links),
    "updates": Instrument("How far an update moves the weights", 10, _updates),
    "gradients": Instrument("Each replica's gradients, before they are added up", 15, _gradients),
    "devices": Instrument("Each device alone", 20, _devices),
}
