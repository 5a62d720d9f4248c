"""Guards: slips that students of this course make, and the sentence that tells each.

A mechanism calls them in one line, so that its page can be read without them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms.groups import Group, rank_in

# Replicas and shards


def right_group(group: Group, parameters: Iterable[Tensor]) -> None:
    """Raise ValueError on a rank outside of the group, and where it was left out although ranks hold parts of a model.

    They do where a parameter was cut, and mostly where there are smaller groups: those of another parallelism.
    """
    rank_in(group)
    groups = dist.distributed_c10d._world.pg_map
    is_cut = any(parameter.placement.is_sharded for parameter in parameters if hasattr(parameter, "placement"))
    if group is None and (is_cut or any(other.size() < dist.get_world_size() for other in groups)):
        raise ValueError(
            "ranks seem to hold different parts of a model, and without group= all would get the first rank's; "
            "give group=, the ranks that hold the same part as this one, or group=dist.group.WORLD if all do"
        )


def same_on_all_ranks(tensors: Mapping[str, Tensor], group: Group) -> None:
    """Raise ValueError on every rank if names, shapes or dtypes differ, or their order."""
    kinds = {name: "" if tensor.requires_grad else " (frozen)" for name, tensor in tensors.items()}
    listed = [f"{name}{kinds[name]} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, listed, group=group)
    for entries in itertools.zip_longest(*everyone, fillvalue="nothing"):
        if len(set(entries)) > 1:
            found = ", ".join(f"{entry} on rank {rank}" for rank, entry in enumerate(entries))
            raise ValueError(f"ranks have different models, {found}; build the same one on all of them")


def equal_shares(samples: int, mean: float) -> None:
    if samples != mean:
        raise RuntimeError(
            f"this rank's share has {samples} samples and the mean share {mean:g}, but gradients would count the same"
        )


# Data parallelism


def forward_may_begin(has_gradients: bool, latest: int | None, samples: int) -> None:
    """latest: samples of the forward pass before this one, if no `finish()` came after it."""
    if has_gradients:
        raise RuntimeError("finish() was not called after the last backward(), so the ranks' models have drifted apart")
    if latest not in (None, samples):
        raise RuntimeError(
            f"forward passes with {latest} and with {samples} samples came before one backward(), whose gradient "
            "has a single weight; call backward() and finish() after each (and evaluate inside torch.no_grad())"
        )


def only_one_backward(is_first: bool) -> None:
    if not is_first:
        raise RuntimeError(
            "a second backward() before finish() or step() would change gradients that are on their way; "
            "add up the losses and call backward() once, or use average_gradients after the last one"
        )


def backward_is_done(samples: int | None, has_gradients: bool) -> None:
    """samples: of the forward pass, None if there was none; without samples there may be no loss to go back from."""
    if samples is None or (samples and not has_gradients):
        raise RuntimeError("finish() was called before backward(); call it after, and before optimizer.step()")


# Sharding


def not_finished_yet(is_finished: bool) -> None:
    if is_finished:
        raise RuntimeError("backward() came after finish(), so its gradients would be lost; call step() in between")


def finish_came_first(is_finished: bool) -> None:
    if not is_finished:
        raise RuntimeError("shards have no gradients yet; call the optimizer's finish() after backward(), then clip")


def not_sharded_yet(model: nn.Module) -> None:
    if any(getattr(parameter, "is_shard", False) for parameter in model.parameters()):
        raise ValueError(f"model={type(model).__name__} is sharded already; build it anew")


# Layers and stages


def loss_is_on_the_last_rank(loss: Tensor | None, rank: int, n_ranks: int) -> None:
    if (loss is not None) != (rank == n_ranks - 1):
        found = "None" if loss is None else "a tensor"
        raise ValueError(f"loss={found} on rank {rank} of {n_ranks}; the last one gives the loss, all others None")


def layers_can_be_cut(n_layers: int, n_stages: int, costs: Sequence[float]) -> None:
    if not 1 <= n_stages <= n_layers:
        raise ValueError(f"n_stages={n_stages} cannot share n_layers={n_layers}; choose n_stages from 1 to {n_layers}")
    if len(costs) != n_layers:
        raise ValueError(f"costs has {len(costs)} numbers for n_layers={n_layers}; give one for each layer")


def rank_for(n_ranks: int, group: Group) -> int:
    """This rank's number in the group, which has to be as large as the schedule."""
    rank, world_size = rank_in(group), dist.get_world_size(group)
    if world_size != n_ranks:
        raise ValueError(f"schedule is for {n_ranks} ranks; the group has {world_size}, so build it for these")
    return rank


def sizes_make_all_ranks(dp: int, pp: int, tp: int) -> None:
    product, n = f"dp={dp} x pp={pp} x tp={tp}", dist.get_world_size()
    if min(dp, pp, tp) < 1 or dp * pp * tp != n:
        raise ValueError(f"{product} makes {dp * pp * tp} ranks, and there are {n}; choose sizes that make {n}")


# Mixed precision


def loss_was_scaled(scaler: Any) -> None:
    if scaler is not None and not scaler.has_scaled:
        raise RuntimeError(
            "no loss was scaled since gradients were last divided by the scale; begin with scaler.scale(loss), "
            "and to clip unscaled gradients give step(clip=...)"
        )


# Tensor parallelism


def can_share_heads(modules: Iterable[Any], group: Group) -> None:
    rank_in(group)
    n = dist.get_world_size(group)
    for attention in (module for module in modules if hasattr(module, "query")):
        heads = attention.query.out_features // attention.head_width
        if heads % n:
            works = [ranks for ranks in range(1, heads + 1) if heads % ranks == 0]
            raise ValueError(f"{n} ranks cannot share heads={heads}, but one of {works} can")


def sequence_can_be_shared(length: int, n: int) -> None:
    if length % n:
        raise ValueError(f"{n} ranks cannot share {length} positions; give multiples of {n}, for instance by padding")
