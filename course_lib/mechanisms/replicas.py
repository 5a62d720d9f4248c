"""Replicas: ranks that hold the same model begin with the same parameters, and count by their share of a minibatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from course_lib.mechanisms import guards
from course_lib.mechanisms.groups import Group


def make_equal(model: nn.Module, group: Group) -> None:
    """Give every rank the parameters and buffers of the group's first.

    Raises ValueError on all ranks if their models differ.
    """
    guards.right_group(group, model.parameters())
    tensors: dict[str, Tensor] = {
        name if parameter.requires_grad else f"{name} (frozen)": parameter
        for name, parameter in model.named_parameters()
    }
    tensors |= {f"{name} (a buffer)": buffer for name, buffer in model.named_buffers()}
    guards.same_on_all_ranks(tensors, group)
    from_first_rank(model, group)


def from_first_rank(tensors: nn.Module | Iterable[Tensor], group: Group = None) -> None:
    """Make tensors those of the group's first rank, in one message for each dtype and 256 MiB.

    tensors: or a model, for all of its parameters and buffers.
    """
    if isinstance(tensors, nn.Module):
        tensors = (*tensors.parameters(), *tensors.buffers())
    dist._broadcast_coalesced(group or dist.group.WORLD, [tensor.detach() for tensor in tensors], 2**28, 0)  # type: ignore[arg-type]


def total_over_ranks(number: int, device: torch.device, group: Group) -> int:
    """The sum of the ranks' numbers."""
    total = torch.tensor([number], device=device)
    dist.all_reduce(total, group=group)
    return int(total)


def samples_in(inputs: Any) -> int:
    """The length of the first tensor."""
    return next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), 1)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors within tuples, lists, dicts and dataclasses."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf):
            yield from tensors_in(vars(leaf))


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters(), torch.empty(0)).device
