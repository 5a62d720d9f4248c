"""Instruments for a job: what it reports by itself, and measurements that cost the cluster's time.

Every reading has the same facts in the same order, whatever the fault, so only their values can reveal it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite
from typing import NamedTuple

import torch
import torch.distributed as dist

from course_lib import data
from course_lib.classroom.scenarios.jobs import training
from course_lib.classroom.scenarios.jobs.job import CHECKPOINT, Job
from course_lib.classroom.scenarios.jobs.night import Night
from course_lib.classroom.scenarios.jobs.step import Call, step
from course_lib.figures import Picture, gantt, lost_time
from course_lib.figures.axis import data_size
from course_lib.figures.chart import Axis, Chart, Curve, Panel, Point
from course_lib.figures.palette import lines_of
from course_lib.figures.ways_around import ways_around
from course_lib.ranks import launch

EVENING = 22.0  # o'clock
MESSAGE = 5_000_000  # bytes of a message to test a link
LATELY = 12  # reports


class Scene(NamedTuple):
    """A job after so many reports."""

    night: Night
    now: int

    @property
    def job(self) -> Job:
        """The settings in force; an instrument runs until what comes and goes is there."""
        return self.night.job.at(self.now, always=True)


def clock(seconds: float) -> str:
    minutes = int(EVENING * 60 + seconds / 60)
    return f"{minutes // 60 % 24:02}:{minutes % 60:02}"


def timeline(scene: Scene) -> Picture:
    """Draw what the job has reported: its speed, its loss and the norm of its gradient."""
    reports, job = scene.night.reports(scene.now), scene.night.job
    hours = [one.begins / 3600 for one in reports]
    begins = [new.begins / 3600 for old, new in pairwise(reports) if new.begins > old.begins + old.seconds + 1]
    curves = {
        "samples a second": [10 * job.at(n).samples / one.seconds for n, one in enumerate(reports)],
        "loss": [one.learned.loss for one in reports],
        "gradient norm": [min(one.learned.norm, 30.0) for one in reports],
    }
    end, looks = max(hours[-1], 1.0), lines_of(curves)
    across = Axis("o'clock", 0, end, list(range(int(end) + 1)), lambda hour: clock(3600 * hour))
    panels = []
    for name, curve in curves.items():
        points = [Point(hour, value) for hour, value in zip(hours, curve, strict=True) if isfinite(value)]
        up = Axis.around(name, [one.y for one in points], 3)
        runs = [[one for one in points if low <= one.x < high] for low, high in pairwise([0.0, *begins, inf])]
        panels.append(Panel(across, up, [Curve(name, run, looks[name]) for run in runs if run], height=110.0))
    last = ", ".join(f"{name} {curve[-1]:.2f}" for name, curve in curves.items())
    title = "Measured on a small model: loss, gradient. Emulated, with 1% of jitter: speed"
    return Picture.of(Chart(panels, {"measured", "emulated"}, title, 800, looks), f"At the end: {last}.", [])


class Reading(NamedTuple):
    facts: dict[str, str]
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Instrument:
    """A measurement. minutes: its cost in time of the whole cluster."""

    title: str
    minutes: int
    read: Callable[[Scene], Reading]


def _ranks(job: Job) -> list[str]:
    return [f"rank {rank} (node {job.node(rank)}, device {job.device(rank)})" for rank in range(job.world)]


def spent(job: Job, rank: int) -> str:
    """What a rank does in a step, and how much it holds (modelled), in words."""
    line = step(job.clocked(0)).timeline
    own = [span for span in line.spans if span.rank == rank and not span.background]
    reads = sum(span.duration for span in own if span.kind == "other")
    gradients = (s for s in line.spans if (s.rank, s.name, s.kind) == (rank, "all_reduce", "transfer") and s.bytes)
    sent = Counter(data_size(span.bytes) for span in gradients)
    messages = " and ".join(f"{count} of {size}" for size, count in sent.items()) or "none"
    pieces = len({span.micro_batch for span in own if span.kind == "forward"})
    return (
        f"reads for {reads:.2f} s, computes for {line.busy(rank) - reads:.2f} s in {pieces} micro-batches, "
        f"of {line.makespan:.2f} s; holds {job.memory[rank] / 1e6:.1f} MB; sends in all-reduces: {messages}"
    )


def _profile(scene: Scene) -> Reading:
    """One step of every rank. Of a job that hangs, a step before that."""
    job = scene.night.job.at(0) if scene.night.hung else scene.job
    line = step(job.clocked(0)).timeline
    facts = {name: spent(job, rank) for rank, name in enumerate(_ranks(job))}
    return Reading(facts, (gantt(line, title="One step"), lost_time({"one step": line}, title="Where its time goes")))


def _links(scene: Scene) -> Reading:
    """Test the way from each node to the next, one after the other."""
    job = scene.job
    first = [next(rank for rank in range(job.world) if job.node(rank) == node) for node in range(job.nodes)]
    ways = [(first[node], first[(node + 1) % job.nodes]) for node in range(job.nodes)]
    spans = launch(_send, job.world, (ways,), pace=job.pace).timeline.spans
    facts, times = {}, []
    for source, target in ways:
        received = (span for span in spans if (span.rank, span.name, span.kind) == (target, "recv", "transfer"))
        times.append(sum(span.duration for span in received))
        rate = f"{MESSAGE / times[-1] / 1e6:.2f} MB a second" if times[-1] < job.patience else "no answer"
        facts[f"node {job.node(source)} to node {job.node(target)}"] = rate
    return Reading(facts, (ways_around(times, list(facts.values())),))


def _send(rank: int, ways: list[tuple[int, int]]) -> None:
    message = torch.zeros(MESSAGE, dtype=torch.uint8)
    for source, target in ways:
        if rank == source:
            dist.send(message, target)
        if rank == target:
            dist.recv(message, source)


def _replicas(scene: Scene) -> Reading:
    """Compare replicas with the first one: their sum differs from last week's in any case, and tells nothing."""
    weights = scene.night.state(scene.now).rows(scene.job.dp).weights
    sums = weights.double().sum(1).tolist()
    return Reading({f"replica {n} less replica 0": f"{one - sums[0]:+.4f}" for n, one in enumerate(sums) if n})


def _updates(scene: Scene) -> Reading:
    reports = [one.learned for one in scene.night.reports(scene.now)]
    facts = {}
    for when, part in {"while all was well": reports[40 : 40 + LATELY], "lately": reports[-LATELY:]}.items():
        skipped, moved = sum(one.is_skipped for one in part), max(one.moved for one in part)
        scale = f"a loss scale of {part[-1].scale:,.0f}"
        facts[when] = f"{scale}; {skipped} of {LATELY} updates skipped; one moves the weights by up to {moved:.2%}"
    return Reading(facts)


def _gradients(scene: Scene) -> Reading:
    own = zip(*(one.learned.own for one in scene.night.reports(scene.now)[-LATELY:]), strict=True)
    return Reading({f"replica {n}": f"norms from {min(one):.1f} to {max(one):.1f}" for n, one in enumerate(own)})


def _same(scene: Scene) -> Reading:
    """Give the share of replica 0 to all of them."""
    job, state = scene.job, scene.night.state(scene.now)
    batch = tuple(part[:1].expand_as(part) for part in training.minibatch(job.but(bad=None), scene.now))
    sent, _ = training.gradients(replace(state, weights=state.weights[:1]), job, batch, 256.0)
    norms = (sent.float().norm(dim=1) / 256).tolist()
    return Reading({f"replica {number}": f"a gradient of norm {norm:.4f}" for number, norm in enumerate(norms)})


def _samples(scene: Scene) -> Reading:
    job, at = scene.job, scene.night.reports(scene.now)[-1].step
    read = [training.minibatch(job, number)[0][:, :2, :5] for number in (at - 1, at)]
    words = [[" ".join(map(data.decode, share)) for share in shares] for shares in read]
    return Reading({f"replica {n}": f"{old}, then {new}" for n, (old, new) in enumerate(zip(*words, strict=True))})


def _recorder(scene: Scene) -> Reading:
    calls = scene.night.hung or tuple(Call("none", 0, 0, "no line, as it moves on") for _ in range(scene.job.world))
    said = (f"{one.name}, number {one.number}, {data_size(one.bytes)}; stands at {one.line}" for one in calls)
    return Reading(dict(zip(_ranks(scene.job), said, strict=True)))


def _checkpoints(scene: Scene) -> Reading:
    """Evaluate each checkpoint that there is, the latest of each step."""
    facts = {}
    for saved in checkpoints(scene)[-9:]:
        state = scene.night.checkpoint(saved, scene.now)
        agree = "equal" if (state.weights == state.weights[:1]).all() else "differ"
        facts[f"checkpoint {saved}"] = f"held-out loss {training.held_out(state):.3f}, replicas {agree}"
    return Reading(facts)


def checkpoints(scene: Scene) -> list[int]:
    """The checkpoints that can be loaded, by their steps: whoever goes back leaves none of what came after."""
    saved = [0]
    for one in scene.night.reports(scene.now):
        saved = [other for other in saved if other <= one.step] + [one.step + 1] * ((one.step + 1) % CHECKPOINT == 0)
    return saved


INSTRUMENTS: dict[str, Instrument] = {
    "recorder": Instrument("The last call of each rank, and where it stands", 3, _recorder),
    "samples": Instrument("What each replica reads", 5, _samples),
    "replicas": Instrument("A sum of each replica's weights", 5, _replicas),
    "profile": Instrument("One step of every rank, and where it sits", 5, _profile),
    "updates": Instrument("The updates: loss scale, skipped ones, size", 5, _updates),
    "gradients": Instrument("Each replica's gradients, before they are added up", 10, _gradients),
    "links": Instrument("The way from each node to the next", 10, _links),
    "checkpoints": Instrument("Each of the last checkpoints, on held-out samples", 10, _checkpoints),
    "same": Instrument("The same samples on all replicas", 15, _same),
}
