"""The check for `ring_all_reduce(tensor)`: the sum on every rank, with messages between neighbors only.

Every element of every rank is a number that still tells, within any sum, its rank and its element:

    16**rank + BASE * (element + 1)        BASE = 16**ranks

In a sum of such numbers the base-16 digits below BASE count how often each rank's number was added, and the rest,
divided by the number of summands, names the element. So the check can name the first wrong message, with its round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.messages import collective_at_work, sent_more
from course_lib.classroom.checks.part import Case, Observed, effect
from course_lib.ranks import Link, Pace, listing
from course_lib.timeline import compute

PACE = Pace(device={"backward": 0.1}, link=Link(latency=0.005, bandwidth=6e5))


def right(tensor: Tensor) -> None:
    n = dist.get_world_size()
    chunks = tensor.view(-1).tensor_split(n)
    _rounds(chunks, first=0, take=Tensor.add_)
    _rounds(chunks, first=1, take=Tensor.copy_)


def _rounds(chunks: Sequence[Tensor], first: int, take: Callable, n_rounds: int | None = None) -> None:
    """Send chunk `first`, counted from this rank's own, then in each round the chunk that has just arrived."""
    rank, n = dist.get_rank(), dist.get_world_size()
    buffer = torch.empty_like(max(chunks, key=len))
    for step in range(n - 1 if n_rounds is None else n_rounds):
        outgoing, own = chunks[(rank + first - step) % n], chunks[(rank + first - step - 1) % n]
        sending: Any = dist.isend(outgoing, (rank + 1) % n)
        dist.recv(buffer[: len(own)], (rank - 1) % n)
        sending.wait()
        take(own, buffer[: len(own)])


def _case(world_size: int, *shape: int, dtype: torch.dtype = torch.float64, new: str = "") -> Case:
    text = f"{world_size} ranks and {' x '.join(map(str, shape))} numbers"
    return Case(text, world_size, partial(_arguments, shape, dtype, world_size), new)


def _arguments(shape: tuple[int, ...], dtype: torch.dtype, world_size: int, rank: int) -> tuple[Tensor]:
    elements = torch.arange(1, torch.Size(shape).numel() + 1, dtype=dtype)
    return ((16**rank + 16**world_size * elements).view(shape),)


def _after_backward(n: int, rank: int) -> tuple[Tensor]:
    with compute("backward"):
        return (torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)),)


def _cases(seed: int) -> list[Case]:
    return [
        _case(2, 6 + 2 * seed, dtype=torch.float32),
        _case(2, 7 + 2 * seed, new="64 bits, and chunks of different length"),
        _case(3, 7 + 3 * seed),
        _case(3, 2, 3 + 3 * seed, dtype=torch.int64, new="two dimensions, and whole numbers"),
        *(_case(4, 8 + n + 8 * seed, new=f"{n} more than 4 chunks of the same length" * (n > 0)) for n in (0, 1, 2)),
        *(_case(4, n, new="few numbers") for n in (4, 5, 6, 9)),
    ]


def _breach(observed: list[Observed]) -> str:
    """Check the rest of the contract: only messages, only to neighbors, and no more than needed."""
    n, tensor = len(observed), observed[0].values["tensor"]
    beyond = [(r, s.peer) for r, seen in enumerate(observed) for s in seen.sent if (s.peer - r) % n not in (1, n - 1)]
    if beyond and not collective_at_work(observed):
        return "Rank {} sends to rank {}, which is not its neighbor in the ring.".format(*beyond[0])
    best = 2 * n - 2, 2 * (n - 1) * (chunk := -(-len(tensor.flatten()) // n))  # type: ignore[union-attr]
    largest = max((sent.content.numel() for seen in observed for sent in seen.sent), default=0)
    too_large = f"The sum is right, but a message of {largest} numbers is larger than a chunk."
    return collective_at_work(observed) or sent_more(observed, best, "The sum is") or too_large * (largest > chunk)


# Which round went wrong


def _first_wrong_round(observed: list[Observed]) -> str:
    """Name the first message that does not carry what a ring carries in that round."""
    n, rounds = len(observed), len(observed) - 1
    for round in range(1, 2 * rounds + 1):
        several = min(round, n)  # number of ranks in each sum that travels
        for rank, seen in enumerate(observed):
            added = [_ranks_in(x, n) for sent in seen.sent[round - 1 : round] for x in sent.content.flatten().tolist()]
            wrong = [ranks for ranks in added if not len(ranks) == len(set(ranks)) == several]
            if wrong:
                what = f"sums of {listing(wrong[0])}" if wrong[0] else "a mix of different elements"
                what += f", where sums of {several} different ranks should travel"
                return f"In round {round} of {2 * rounds} rank {rank} sends {what}."
    other = [len(seen.sent) for seen in observed if len(seen.sent) != 2 * rounds]
    if other:
        return f"With {n} ranks each rank sends {2 * rounds} messages, and yours send {other[0] or 'none'}."
    return "Your messages carry what they should. What becomes of what arrives?"


def _ranks_in(number: float, n: int) -> list[int]:
    """The ranks in a sum, each as often as it was added; none for a mix of different elements."""
    whole = int(number) if abs(number) < 1e15 else 0
    ranks = [rank for rank in range(n) for _ in range(whole // 16**rank % 16)]
    return ranks if ranks and whole == number and whole // 16**n % len(ranks) == 0 else []


price_case = Case("4 ranks and 3,000 fractions", 4, partial(_after_backward, 3_000))
exact = partial(Exercise, pace=PACE, rounding=1e-12, breach=_breach, rule=_first_wrong_round)
ring_all_reduce = exact("ring_all_reduce", right, effect, _cases, price_case)


@ring_all_reduce.mistake
def through_one_rank(tensor: Tensor) -> None:
    rank, arriving = dist.get_rank(), torch.empty_like(tensor)
    if rank:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
    for other in range(1, 0 if rank else dist.get_world_size()):
        dist.recv(arriving, other)
        tensor += arriving
    for other in range(1, 0 if rank else dist.get_world_size()):
        dist.send(tensor, other)
