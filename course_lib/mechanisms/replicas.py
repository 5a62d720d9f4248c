"""Replicas: ranks with the same model, which begin with the same parameters and share a minibatch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from course_lib.mechanisms import guards
from course_lib.mechanisms.groups import Group


def make_equal(tensors: Mapping[str, Tensor], group: Group) -> None:
    """Give every rank the tensors of the group's first. Raises ValueError on all ranks if names or shapes differ."""
    guards.right_group(group, tensors.values())
    guards.same_on_all_ranks(tensors, group)
    from_first_rank(tensors.values(), group)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and buffers, by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def from_first_rank(tensors: Iterable[Tensor], group: Group = None) -> None:
    """Overwrite tensors with those of the group's first rank, in one message for each dtype and 256 MiB."""
    dist._broadcast_coalesced(group or dist.group.WORLD, [tensor.detach() for tensor in tensors], 2**28, 0)  # type: ignore[arg-type]


def total_over_ranks(number: int, device: torch.device, group: Group) -> int:
    """The sum of the ranks' numbers."""
    total = torch.tensor([number], device=device)
    dist.all_reduce(total, group=group)
    return int(total)


def samples_in(inputs: Any) -> int:
    """The number of samples, which is the length of the first tensor."""
    return next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), 1)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors within tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
