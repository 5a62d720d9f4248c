"""A model on several devices, layer after layer, as a program of events; what an order of them leads to.

An order of events becomes a program: each device, a rank, does its own events in the order in which they stand. An
event waits for the message it needs and sends one to whoever needs its result; a message is a micro-batch's number.

    F1@0    forward of micro-batch 1 on device 0      needs F1 of the device before
    B1@0    backward of micro-batch 1 on device 0     needs B1 of the device after, and F1 of the same device

The devices' time is emulated, and nothing else is: an order that cannot be done gets stuck for real.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.ranks import Pace, launch
from course_lib.timeline import Timeline, compute

SECONDS = {"forward": 0.03, "backward": 0.06}  # for one unit of work on one device


class Event(NamedTuple):
    """op: "F" or "B"."""

    op: str
    micro_batch: int
    device: int

    @classmethod
    def read(cls, name: str) -> Event:
        micro_batch, device = name[1:].split("@")
        return cls(name[0], int(micro_batch), int(device))

    def __str__(self) -> str:
        return f"{self.op}{self.micro_batch}@{self.device}"

    @property
    def words(self) -> str:
        direction = "forward" if self.op == "F" else "backward"
        return f"{self}: {direction} of micro-batch {self.micro_batch} on device {self.device}"


def run_events(order: Sequence[Event], devices: int, work: float = 1.0, pace: Pace | None = None) -> Timeline:
    """Run an order. work: of one event, in units of SECONDS.

    Raises RankFailed and Deadlock, as the ranks do.
    """
    return launch(_run_events, devices, (list(order), work), pace=pace or Pace(SECONDS)).timeline


def _run_events(rank: int, order: list[Event], work: float) -> None:
    last = dist.get_world_size() - 1
    sent: list[tuple[Tensor, dist.Work | None]] = []
    done: set[Event] = set()
    arrived: set[tuple[int, int]] = set()
    for event in (event for event in order if event.device == rank):
        forward, k = event.op == "F", event.micro_batch
        if not forward and Event("F", k, rank) not in done:
            raise LookupError(f"device {rank} cannot do {event}: it has not done {Event('F', k, rank)} yet")
        source, target = (rank - 1, rank + 1) if forward else (rank + 1, rank - 1)
        while 0 <= source <= last and (source, k) not in arrived:
            message = torch.empty(1)
            dist.recv(message, source)
            arrived.add((source, int(message)))
        with compute("forward" if forward else "backward", micro_batch=k, stage=rank, work=work):
            done.add(event)
        if Event(event.op, k, target) in order:
            message = torch.tensor([float(k)])
            sent.append((message, dist.isend(message, target)))
    for _, sending in sent:
        if sending is not None:
            sending.wait()


def until_stuck(order: Sequence[Event]) -> list[Event]:
    """The events of an order that are done before the devices wait for each other, or all of them."""
    done: list[Event] = []
    left = list(order)
    while ready := [event for event in left if _is_next(event, left) and _has_input(event, order, done)]:
        done.append(ready[0])
        left.remove(ready[0])
    return done


def _is_next(event: Event, left: list[Event]) -> bool:
    return event == next(other for other in left if other.device == event.device)


def _has_input(event: Event, order: Sequence[Event], done: list[Event]) -> bool:
    source = event._replace(device=event.device + (-1 if event.op == "F" else 1))
    return source not in order or source in done


def fill_and_drain(devices: int, micro_batches: int) -> list[Event]:
    """All forward passes, then all backward passes, the last micro-batch first (Huang et al. 2019, "GPipe")."""
    forwards = [Event("F", k, device) for k in range(micro_batches) for device in range(devices)]
    backwards = [Event("B", k, device) for k in reversed(range(micro_batches)) for device in reversed(range(devices))]
    return forwards + backwards
