"""Runs of a model on several devices, layer by layer: any order of events becomes a program for real ranks.

Each device, a rank, does its own events in the given order. An event waits for the message that it needs, and sends one
to the device that needs its result; a message is a micro-batch's number.

    F1@0    forward of micro-batch 1 on device 0      needs F1 of the device before
    B1@0    backward of micro-batch 1 on device 0     needs B1 of the device after, and F1 of the same device

Only the time of devices is emulated: an impossible order really deadlocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from course_lib.classroom.runs.steps import pipeline_step
from course_lib.ranks import Pace, launch
from course_lib.schedules import SCHEDULES, Action, Schedule, ScheduleError, in_order
from course_lib.timeline import Timeline, compute

SECONDS = {"forward": 0.03, "backward": 0.06}  # for one unit of work on one device
WHOLE_BATCH = {"forward": 0.16, "backward": 0.32}  # seconds for the whole batch on one device
ROUNDING = 1e-9  # of sums of seconds
KEPT = 1_000  # bytes that stand for the activations of a micro-batch


class Grid(NamedTuple):
    """Numbers of devices in a row and of micro-batches that go through all of them."""

    devices: int
    micro_batches: int

    @property
    def turns(self) -> int:
        return self.micro_batches + self.devices - 1

    @property
    def least_idle(self) -> float:
        """The share of time that no order can avoid: (p - 1) / (m + p - 1)."""
        return (self.devices - 1) / self.turns

    @property
    def most_busy(self) -> float:
        return self.micro_batches / self.turns


def read(name: str) -> Action:
    """Parse the name of an event."""
    micro_batch, device = name[1:].split("@")
    return Action(name[0], int(device), int(micro_batch))


def name_of(event: Action) -> str:
    return f"{event.op}{event.micro_batch}@{event.stage}"


def run_events(order: Sequence[Action], devices: int, work: float = 1.0, pace: Pace | None = None) -> Timeline:
    """Run an order of events. work: of one event, in units of SECONDS.

    Raises RankFailed or Deadlock if the order is impossible.
    """
    return launch(_run_events, devices, (list(order), work), pace=pace or Pace(SECONDS)).timeline


def _run_events(rank: int, order: list[Action], work: float) -> None:
    last = dist.get_world_size() - 1
    sending: list[dist.Work | None] = []
    done: set[Action] = set()
    arrived: set[tuple[int, int]] = set()
    for event in (event for event in order if event.stage == rank):
        forward, k, needed = event.op == "F", event.micro_batch, event._replace(op="F")
        if not forward and needed not in done:
            raise LookupError(f"device {rank} cannot do {name_of(event)}: it has not done {name_of(needed)} yet")
        source, target = (rank - 1, rank + 1) if forward else (rank + 1, rank - 1)
        while 0 <= source <= last and (source, k) not in arrived:
            message = torch.empty(1)
            dist.recv(message, source)
            arrived.add((source, int(message)))
        with compute("forward" if forward else "backward", micro_batch=k, stage=rank, work=work):
            done.add(event)
        if event._replace(stage=target) in order:
            sending.append(dist.isend(torch.tensor([float(k)]), target))
    for handle in sending:
        handle.wait()  # type: ignore[union-attr]


def until_stuck(order: Sequence[Action], devices: int) -> list[Action]:
    """The events of an order that are done before the devices deadlock; all of them if they never do."""
    done: list[Action] = []
    with contextlib.suppress(ScheduleError):
        for _, event in in_order(Schedule([[one for one in order if one.stage == n] for n in range(devices)])):
            done.append(event)
    return done


def fill_and_drain(devices: int, micro_batches: int) -> list[Action]:
    """The order with all forward passes before all backward passes (Huang et al. 2019, "GPipe")."""
    forwards = [Action("F", device, k) for k in range(micro_batches) for device in range(devices)]
    backwards = [Action("B", device, k) for k in range(micro_batches) for device in reversed(range(devices))]
    return forwards + backwards


def active(timeline: Timeline) -> float:
    """The average number of devices that work at a time."""
    return (1 - timeline.idle_fraction()) * timeline.world_size


def run_batch(name: str, devices: int, micro_batches: int, stages_each: int = 1) -> Timeline:
    """Run the same batch, cut into micro-batches, through the same layers."""
    pace = Pace({kind: seconds / micro_batches / stages_each for kind, seconds in WHOLE_BATCH.items()})
    return pipeline_step(SCHEDULES[name](devices * stages_each, micro_batches), pace)


def perform(actions: Sequence[Action], n_stages: int, forward: float = 1, backward: float = 1) -> None:
    """Run a rank's list on the emulated clock, with messages of one number, and hold what backward passes need."""
    held, sending, n = {}, [], dist.get_world_size()
    for op, stage, k in actions:
        source, to = (stage - 1, stage + 1) if op == "F" else (stage + 1, stage - 1)
        if 0 <= source < n_stages:
            dist.recv(torch.empty(1), source % n)
        kind, work = ("forward", forward) if op == "F" else ("backward", backward)
        with compute(kind, micro_batch=k, stage=stage, work=work):
            held[stage, k] = torch.empty(KEPT // 4) if op == "F" else None
        if 0 <= to < n_stages:
            sending.append(dist.isend(torch.empty(1), to % n))
    for handle in sending:
        handle.wait()  # type: ignore[union-attr]
