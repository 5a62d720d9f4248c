"""Tensor parallelism: every rank holds a share of every layer, and computes a share of every matrix product.

Two linear layers with something between them that works on each hidden unit alone need one communication. The first
is cut by columns (its outputs), so a rank has some of the units, whole; the second by rows (its inputs), so what a
rank outputs is a partial sum of the result:

                    columns              rows
    rank 0   x --f--  A_0  -- gelu --    B_0  --g-- y        y  =  gelu(x A_0) B_0  +  gelu(x A_1) B_1
    rank 1   x --f--  A_1  -- gelu --    B_1  --g-- y

    forward    f: nothing       g: all-reduce                f and g are conjugate: each does backward
    backward   f: all-reduce    g: nothing                   what the other does forward

Attention is the same with heads for units: query, key and value are cut by columns into whole heads, out by rows.
So a transformer block costs two all-reduces forward and two backward, one each for attention and MLP.

Outside of f and g every rank does the same work on the same hidden states. Sequence parallelism cuts these too, by
position: g becomes a reduce-scatter that leaves each rank its positions of the sum, norms and dropout work on those,
and f becomes an all-gather. The bytes stay the same, as an all-reduce is a reduce-scatter and an all-gather.

    rank 0   x_0 --f--  A_0  -- gelu --  B_0  --g-- y_0      forward    f: all-gather        g: reduce-scatter
    rank 1   x_1 --f--  A_1  -- gelu --  B_1  --g-- y_1      backward   f: reduce-scatter    g: all-gather

Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (f, g);
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.mechanisms import guards
from course_lib.mechanisms.groups import Group
from course_lib.mechanisms.tensor_parallel.placement import gather, shard, shard_parameters

SEQUENCE = 1  # the dimension of the positions, in hidden states [batch, sequence, hidden]


def copy_to_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Megatron's f: x, the same on all ranks, goes into a layer that is cut; its gradients are summed."""
    return conjugate(x, forward=lambda x: x, backward=lambda gradient: _all_reduce(gradient, group))


def sum_over_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Megatron's g: adds up the ranks' partial sums; the gradient, the same on all ranks, is that of each of them."""
    return conjugate(x, forward=lambda x: _all_reduce(x, group), backward=lambda gradient: gradient)


class ColumnParallelLinear(nn.Module):
    """This rank's outputs of a linear layer: [..., in_features], the same on all ranks -> [..., its out_features].

    linear: the whole layer. It gets the weights of the group's first rank.
    sequence_parallel: the input is this rank's positions [batch, sequence / ranks, in_features].
    communicates: False if the input has been through f already, which is enough once for several layers that take
        the same input.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, linear: nn.Linear, group: Group = None, sequence_parallel: bool = False, communicates: bool = True
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel, self.communicates = group, sequence_parallel, communicates
        shard_parameters(self, linear, {"weight": 0, "bias": 0}, group)

    def forward(self, x: Tensor) -> Tensor:
        if self.communicates:
            x = enter(x, self.group, self.sequence_parallel)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer of which this rank has some inputs: [..., its in_features] -> [..., out_features], the sum.

    linear: the whole layer. It gets the weights of the group's first rank. Every rank
        has the whole bias, which is added once, to the sum.
    sequence_parallel: the output is this rank's positions [batch, sequence / ranks, out_features].
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, group: Group = None, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        shard_parameters(self, linear, {"weight": 1, "bias": None}, group, is_partial=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        total = leave(F.linear(x, self.weight), self.group, self.sequence_parallel)
        return total if self.bias is None else total + self.bias


def enter(x: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    """f, with sequence parallelism or without."""
    return gather_sequence(x, group) if sequence_parallel else copy_to_ranks(x, group)


def leave(x: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    """g, with sequence parallelism or without."""
    return reduce_scatter_sequence(x, group) if sequence_parallel else sum_over_ranks(x, group)


# Other conjugates


def gather_sequence(x: Tensor, group: Group = None) -> Tensor:
    """f with sequence parallelism: [batch, sequence / ranks, hidden] -> [batch, sequence, hidden]."""
    return conjugate(x, lambda x: _all_gather(x, group), lambda gradient: _reduce_scatter(gradient, group))


def reduce_scatter_sequence(x: Tensor, group: Group = None) -> Tensor:
    """g with sequence parallelism: partial sums [batch, sequence, hidden] -> sum [batch, sequence / ranks, hidden]."""
    return conjugate(x, lambda x: _reduce_scatter(x, group), lambda gradient: _all_gather(gradient, group))


def scatter_sequence(x: Tensor, group: Group = None) -> Tensor:
    """This rank's positions of x, which is the same on all ranks: [batch, sequence / ranks, hidden].

    Raises ValueError if the ranks do not divide the sequence.
    """
    guards.sequence_can_be_shared(x.shape[SEQUENCE], dist.get_world_size(group))
    return scatter_to_ranks(x, SEQUENCE, group)


def scatter_to_ranks(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """This rank's shard of x, which is the same on all ranks, along one dimension; its gradients are gathered."""
    length = x.shape[dim]
    # A view would keep all of x in memory.
    return conjugate(x, lambda x: shard(x, dim, group).contiguous(), lambda own: gather(own, dim, length, group))


def gather_from_ranks(x: Tensor, dim: int, length: int, group: Group = None) -> Tensor:
    """The whole, `length` long along one dimension, from the ranks' shards x, on every rank."""
    return conjugate(x, lambda x: gather(x, dim, length, group), lambda gradient: shard(gradient, dim, group))


def conjugate(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """forward(x); on the way back, backward of the gradient is what goes on to x."""
    return _Conjugate.apply(x, forward, backward)


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable, backward: Callable) -> Tensor:
        ctx.on_the_way_back = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.on_the_way_back(*gradients), None, None


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)  # others may hold on to x
    dist.all_reduce(total, group=group)
    return total


def _all_gather(x: Tensor, group: Group) -> Tensor:
    return gather(x, SEQUENCE, x.shape[SEQUENCE] * dist.get_world_size(group), group)


def _reduce_scatter(x: Tensor, group: Group) -> Tensor:
    parts = x.chunk(dist.get_world_size(group), SEQUENCE)
    own = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    dist.reduce_scatter_single(own, torch.cat(parts), group=group)
    return own
