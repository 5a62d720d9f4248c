"""Questions about more and more ranks: what they send (bytes_sent), and why they are not as fast as hoped (Q3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from course_lib.experiments.steps import training_step
from course_lib.experiments.training import train_layers
from course_lib.figures import Timing, gantt, lost_time, speed_up
from course_lib.figures.axis import data_size
from course_lib.mechanisms.collectives import ring_all_reduce
from course_lib.questions.asking import choice, each, number
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.questions.units import BYTES
from course_lib.ranks import Link, Pace, launch
from course_lib.timeline import Timeline

# How many bytes does each rank send?


class Gradients(NamedTuple):
    """So many numbers of 4 bytes on so many ranks."""

    parameters: int
    ranks: int

    @property
    def bytes(self) -> int:
        return 4 * self.parameters


def _slips(case: Gradients) -> dict[str, float]:
    n, true = case.ranks, 2 * (case.ranks - 1) / case.ranks  # times the gradients
    return {
        "together": n,
        "once_around": 1 / 2,
        "all_of_it": 1 / true,
        "one_more": 2 / true,
        "to_all": (n - 1) / true,
        "piece": 1 / true / n,
        "parameters": 1 / 4,
    }


def _count_bytes(case: Gradients) -> Outcome:
    run = launch(_ring, case.ranks, (case.parameters,), pace=Pace(link=Link(0.004, 20e6)))
    sent = run.timeline.bytes_sent(0)
    picture = gantt(run.timeline, title="Once around the ring, and once more")
    return Outcome(None, found={"sent": sent, "times": sent / case.bytes}, pictures=(picture,), measured=sent)


def _ring(rank: int, parameters: int) -> None:
    ring_all_reduce(torch.ones(parameters))


# Q3. Eight are fine, sixteen are not

INSIDE = 50e6  # bytes per second between the devices of a machine


@dataclass(frozen=True)
class Cluster:
    """Machines of so many devices each, and the devices' time for one sample and for an update, in seconds.

    between_nodes: bytes per second.  gained: the speed-up with two machines, as a team would say it.
    """

    devices_per_node: int = 8
    batch_size: int = 128
    between_nodes: float = 2.2e6
    gained: int = 10
    seconds: float = 0.012
    update: float = 0.004

    @property
    def workers(self) -> int:
        return 2 * self.devices_per_node

    def pace(self) -> Pace:
        kinds = {"forward": self.seconds / 3, "backward": 2 * self.seconds / 3, "optimizer": self.update}
        return Pace(kinds, Link(0.0002, INSIDE), Link(0.0002, self.between_nodes), self.devices_per_node)

    def step(self, workers: int, pace: Pace) -> Timeline:
        return training_step(workers, self.batch_size, pace, overlap=False)


REMEDIES: dict[str, dict[str, Any]] = {
    "devices": {"seconds": Cluster.seconds / 2, "update": Cluster.update / 2},
    "links": {"between_nodes": INSIDE},
    "update": {"update": 0.0},
}


def _without(suspect: str, case: Cluster) -> Outcome:
    """Take one suspect away: is the speed-up there again?"""
    before = [case.step(workers, case.pace()) for workers in (1, case.devices_per_node, case.workers)]
    changed = replace(case, **REMEDIES[suspect])
    after = [changed.step(workers, changed.pace()) for workers in (1, case.workers)]
    was, now = before[0].makespan / before[-1].makespan, after[0].makespan / after[-1].makespan
    lost, won = case.workers - was, now - was
    right = won > lost / 2
    effect = "most of what was lost comes back" if right else "the speed-up gets worse" if won < 0 else "little changes"
    found = {"workers": case.workers, "effect": effect, "was": was, "now": now}
    shown = {"devices": won < 0, "links": right, "update": not right}[suspect]
    largest = {"as it is": before[-1], "without the suspect": after[-1]}
    pictures = (
        speed_up([Timing.of(step) for step in before], title="The speed-up of the team"),
        lost_time(largest, title=f"Where the time of {case.workers} workers goes"),
    )
    return Outcome(right, found=found, shown=shown, pictures=pictures)


def _held(case: Cluster) -> Outcome:
    """What every worker holds, with few workers and with many."""
    few, many = (train_layers(workers, 1, 1, False) for workers in (case.devices_per_node, case.workers))
    same = {held.states for held in few} == {held.states for held in many}
    return Outcome(not same, found={"case": case, "few": few[0], "many": many[0], "same": same}, shown=same)


QUESTIONS: dict[str, Family] = {
    "bytes_sent": Family(
        Gradients(100_000, 8),
        number(BYTES, _count_bytes, _slips),
        [Gradients(ranks * piece, ranks) for ranks in (4, 5, 10) for piece in (5_000, 10_000, 20_000)],
        lambda case: {**case._asdict(), "others": case.ranks - 1, "size": data_size(case.bytes)},
    ),
    "Q3": Family(
        Cluster(),
        choice({**each(_without, REMEDIES), "memory": _held}),
        [Cluster(4, 96, 1e6, 5), Cluster(4, 96, 1.5e6, 5), Cluster(6, 144, 1e6, 7), Cluster(6, 144, 1.5e6, 8)],
        lambda case: {"few": case.devices_per_node, "many": case.workers, "gained": case.gained},
    ),
}
