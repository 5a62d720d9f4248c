"""The check for `ring_all_reduce(tensor)`: the sum on every rank, from messages between neighbors alone.

Every element of every rank carries a number from which, however they were added, one can read back what is in it:

    16**rank + BASE * (element + 1)        BASE = 16**ranks

In a sum of such numbers the digits below BASE, in base 16, count how often each rank's number was added, and the rest,
divided by how many numbers there are, names the element. So the first message that carries something wrong can be
named, with its round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from course_lib.checks.examine import Exercise, Explanation, contains, examine
from course_lib.checks.verdict import Cost, Idle, Verdict
from course_lib.checks.watch import Sent, Watch
from course_lib.ranks import Deadlock, Link, Mismatch, Pace, RunError, launch
from course_lib.timeline import Timeline, compute

LINK = Link(latency=0.005, bandwidth=6e6)
PACE = Pace(device={"backward": 0.06}, link=LINK)
MESSAGES = frozenset({"send", "isend", "recv", "irecv", "recv_any_source"})


def ring_all_reduce(fn: Callable[..., Any], seed: int = 0) -> Verdict:
    """Check a student's ring_all_reduce on 2, 3 and 4 ranks. seed: tensors of other sizes."""
    return examine(RING, fn, seed)


@dataclass(frozen=True)
class RingCase:
    world_size: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.world_size} ranks and a tensor of {' x '.join(map(str, self.shape))}"

    @property
    def base(self) -> int:
        return 16**self.world_size

    def tensor(self, rank: int) -> Tensor:
        elements = torch.arange(1, torch.Size(self.shape).numel() + 1, dtype=self.dtype)
        return (16**rank + self.base * elements).view(self.shape)

    def sum(self) -> Tensor:
        return torch.stack([self.tensor(rank) for rank in range(self.world_size)]).sum(0)

    def read(self, number: float) -> Content:
        """What a number is the sum of."""
        how_often = [int(number) // 16**rank % 16 for rank in range(self.world_size)]
        many = sum(how_often)
        element = int(number) // self.base / many if many and number == int(number) >= 0 else 0.0
        return Content(int(element) - 1 if element == int(element) else -1, tuple(how_often))

    def largest_chunk(self) -> int:
        """Bytes of the tensor's n-th part, rounded up to whole elements."""
        return -(-torch.Size(self.shape).numel() // self.world_size) * self.dtype.itemsize


class Content(NamedTuple):
    """What a number is the sum of. element: -1 for a mix of several, or of nothing known; how_often: by rank."""

    element: int
    how_often: tuple[int, ...]

    @property
    def ranks(self) -> list[int]:
        return [rank for rank, count in enumerate(self.how_often) if count]


def _cases(seed: int) -> list[RingCase]:
    return [
        RingCase(2, (6 + 2 * seed,), torch.float32),
        RingCase(3, (7 + 3 * seed,), torch.float64),
        RingCase(4, (2, 5 + 2 * seed), torch.float64),
    ]


# On a rank


@dataclass(frozen=True)
class Ring:
    """What one rank did: the tensor in the end, what the function returned, if that was a tensor, and the messages."""

    after: Tensor
    returned: Tensor | None
    sent: list[Sent]
    memory: int


def _play(rank: int, fn: Callable[..., Any], case: RingCase) -> tuple[Ring, ...]:
    tensor = case.tensor(rank)
    with compute("backward"):
        pass
    with Watch() as watch:
        returned = fn(tensor)
    copy = returned.detach().clone() if isinstance(returned, Tensor) else None
    return Ring(tensor, copy, watch.sent, watch.peak)


# In the notebook


@dataclass(frozen=True)
class Rings:
    case: RingCase
    rings: list[Ring]
    timeline: Timeline
