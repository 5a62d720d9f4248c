"""Sums over ranks out of messages that go straight to where they are needed: the best that is known in open tasks.

one shot      each rank sends all it has to all others: one latency, (n - 1) tensors
two shots     to the rank that adds up a part, and from it to all: two latencies, 2 (n - 1) / n tensors, as in a ring
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def straight(tensor: Tensor, group: Any = None) -> Callable[[], Tensor]:
    """Send a tensor straight to all other ranks of a group. Returns a function that waits for theirs, for the sum.

    A ring pays the latency in each of its rounds, and this once, but it sends more bytes.
    """
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
    parts = [tensor if one == rank else torch.empty_like(tensor) for one in ranks]
    turned = sorted(zip(ranks, parts, strict=True), key=lambda pair: (pair[0] - rank) % dist.get_world_size())[1:]
    works: list[Any] = [dist.isend(tensor, peer, group) for peer, _ in turned]
    works += [dist.irecv(part, peer, group) for peer, part in turned]

    def finish() -> Tensor:
        for work in works:
            work.wait()
        return torch.stack(parts).sum(0)

    return finish


def two_shots(tensor: Tensor, n_pieces: int) -> None:
    """Sum a vector over all ranks, in place: of each piece every rank adds up a part, and sends it to the others."""
    rank, n = dist.get_rank(), dist.get_world_size()
    others = [(rank + i) % n for i in range(1, n)]

    def exchange(outgoing: list[Tensor], incoming: list[Tensor]) -> list[Any]:
        triples = zip(outgoing, incoming, others, strict=True)
        return [work for one, other, peer in triples for work in (dist.isend(one, peer), dist.irecv(other, peer))]

    pieces = [piece.tensor_split(n) for piece in tensor.tensor_split(n_pieces)]
    arriving = [[torch.empty_like(parts[rank]) for _ in others] for parts in pieces]
    there = [exchange([parts[i] for i in others], into) for parts, into in zip(pieces, arriving, strict=True)]
    back: list[Any] = []
    for parts, into, works in zip(pieces, arriving, there, strict=True):
        for work in works:
            work.wait()
        parts[rank].add_(torch.stack(into).sum(0))
        back += exchange([parts[rank]] * (n - 1), [parts[i] for i in others])
    for work in back:
        work.wait()
