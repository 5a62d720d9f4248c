"""Runs of collectives, chunk by chunk: the content of each message, and of each rank over time.

Every number encodes its piece and its rank: rank r begins with 256 p + 2 ** r in piece p. So a sum of k of them is
256 k p plus a bit for each rank in it, and the picture of a run is read off the numbers that were really sent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.classroom.runs.steps import after_barrier
from course_lib.figures.exchange import Members, Sum
from course_lib.mechanisms import collectives
from course_lib.ranks import Link, Pace, launch
from course_lib.timeline import RECEIVING, Timeline


def _in_machines(tensor: Tensor) -> Tensor:
    """An all-reduce in two machines, or in one if the ranks cannot be halved."""
    size = dist.get_world_size()
    across, inside = init_device_mesh("cpu", (2, size // 2) if size in TWO_MACHINES else (1, size)).get_all_groups()
    return collectives.hierarchical_all_reduce(tensor, inside, across)


TWO_MACHINES = (4, 6, 8)  # ranks
RANKS = range(2, 9)  # at most 8: each has a bit of a byte
PACE = Pace(link=Link(0.001, 8 / 0.001))  # a message takes 1 ms, and 1 ms for each piece in it
# name: (the collective, whether a rank has a piece before it)
WAYS = {
    "ring all-reduce": (collectives.ring_all_reduce, lambda rank, piece: True),
    "ring reduce-scatter": (collectives.ring_reduce_scatter, lambda rank, piece: True),
    "ring all-gather": (collectives.ring_all_gather, lambda rank, piece: rank == piece),
    "tree all-reduce": (collectives.tree_all_reduce, lambda rank, piece: True),
    "hierarchical all-reduce": (_in_machines, lambda rank, piece: True),
    "tree broadcast": (collectives.tree_broadcast, lambda rank, piece: rank == 0),
}
Pieces = dict[int, Members]


def run_collective(way: str, ranks: int) -> tuple[Timeline, list[Sum]]:
    """Run one of WAYS on real ranks over emulated links, on a tensor with one piece for each rank."""
    run = launch(_run, ranks, (way,), pace=PACE)
    timeline, sums = after_barrier(run.timeline), []
    messages = {rank: _messages(timeline, rank, sent) for rank, (sent, _) in enumerate(run.results)}
    for rank, (_, states) in enumerate(run.results):
        received = [span for span in timeline.of(rank) if span.kind == "transfer" and span.name in RECEIVING]
        times = [0.0, *(span.end for span in received), math.inf]
        found: list[Any] = [(rank, state, *when) for state, when in zip(states, pairwise(times), strict=True)]
        for span in received:
            found.append((span.peer, messages[span.peer or 0][rank].pop(0), span.start, span.end))
        for source, pieces, start, end in found:
            sums += [Sum(source, rank, piece, members, start, end) for piece, members in pieces.items()]
    return timeline, sums


def _messages(timeline: Timeline, rank: int, sent: list[Pieces]) -> dict[int, list[Pieces]]:
    """The content of a rank's messages to each peer, in order."""
    messages = defaultdict(list)
    sends = [one for one in timeline.of(rank) if one.kind == "transfer" and one.name not in RECEIVING and one.bytes]
    for span, content in zip(sends, sent, strict=True):
        messages[span.peer or 0].append(content)
    return messages


def _run(rank: int, way: str) -> tuple[list[Pieces], list[Pieces]]:
    """Run the collective. Returns what this rank sent, and its content at first and after each receive."""
    collective, has = WAYS[way]
    size = dist.get_world_size()
    numbers = torch.tensor([256 * piece + 2**rank if has(rank, piece) else 0 for piece in range(size)])
    dist.barrier()
    with _Record(numbers) as record:
        collective(numbers)
    return record.sent, [*record.states, _pieces(numbers)]


class _Record(TorchDispatchMode):
    """A record of what a rank sends, and of its content before each receive."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.sent: list[Pieces] = []
        self.states: list[Pieces] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith("send"):
            self.sent.append(_pieces(args[0][0]))
        elif func.__name__.startswith("recv"):
            self.states.append(_pieces(self.tensor))
        return func(*args, **(kwargs or {}))


def _pieces(numbers: Tensor) -> Pieces:
    """The ranks in each sum, by the piece that the numbers name."""
    found = [(number, tuple(rank for rank in range(8) if number >> rank & 1)) for number in numbers.tolist() if number]
    return {number // 256 // len(members): members for number, members in found}
