"""How parameters lie on the ranks of a tensor group: cut along one dimension, or whole on each of them.

    weight [5, 4], cut along dimension 0 for 2 ranks      rank 0: rows 0 1 2      rank 1: rows 3 4
    a norm's weight                                       rank 0: all of it       rank 1: the same

Each parameter carries this as its `placement`. So shards can be gathered, whole tensors cut anew for other ranks, and
sums over the model, such as the norm of its gradient, count on every rank what is cut, and once what is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms.groups import Group
from course_lib.mechanisms.replicas import from_first_rank, named_tensors


def shard(tensor: Tensor, dim: int, group: Group = None) -> Tensor:
    """This rank's shard of a tensor along one dimension; if the ranks do not divide it, the first get one more."""
    return tensor.tensor_split(dist.get_world_size(group), dim)[dist.get_rank(group)]


def gather(tensor: Tensor, dim: int, length: int, group: Group = None) -> Tensor:
    """The whole tensor, `length` long in dimension dim, from the ranks' shards; the inverse of `shard`."""
    n = dist.get_world_size(group)
    lengths = [len(shard_range(length, rank, n)) for rank in range(n)]
    padding = list(tensor.shape)
    padding[dim] = lengths[0] - tensor.shape[dim]  # a collective wants equal sizes
    sent = torch.cat([tensor, tensor.new_zeros(padding)], dim)
    shards = [torch.empty_like(sent) for _ in range(n)]
    dist.all_gather(shards, sent, group=group)
    return torch.cat([own.narrow(dim, 0, length) for own, length in zip(shards, lengths, strict=True)], dim)


def shard_range(length: int, rank: int, n: int) -> range:
    """The half-open range that `shard` gives to a rank of n."""
    first = rank * (length // n) + min(rank, length % n)
    return range(first, first + length // n + (rank < length % n))


@dataclass(frozen=True)
class Placement:
    """How one parameter lies on the ranks of a tensor group.

    dim: the dimension along which it is cut; None: every rank holds all of it, and all hold the same.
    length: of the whole parameter in that dimension.
    is_partial: a backward pass leaves a partial sum of its gradient on each rank, see `sum_partial_gradients`.
    """

    dim: int | None = None
    length: int = 0
    is_partial: bool = False

    @property
    def is_sharded(self) -> bool:
        return self.dim is not None

    def shard(self, whole: Tensor, group: Group) -> Tensor:
        """This rank's part of a tensor that lies like the parameter."""
        return whole if self.dim is None else shard(whole, self.dim, group)

    def gather(self, own: Tensor, group: Group) -> Tensor:
        """The whole tensor from the ranks' parts, a new one. All ranks call it."""
        return own.clone() if self.dim is None else gather(own, self.dim, self.length, group)


def placements(model: nn.Module) -> dict[str, Placement]:
    """How each tensor of the model's state lies on the ranks, by name; a tied one is there under all of its names."""
    tensors = model.state_dict(keep_vars=True)
    return {name: getattr(tensor, "placement", Placement()) for name, tensor in tensors.items()}


def shard_parameters(
    module: nn.Module, whole: nn.Module, dims: Mapping[str, int | None], group: Group, is_partial: bool = False
) -> None:
    """Give the module this rank's shards of a whole layer's parameters, after making these the group's first rank's.

    dims: the dimension along which each is cut; None: the module gets all of it.
    is_partial: of those that are not cut.
    """
    from_first_rank(named_tensors(whole).values(), group)
    for name, dim in dims.items():
        parameter = getattr(whole, name)
        if parameter is None:
            module.register_parameter(name, None)
            continue
        placement = Placement(is_partial=is_partial) if dim is None else Placement(dim, parameter.shape[dim])
        own = nn.Parameter(placement.shard(parameter.detach(), group).clone(), parameter.requires_grad)
        own.placement = placement  # type: ignore[attr-defined]
        module.register_parameter(name, own)


def sum_partial_gradients(model: nn.Module, group: Group = None) -> None:
    """Make the gradients of replicated parameters whole, in place. Call it once after the last backward pass of a step.

    With sequence parallelism, norms and biases see only this rank's positions. One all-reduce in all; none where no
    gradient is partial.
    """
    where = placements(model)
    gradients = [p.grad for name, p in model.named_parameters() if where[name].is_partial and p.grad is not None]
    if not gradients:
        return
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat, group=group)
    nn.utils.vector_to_parameters(flat, gradients)


def full_state(model: nn.Module, group: Group = None) -> dict[str, Tensor]:
    """The state_dict of the model before it was cut, on every rank. For more ranks or fewer, load it, then cut."""
    where = placements(model)
    return {name: where[name].gather(tensor, group) for name, tensor in model.state_dict().items()}
