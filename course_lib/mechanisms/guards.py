"""Guards: slips that students of this course make, and the sentence that tells each.

A mechanism calls them in one line, so that its page can be read without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

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
