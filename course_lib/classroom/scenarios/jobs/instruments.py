"""Instruments for a job: its own reports, and measurements that cost the cluster's time.

Every reading has the same facts in the same order, whatever the fault, so only their values can reveal it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import starmap
from math import isfinite, nan
from typing import NamedTuple

import torch
import torch.distributed as dist

from course_lib.classroom.scenarios.jobs.job import DEVICES, Job
from course_lib.classroom.scenarios.jobs.replay import replay
from course_lib.classroom.scenarios.jobs.training import RANKS, STEPS, train
from course_lib.figures import Picture, gantt, loss_at_end, lost_time
from course_lib.figures.axis import counted, duration, number, percent, ticks
from course_lib.figures.chart import Axis, Chart, Curve, Panel, Point
from course_lib.figures.palette import lines_of
from course_lib.ranks import launch
from course_lib.timeline import compute

MESSAGE = 10_000_000  # bytes of a message to test a link


class Signals(NamedTuple):
    """The reports of a job. loss: at the end, the mean of all replicas; nan if the training broke."""

    samples_per_second: float
    loss: float

    def __str__(self) -> str:
        loss = f"a loss of {number(self.loss)}" if isfinite(self.loss) else "a loss that is not finite"
        return f"{self.samples_per_second:.0f} samples a second (emulated), {loss} at the end (measured)"


def signals(job: Job) -> Signals:
    ended = [loss_at_end(one.losses) if isfinite(one.losses[-1]) else nan for one in train(job.recipe)]
    return Signals(job.samples / replay(job).makespan, sum(ended) / RANKS)


def throughput(jobs: Mapping[str, Job]) -> Picture:
    """Draw the samples per second over the steps of the training. A step without an update is shorter."""
    curves = {name: _samples_per_second(job) for name, job in jobs.items()}
    most, looks = 1.1 * max(map(max, curves.values())), lines_of(curves)
    across, up = Axis("step", 0, STEPS, ticks(STEPS, 8)), Axis("samples a second", 0, most, ticks(most, 4))
    lines = [Curve(name, _points(name, curve), looks[name]) for name, curve in curves.items()]
    chart = Chart([Panel(across, up, lines, height=120.0)], {"emulated"}, "The throughput", 800, looks)
    said = "; ".join(_range(name, curve) for name, curve in curves.items())
    return Picture.of(chart, f"Samples a second: {said}.", [])


def _points(name: str, rates: list[float]) -> list[Point]:
    """The points of a curve, with a symbol where the training ended."""
    return [*starmap(Point, enumerate(rates[:-1])), Point(len(rates) - 1, rates[-1], tip=_range(name, rates))]


def _range(name: str, rates: list[float]) -> str:
    between = " to ".join(dict.fromkeys(f"{rate:.0f}" for rate in (min(rates), max(rates))))
    return f"{name}, {between} over {counted(len(rates), 'step')}"


def _samples_per_second(job: Job) -> list[float]:
    step = replay(job)
    before_update = replace(step, spans=[span for span in step.spans if span.kind != "optimizer"])
    return [job.samples / (before_update if skips else step).makespan for skips in train(job.recipe)[0].skipped]


class Reading(NamedTuple):
    facts: dict[str, str]
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Instrument:
    """A measurement. minutes: its cost in time of the whole cluster."""

    title: str
    minutes: int
    read: Callable[[Job], Reading]


@cache
def _devices(job: Job) -> Reading:
    timeline = launch(_compute_alone, DEVICES, pace=job.pace).timeline
    return Reading({f"device {rank}": f"{duration(timeline.busy(rank))} for a layer" for rank in range(DEVICES)})


def _compute_alone(rank: int) -> None:
    with compute("forward"):
        pass


@cache
def _links(job: Job) -> Reading:
    """Test links one after the other: in each machine, and between them, wherever the ranks are."""
    first, second = ([rank for rank in range(DEVICES) if job.machine(rank) == node] for node in (0, 1))
    pairs = {"inside machine 0": first[:2], "inside machine 1": second[:2], "between them": [first[0], second[0]]}
    sent = launch(_send, DEVICES, (list(pairs.values()),), pace=job.pace).timeline
    seconds = {span.rank: span.duration for span in sent.spans if (span.name, span.kind) == ("recv", "transfer")}
    return Reading({name: f"{MESSAGE / seconds[to] / 1e6:.0f} MB a second" for name, (_, to) in pairs.items()})


def _send(rank: int, pairs: list[list[int]]) -> None:
    message = torch.zeros(MESSAGE, dtype=torch.uint8)
    for source, target in pairs:
        if rank == source:
            dist.send(message, target)
        if rank == target:
            dist.recv(message, source)


def _profile(job: Job) -> Reading:
    step = replay(job)
    of_ranks = {f"rank {rank}": f"computes {percent(step.busy(rank) / step.makespan)}" for rank in range(DEVICES)}
    pictures = gantt(step, title="One step"), lost_time({"one step": step}, title="Where its time goes")
    return Reading({"the step": f"takes {duration(step.makespan)}", **of_ranks}, pictures)


def _placement(job: Job) -> Reading:
    return Reading({f"rank {rank}": f"on machine {job.machine(rank)}" for rank in range(DEVICES)})


def _replicas(job: Job) -> Reading:
    """Compare replicas with the first one: their sum differs from last week's in any case, and tells nothing."""
    first, *others = (one.checksum for one in train(job.recipe))
    beside = enumerate((one - first for one in others), start=1)
    return Reading({f"replica {rank} less replica 0": _written(difference, "+.4f") for rank, difference in beside})


def _scale(job: Job) -> Reading:
    one = train(job.recipe)[0]
    at = {"first": one.scales[0], "half-way": one.scales[len(one.scales) // 2], "last": one.scales[-1]}
    facts = {f"loss scale, {when}": f"{scale:g}" for when, scale in at.items()}
    return Reading({**facts, "updates skipped": f"{sum(one.skipped)} of {len(one.skipped)}"})


def _gradients(job: Job) -> Reading:
    often = (f"{sum(one.overflowed)} of {len(one.overflowed)} steps" for one in train(job.recipe))
    return Reading({f"replica {rank}": f"overflows by itself in {steps}" for rank, steps in enumerate(often)})


def _updates(job: Job) -> Reading:
    return Reading({"the last update moved the weights by": _written(train(job.recipe)[0].moved[-1], ".2%")})


def _written(value: float, how: str) -> str:
    return format(value, how) if isfinite(value) else "not finite"


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
