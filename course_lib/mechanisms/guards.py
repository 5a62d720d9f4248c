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

SMALLEST_SCALE = 2.0**-24

# Replicas and shards


def right_group(group: Group, parameters: Iterable[Tensor]) -> None:
    """Raise ValueError on a rank outside of the group, and where it was left out although ranks hold parts of a model.

    They do where a parameter was cut, and mostly where there are smaller groups: those of another parallelism.
    """
    rank_in(group)
    groups = dist.distributed_c10d._world.pg_map
    is_cut = any(getattr(parameter, "is_cut", False) for parameter in parameters)
    if group is None and (is_cut or any(other.size() < dist.get_world_size() for other in groups)):
        raise ValueError(
            "ranks seem to hold different parts of a model (tensor shares, or stages of a pipeline), and without "
            "group= all would get the first rank's; give group=, the ranks that hold the same part as this one, "
            "or group=dist.group.WORLD if all do"
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
    """Raise RuntimeError if this rank's share has another size than the mean share."""
    if samples != mean:
        raise RuntimeError(
            f"this rank's share has {samples} samples and the mean share {mean:g}, and their gradients would "
            f"count the same; give all ranks shares of the same size"
        )


# Data parallelism


def same_gradients(holders: Mapping[str, int], n: int) -> None:
    """Raise ValueError if only some of n ranks had a gradient of a parameter. holders: how many had one, by name."""
    for name, count in holders.items():
        if 0 < count < n:
            raise ValueError(
                f"ranks disagree on which parameters have a gradient: {name} has one on {count} of {n} ranks; use the "
                f"same parameters on all ranks, or DataParallel, where an unused one counts as zeros"
            )


def forward_may_begin(has_gradients: bool, latest: int | None, samples: int) -> None:
    """Raise RuntimeError after a forgotten `finish()`, and where one backward pass would have shares of two sizes.

    latest: samples of the forward pass before this one, if no `finish()` came after it.
    """
    if has_gradients:
        raise RuntimeError(
            "finish() was not called after the last backward(), so an update since then made the ranks' models drift "
            "apart; call finish() after backward() and before optimizer.step()"
        )
    if latest not in (None, samples):
        raise RuntimeError(
            f"a forward pass with {latest} samples and one with {samples} came before one backward(), whose "
            "gradient can count for only one number of them; give both passes as many, or call backward() and "
            "finish() after each (and evaluate inside torch.no_grad())"
        )


def only_one_backward(is_first: bool) -> None:
    """Raise RuntimeError for a second backward pass, whose gradients come too late."""
    if not is_first:
        raise RuntimeError(
            "a second backward() before finish() or step() would change gradients that are already on their way; "
            "add up the losses and call backward() once, or use average_gradients after the last one"
        )


def backward_is_done(samples: int | None, has_gradients: bool) -> None:
    """Raise RuntimeError where there is nothing to finish. samples: of the forward pass, None if there was none."""
    if samples is None or (samples and not has_gradients):  # without samples there may be no loss to go back from
        raise RuntimeError(
            "finish() was called before backward(), so there is no gradient to average yet; call it once per step, "
            "after backward() and before optimizer.step() (and evaluate inside torch.no_grad())"
        )


# Sharding


def not_finished_yet(is_finished: bool) -> None:
    """Raise RuntimeError for gradients that come after those before them were averaged."""
    if is_finished:
        raise RuntimeError(
            "backward() came after finish(), so its gradients would be lost; "
            "call finish() after the last backward(), and then step() or zero_grad()"
        )


def finish_came_first(is_finished: bool) -> None:
    """Raise RuntimeError where somebody asks for shards whose gradients have not arrived."""
    if not is_finished:
        raise RuntimeError(
            "shards have no gradients yet, and clipping them would change nothing; "
            "call the optimizer's finish() after backward(), and ask for its shards then"
        )


def not_sharded_yet(model: nn.Module) -> None:
    """Raise ValueError for a model whose parameters are shards already."""
    if any(getattr(parameter, "is_shard", False) for parameter in model.parameters()):
        raise ValueError(f"model={type(model).__name__} is sharded already; build it anew")


# Layer-wise parallelism


def loss_is_on_the_last_rank(loss: Tensor | None, rank: int, n_ranks: int) -> None:
    if (loss is not None) != (rank == n_ranks - 1):
        raise ValueError(
            f"loss={'None' if loss is None else 'a tensor'} on rank {rank} of {n_ranks}; "
            f"the last rank, {n_ranks - 1}, gives the loss and all others None"
        )


def layers_can_be_cut(n_layers: int, n_stages: int, costs: Sequence[float]) -> None:
    if not 1 <= n_stages <= n_layers:
        raise ValueError(
            f"n_stages={n_stages} stages cannot be made of n_layers={n_layers} layers, "
            f"as each needs at least one; choose n_stages from 1 to {n_layers}"
        )
    if len(costs) != n_layers:
        raise ValueError(f"costs has {len(costs)} numbers for n_layers={n_layers} layers; give one for each layer")


# Pipeline


def rank_for(n_ranks: int, group: Group) -> int:
    """This rank's number in the group, which has to be as large as the schedule."""
    rank, world_size = rank_in(group), dist.get_world_size(group)
    if world_size != n_ranks:
        raise ValueError(f"schedule is for {n_ranks} ranks; the group has {world_size}, so build it for these")
    return rank


# Mixed precision


def loss_was_scaled(scaler: Any) -> None:
    if scaler is not None and not scaler.has_scaled:
        raise RuntimeError(
            "step() divides gradients by the loss scale, and no loss was scaled since they were last divided; begin "
            "with scaler.scale(loss).backward(), and to clip unscaled gradients give step(clip=...)"
        )


def scale_makes_them_overflow(scale: float) -> None:
    if scale < SMALLEST_SCALE:
        raise ValueError(
            f"gradients are not finite even with scale={scale:g}, so it is not the scale that makes "
            "them overflow; look for inf or nan in the data, the weights and the forward pass"
        )


# Mesh


def sizes_make_all_ranks(dp: int, pp: int, tp: int) -> None:
    if min(dp, pp, tp) < 1 or dp * pp * tp != dist.get_world_size():
        product, n = f"dp={dp} x pp={pp} x tp={tp}", dist.get_world_size()
        raise ValueError(f"{product} makes {dp * pp * tp} ranks, and there are {n}; choose sizes that make {n}")


# Tensor parallelism


def can_share_heads(modules: Iterable[Any], group: Group) -> None:
    rank_in(group)
    for attention in (module for module in modules if hasattr(module, "query")):
        heads, kv_heads = (layer.out_features // attention.head_width for layer in (attention.query, attention.key))
        if kv_heads % (n := dist.get_world_size(group)):
            works = [ranks for ranks in range(1, kv_heads + 1) if kv_heads % ranks == 0]
            raise ValueError(
                f"a group of {n} ranks cannot share heads={heads} with kv_heads={kv_heads} equally; "
                f"this model works on one of {works} ranks"
            )


def sequence_can_be_shared(length: int, n: int) -> None:
    if length % n:
        raise ValueError(
            f"a sequence of {length} positions cannot be shared equally by {n} ranks; with sequence_parallel=True "
            f"give multiples of {n}, for instance {length + -length % n} by padding"
        )


def are_in_vocabulary(name: str, tokens: Tensor, vocab: int) -> None:
    if tokens.numel():
        least, most = map(int, tokens.aminmax())
        if least < 0 or most >= vocab:
            raise ValueError(f"{name} go from {least} to {most}; with vocab={vocab}, give 0 to {vocab - 1}")
