"""Instruments for a job: what it reports by itself, and measurements that cost the cluster's time.

Every reading has the same facts in the same order, whatever the fault, so only their values can reveal it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite, log2
from typing import NamedTuple

import torch
import torch.distributed as dist

from course_lib import data
from course_lib.classroom.scenarios.jobs import training
from course_lib.classroom.scenarios.jobs.job import CHECKPOINT, Job
from course_lib.classroom.scenarios.jobs.night import Night, Report
from course_lib.classroom.scenarios.jobs.step import Call, step
from course_lib.figures import Picture, gantt
from course_lib.figures.axis import DATA, counted, data_size, listed, ticks
from course_lib.figures.bars import bars_panel
from course_lib.figures.chart import Axis, Chart, Curve, Label, Panel, Point
from course_lib.figures.palette import RANKS, STYLES, Style, lines_of
from course_lib.figures.picture import table
from course_lib.figures.ways_around import ways_around
from course_lib.ranks import launch
from course_lib.timeline import Timeline

EVENING = 22.0  # o'clock
MESSAGE = 5_000_000  # bytes of a message to test a link
LATELY = 12  # reports
COLUMNS = "where or when", "reading"


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
    curves = {
        "samples a second": [10 * job.at(n).samples / one.seconds for n, one in enumerate(reports)],
        "loss": [one.learned.loss for one in reports],
        "gradient norm": [min(one.learned.norm, 30.0) for one in reports],
    }
    last = ", ".join(f"{name} {curve[-1]:.2f}" for name, curve in curves.items())
    title = "Measured on a small model: loss, gradient. Emulated, with 1% of jitter: speed"
    return _over_the_night(reports, curves, f"At the end: {last}.", {}, ["measured", "emulated"], title)


def _over_the_night(
    reports: list[Report],
    curves: Mapping[str, list[float]],
    says: str,
    facts: Mapping[str, str],
    origins: Sequence[str] = ("measured",),
    title: str | None = None,
) -> Picture:
    """Draw numbers of all reports, a panel for each; where the job stood still, lines end."""
    hours = [one.begins / 3600 for one in reports]
    begins = [new.begins / 3600 for old, new in pairwise(reports) if new.begins > old.begins + old.seconds + 1]
    end, looks = max(hours[-1], 1.0), lines_of(curves)
    across = Axis("", 0, end, list(range(int(end) + 1)), lambda hour: clock(3600 * hour))
    panels = []
    for name, curve in curves.items():
        points = [Point(hour, value) for hour, value in zip(hours, curve, strict=True) if isfinite(value)]
        up = Axis.around(name, [one.y for one in points], 3)
        runs = [[one for one in points if low <= one.x < high] for low, high in pairwise([0.0, *begins, inf])]
        marks = [Curve(name, run, looks[name]) for run in runs if run]
        panels.append(Panel(across, up, marks, height=110.0, foot=26.0))
    return Picture.of(Chart(panels, origins, title, 800), says, table(COLUMNS, facts.items()))


def _dots(x: str, y: str, dots: Mapping[str, Mapping[int, Sequence[float]]]) -> tuple[Picture, ...]:
    """Draw the values at each place, by name of the dots; what is no finite number stands at the top, in words."""
    known = [(place, value) for own in dots.values() for place, values in own.items() for value in values]
    up = Axis.around(y, [value for _, value in known if isfinite(value)] or [0.0], 4)
    places = sorted({place for place, _ in known})
    beside = (places[-1] - places[0]) / len(places) / 2
    looks, marks = {name: look._replace(dash=None) for name, look in lines_of(dots).items()}, []
    for name, own in dots.items():
        points = [Point(at, value, f"{x} {at}: {value:.4g}") for at, values in own.items() for value in values]
        seen = [one if isfinite(one.y) else one._replace(y=up.high, words=Label(f"{one.y}", 8, 4)) for one in points]
        marks.append(Curve(name, seen, looks[name]))
    panel = Panel(Axis(x, places[0] - beside, places[-1] + beside, places), up, marks, height=180.0)
    chart = Chart([panel], {"measured"}, None, 800, looks if len(looks) > 1 else {})
    values = [[" ".join(f"{value:.4g}" for value in own.get(at, ())) for own in dots.values()] for at in places]
    rows = table((x, *dots), ((at, *own) for at, own in zip(places, values, strict=True)))
    return (Picture.of(chart, f"For each {x}: {y}, from {up.low:.4g} to {up.high:.4g}.", rows),)


@dataclass(frozen=True)
class Instrument:
    """A measurement. minutes: its cost in time of the whole cluster.  read: its pictures, the last one with numbers."""

    title: str
    minutes: int
    read: Callable[[Scene], tuple[Picture, ...]]


def _ranks(job: Job) -> list[str]:
    return [f"rank {rank} (node {job.node(rank)}, device {job.device(rank)})" for rank in range(job.world)]


def _sent(line: Timeline, rank: int) -> Counter[int]:
    """The sizes of a rank's messages in all-reduces."""
    return Counter(s.bytes for s in line.of(rank) if (s.name, s.kind) == ("all_reduce", "transfer") and s.bytes)


def spent(job: Job, rank: int) -> str:
    """A rank's step and the bytes that it holds (modelled), in words."""
    line = step(job.clocked(0)).timeline
    own = [span for span in line.of(rank) if not span.background]
    reads = sum(span.duration for span in own if span.kind == "other")
    sent = [f"{count} of {data_size(size)}" for size, count in _sent(line, rank).items()] or ["none"]
    pieces = len({span.micro_batch for span in own if span.kind == "forward"})
    return (
        f"reads for {reads:.2f} s, computes for {line.busy(rank) - reads:.2f} s in {pieces} micro-batches, of "
        f"{line.makespan:.2f} s; holds {job.memory[rank] / 1e6:.1f} MB; sends in all-reduces: {listed(sent)}"
    )


def _loads(job: Job, planned: Job, facts: Mapping[str, str]) -> Picture:
    """Draw what each rank holds and what it sends in all-reduces, below rank 0 as planned."""
    rows = {"0, as planned": (planned, 0)}
    rows |= {f"{rank} (node {job.node(rank)}, device {job.device(rank)})": (job, rank) for rank in range(job.world)}
    bars, panels = {name: Counter(held=round(one.memory[rank])) for name, (one, rank) in rows.items()}, []
    held, sent = {"held": STYLES["other"]._replace(label="memory")}, dict[str, Style]()
    for name, (one, rank) in rows.items():
        for size, count in _sent(step(one.clocked(0)).timeline, rank).items():
            bars[name][f"sent{size}"] = size * count
            look = RANKS[1 + len(sent)]._replace(label=f"messages of {data_size(size)}")
            sent.setdefault(f"sent{size}", look)
    for what, looks in {"held": held, "sent in all-reduces": sent}.items():
        axis, unit = Axis.in_unit(what, max(sum(map(own.__getitem__, looks)) for own in bars.values()), DATA, 4)
        panels.append(bars_panel(bars, looks, axis, 400, data_size, unit))
    chart = Chart(panels, {"emulated", "modelled"}, None, 800, held | sent, is_row=True)
    return Picture.of(chart, f"Rank 0 {next(iter(facts.values()))}.", table(COLUMNS, facts.items()))


def _profile(scene: Scene) -> tuple[Picture, ...]:
    """One step of every rank, over one as planned. Of a job that hangs, a step before that."""
    planned, job = scene.night.job.but(changes=()), scene.night.job.at(0) if scene.night.hung else scene.job
    line, before = (step(one.clocked(0)).timeline for one in (job, planned))
    facts = {name: spent(job, rank) for rank, name in enumerate(_ranks(job))}
    return gantt(line, ghost=before, ghost_name="planned"), _loads(job, planned, facts)


def _links(scene: Scene) -> tuple[Picture, ...]:
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
    return (replace(ways_around(times, list(facts.values())), rows=table(COLUMNS, facts.items())),)


def _send(rank: int, ways: list[tuple[int, int]]) -> None:
    message = torch.zeros(MESSAGE, dtype=torch.uint8)
    for source, target in ways:
        if rank == source:
            dist.send(message, target)
        if rank == target:
            dist.recv(message, source)


def _replicas(scene: Scene) -> tuple[Picture, ...]:
    """Compare replicas with the first one: their sum differs from last week's in any case, and tells nothing."""
    sums = scene.night.state(scene.now).rows(scene.job.dp).weights.double().sum(1).tolist()
    apart = {n: [one - sums[0]] for n, one in enumerate(sums)}
    return _dots("replica", "sum of its weights, less that of replica 0", {"difference": apart})


def _updates(scene: Scene) -> tuple[Picture, ...]:
    reports = scene.night.reports(scene.now)
    learned = [one.learned for one in reports]
    facts = {}
    for when, part in {"while all was well": learned[40 : 40 + LATELY], "lately": learned[-LATELY:]}.items():
        skipped, moved = sum(one.is_skipped for one in part), max(one.moved for one in part)
        scale = f"a loss scale of {part[-1].scale:,.0f}"
        facts[when] = f"{scale}; {skipped} of {LATELY} updates skipped; one moves the weights by up to {moved:.2%}"
    curves = {
        "loss scale, as a power of 2": [log2(one.scale) for one in learned],
        "an update moves the weights by (%); by 0 if it is skipped": [100 * one.moved for one in learned],
    }
    return (_over_the_night(reports, curves, f"Lately: {facts['lately']}.", facts),)


def _gradients(scene: Scene) -> tuple[Picture, ...]:
    own = zip(*(one.learned.own for one in scene.night.reports(scene.now)[-LATELY:]), strict=True)
    return _dots("replica", f"norm of its own gradient, in the last {LATELY} reports", {"norms": dict(enumerate(own))})


def _same(scene: Scene) -> tuple[Picture, ...]:
    """Give the share of replica 0 to all of them."""
    job, state = scene.job, scene.night.state(scene.now)
    batch = tuple(part[:1].expand_as(part) for part in training.minibatch(job.but(bad=None), scene.now))
    sent, _ = training.gradients(replace(state, weights=state.weights[:1]), job, batch, 256.0)
    norms = {n: [norm / 256] for n, norm in enumerate(sent.float().norm(dim=1).tolist())}
    return _dots("replica", "norm of its gradient of these samples", {"norm": norms})


def _samples(scene: Scene) -> tuple[Picture, ...]:
    """The places of the first samples of each replica, in data that is sorted by its sums: 37+48 is at 3748."""
    job, at = scene.job, scene.night.reports(scene.now)[-1].step
    shares = {when: training.minibatch(job, one)[0][:, :8, :5] for when, one in (("a step", at - 1), ("the next", at))}
    read = {
        when: {n: [float(data.decode(one).replace("+", "")) for one in own] for n, own in enumerate(share)}
        for when, share in shares.items()
    }
    return _dots("replica", "places in the data of what it reads", read)


def _recorder(scene: Scene) -> tuple[Picture, ...]:
    job = scene.job
    calls = scene.night.hung or (Call("none", 0, 0, "no line, as it moves on"),) * job.world
    said = [f"{one.name}, number {one.number}, {data_size(one.bytes)}; stands at {one.line}" for one in calls]
    kinds, facts = list(dict.fromkeys(said)), dict(zip(_ranks(job), said, strict=True))
    looks = {f"call{n}": RANKS[n]._replace(label=one[:105]) for n, one in enumerate(kinds)}
    numbers = zip(facts.items(), calls, strict=True)
    bars = {name: Counter({f"call{kinds.index(text)}": one.number}) for (name, text), one in numbers}
    most = max(one.number for one in calls) or 8
    panel = bars_panel(bars, looks, Axis("calls so far", 0, most, ticks(most, 8)), 800, str)
    chart = Chart([panel], {"emulated"}, None, 800, looks)
    return (Picture.of(chart, f"{counted(len(looks), 'different call')}.", table(COLUMNS, facts.items())),)


def _checkpoints(scene: Scene) -> tuple[Picture, ...]:
    """Evaluate each checkpoint that there is, the latest of each step."""
    dots: dict[str, dict[int, list[float]]] = {"replicas equal": {}, "replicas differ": {}}
    for saved in checkpoints(scene)[-9:]:
        state = scene.night.checkpoint(saved, scene.now)
        agree = "equal" if (state.weights == state.weights[:1]).all() else "differ"
        dots[f"replicas {agree}"][saved] = [training.held_out(state)]
    return _dots("checkpoint", "loss on held-out samples", dots)


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
