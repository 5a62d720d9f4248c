"""Guards: slips that students of this course make, and the sentence that tells each.

A mechanism calls them in one line, so that its page can be read without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.mechanisms.groups import Group, rank_in

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
SMALLEST_SCALE = 2.0**-24

# layerwise


def loss_is_on_the_last_rank(loss: Tensor | None, rank: int, n_ranks: int) -> None:
    if (loss is not None) != (rank == n_ranks - 1):
        raise ValueError(
            f"loss={'None' if loss is None else 'a tensor'} on rank {rank} of {n_ranks}; "
            f"the last rank, {n_ranks - 1}, gives the loss and all others None"
        )


def has_something_to_go_back_through(forward_passes: Sequence[Any]) -> None:
    if not forward_passes:
        raise RuntimeError(
            "backward() has nothing to go back through: call it once for all forward passes since the last one, with "
            "the sum of their losses"
        )


def layers_can_be_cut(n_layers: int, n_stages: int, costs: Sequence[float]) -> None:
    if not 1 <= n_stages <= n_layers:
        raise ValueError(
            f"n_stages={n_stages} stages cannot be made of n_layers={n_layers} layers, "
            f"as each needs at least one; choose n_stages from 1 to {n_layers}"
        )
    if len(costs) != n_layers:
        raise ValueError(f"costs has {len(costs)} numbers for n_layers={n_layers} layers; give one for each layer")


# pipeline


def rank_for(n_ranks: int, group: Group) -> int:
    """This rank's number in the group, which has to be as large as the schedule."""
    rank, world_size = rank_in(group), dist.get_world_size(group)
    if world_size != n_ranks:
        raise ValueError(f"schedule is for {n_ranks} ranks; the group has {world_size}, so build it for these")
    return rank


def output_can_be_passed_on(stage: int, k: int, output: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if (output.dtype, *output.shape) != (dtype, *shape):
        raise ValueError(
            f"stage {stage} returned {output.dtype} {list(output.shape)} for micro-batch {k}, and the next stage "
            f"expects {dtype} {list(shape)}; only dimension 0 may change, with the number of samples"
        )


# mixed_precision


def listed(parameters: Iterable[Any]) -> list[Any]:
    if isinstance(parameters, Tensor):  # whose rows have no gradients
        raise ValueError(f"parameters is one tensor, {list(parameters.shape)}; give a list, for instance [parameter]")
    return list(parameters)


def loss_can_be_scaled(loss: Tensor, scale: float) -> None:
    if loss.dtype in SIXTEEN_BITS:
        raise ValueError(
            f"loss is a {_name(loss.dtype)}, which has no room for a scale of {scale:g}; "
            "compute it in float32, as in loss_fn(logits.float(), targets)"
        )
    if not loss.isfinite().all():
        raise ValueError(
            f"loss={loss.tolist()} before any scaling, so the forward pass overflowed or the weights are broken; "
            "look for numbers above 65504 in float16, use bfloat16 or take a smaller learning rate"
        )


def loss_was_scaled(scaler: Any) -> None:
    if scaler is not None and not scaler.has_scaled:
        raise RuntimeError(
            "step() divides gradients by the loss scale, and no loss was scaled since they were last divided; begin "
            "with scaler.scale(loss).backward(), and to clip unscaled gradients give step(clip=...)"
        )


def gradients_can_be_unscaled(gradients: Iterable[Tensor], in_16_bits: bool) -> None:
    for gradient in gradients:
        if gradient.dtype in SIXTEEN_BITS and not in_16_bits:
            raise ValueError(
                f"parameters have gradients in {_name(gradient.dtype)}, where unscaling loses what scaling has "
                "saved; give parameters in float32, as MasterWeights has them"
            )


def scale_makes_them_overflow(scale: float) -> None:
    if scale < SMALLEST_SCALE:
        raise ValueError(
            f"gradients are not finite even with scale={scale:g}, so it is not the scale that makes "
            "them overflow; look for inf or nan in the data, the weights and the forward pass"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# mesh


def sizes_make_all_ranks(dp: int, pp: int, tp: int) -> None:
    if min(dp, pp, tp) < 1 or dp * pp * tp != dist.get_world_size():
        product, n = f"dp={dp} x pp={pp} x tp={tp}", dist.get_world_size()
        raise ValueError(f"{product} makes {dp * pp * tp} ranks, and there are {n}; choose sizes that make {n}")


# tensor_parallel


def is_whole(layers_to_cut: Sequence[Any]) -> None:
    if not layers_to_cut:
        raise ValueError("model has no whole layers to cut; give a TinyGPT or blocks of one that were not cut before")


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


def every_rank_has_a_share(name: str, length: int, n: int) -> None:
    if length < n:
        raise ValueError(f"{name}={length} cannot be cut into shares for {n} ranks; use at most {length} ranks")


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
