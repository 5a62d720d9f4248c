"""Tied weights in a pipeline: one parameter with a copy on each rank that uses it.

An embedding that is the head's matrix as well lives on the first rank and on the last. Each finds the part of its
gradient that arose there, and both need the sum; then equal optimizers keep the copies equal.

    rank 0   embedding  W          gradient a   --.     .-->   a + b
    rank 3   head       W          gradient b   --'     '-->   a + b
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms.groups import Group


@torch.no_grad()
def sum_gradients(parameter: nn.Parameter, ranks: Sequence[int], group: Group = None) -> Tensor:
    """The sum of a parameter's gradients over the ranks of the group that hold a copy. All of these call it.

    They add up in the order in which one process adds up the uses of a parameter: the last one first.
    """
    own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
    found = {rank: own if rank == dist.get_rank(group) else torch.empty_like(own) for rank in ranks}
    others = [rank for rank in ranks if rank != dist.get_rank(group)]
    sends = [dist.P2POp(dist.isend, own, group=group, group_peer=rank) for rank in others]
    receives = [dist.P2POp(dist.irecv, found[rank], group=group, group_peer=rank) for rank in others]
    for work in dist.batch_isend_irecv(sends + receives):
        work.wait()
    return functools.reduce(torch.add, [found[rank] for rank in reversed(ranks)])


@contextlib.contextmanager
def summed(tied: Mapping[nn.Parameter, Sequence[int]], group: Group = None) -> Iterator[None]:
    """Sum over the ranks the gradients that backward passes in this block compute, and add them to earlier ones.

    tied: what `holders` says of this rank's parameters.
    """
    before = {parameter: parameter.grad for parameter in tied}
    for parameter in tied:
        parameter.grad = None  # what is summed already must not be sent again
    yield
    for parameter, ranks in tied.items():
        total, earlier = sum_gradients(parameter, ranks, group), before[parameter]
        parameter.grad = total if earlier is None else earlier + total


def holders(modules: Iterable[nn.Module]) -> dict[nn.Parameter, list[int]]:
    """The trained parameters that several ranks hold, each with these ranks.

    modules: of each rank of a pipeline, what it holds of one whole model.
    """
    ranks: dict[nn.Parameter, list[int]] = {}
    for rank, module in enumerate(modules):
        for parameter in module.parameters():
            if parameter.requires_grad:
                ranks.setdefault(parameter, []).append(rank)
    return {parameter: held_by for parameter, held_by in ranks.items() if len(held_by) > 1}
