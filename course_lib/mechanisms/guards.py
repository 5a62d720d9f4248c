"""Guards: slips that students of this course make, and the sentence that tells each.

A mechanism calls them in one line, so that its page can be read without them.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.mechanisms.groups import Group, rank_in

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
SMALLEST_SCALE = 2.0**-24

# layerwise


def comes_after_a_forward_pass(forward_passes: Sequence[Any]) -> None:
    if not forward_passes:
        raise RuntimeError("backward() has nothing to go back through; call it once after the forward pass of a step")


def loss_is_on_the_last_rank(loss: Tensor | None, rank: int, n_ranks: int) -> None:
    if (loss is not None) != (rank == n_ranks - 1):
        raise ValueError(
            f"loss={'None' if loss is None else 'a tensor'} on rank {rank} of {n_ranks}; "
            f"the last rank, {n_ranks - 1}, gives the loss and all others None"
        )


def every_stage_has_a_layer(n_layers: int, n_stages: int) -> None:
    if not 1 <= n_stages <= n_layers:
        raise ValueError(
            f"n_stages={n_stages} stages cannot be made of n_layers={n_layers} layers, "
            f"as each needs at least one; choose n_stages from 1 to {n_layers}"
        )


def every_layer_has_a_cost(n_layers: int, costs: Sequence[float]) -> None:
    if len(costs) != n_layers or not all(map(math.isfinite, costs)):
        raise ValueError(f"costs={list(costs)} for n_layers={n_layers} layers; give a finite number for each layer")


# pipeline


def rank_for(n_ranks: int, group: Group) -> int:
    """This rank's number in the group, which has to be as large as the schedule."""
    rank, world_size = rank_in(group), dist.get_world_size(group)
    if world_size != n_ranks:
        raise ValueError(f"schedule is for {n_ranks} ranks; the group has {world_size}, so build it for these")
    return rank


def has_stages(rank: int, stages: Iterable[int], modules: Sequence[Any] | Mapping[int, Any]) -> None:
    held: Container[int] = modules if isinstance(modules, Mapping) else range(len(modules))
    for stage in stages:
        if stage not in held:
            raise ValueError(f"stage_modules has no stage {stage}, which is rank {rank}'s in this schedule")


def loss_is_scalar(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.dim():
        shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"loss_fn returned {shape}; it has to return a scalar tensor, the mean over the micro-batch")


def output_can_be_passed_on(stage: int, k: int, output: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if (output.dtype, *output.shape) != (dtype, *shape):
        raise ValueError(
            f"stage {stage} returned {output.dtype} {list(output.shape)} for micro-batch {k}, and the next stage "
            f"expects {dtype} {list(shape)}; only dimension 0 may change, with the number of samples"
        )


def output_is_a_tensor(stage: int, output: Any) -> None:
    if not isinstance(output, Tensor):
        raise ValueError(f"stage {stage} returned a {type(output).__name__}; let it return a single tensor")


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
