"""Mixed precision with one ingredient left out, to see what each is for.

    left out          what happens                                                  seen with
    master weights    an update below half a weight's last digit rounds away        running_sum, share_moved, train
    32-bit sums       a sum stalls at 256 (bfloat16) or 2048 (float16) ones         running_sum
    loss scaling      gradients below 2^-25 become zero in float16                  exponents, Format, train

The first two have the same cause: the number added is too small beside the number that is there.

Micikevicius et al. 2018, "Mixed Precision Training", ICLR, sections 3.1 and 3.2, figures 2 and 3.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.classroom.runs.training import flat, gradients_of
from course_lib.mechanisms.mixed_precision import LossScaler


def running_sum(start: float, increment: float, times: int, dtype: torch.dtype) -> list[float]:
    """Add the increment to start `times` times, each sum rounded to dtype. Returns all sums, `start` first.

    start and increment are 0 and 1 for counting, a weight and its update for a weight with equal small updates.
    """
    first, step = torch.tensor(start, dtype=dtype), torch.tensor(increment, dtype=dtype)
    return [total.item() for total in accumulate([first, *[step] * times])]


def share_moved(before: Iterable[Tensor], after: Iterable[Tensor]) -> float:
    """The share of weights, 0 to 1, that have changed."""
    moved = torch.cat([(old != new).flatten() for old, new in zip(before, after, strict=True)])
    return moved.double().mean().item()


class RoundedWeights:
    """An optimizer without master weights: weights, gradients and sums all have 16 bits.

    scaler: unscales, and skips steps that overflow; unscaled gradients are rounded to 16 bits.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], optimizer_cls: Any, scaler: LossScaler | None = None, **kwargs: Any
    ) -> None:
        self.master_parameters = list(parameters)  # the model's own
        self.optimizer = optimizer_cls(self.master_parameters, **kwargs)
        self.scaler = scaler

    def step(self) -> bool:
        """Update the weights, unless a gradient overflowed; clear all gradients. Returns whether it updated."""
        is_finite = self.scaler is None or self.scaler.unscale_and_update(self.master_parameters)
        if is_finite:
            self.optimizer.step()
        self.zero_grad()
        return is_finite

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def average_into(kept: Tensor, model: nn.Module, sums: torch.dtype) -> None:
    """Set the gradient of an optimizer's flat copy of all weights to the mean over the ranks, summed in this dtype."""
    mean = flat(gradients_of(model)).to(sums)
    dist.all_reduce(mean)
    kept.grad = (mean / dist.get_world_size()).to(kept.dtype)
    model.zero_grad()


def exponents(gradients: Iterable[Tensor]) -> dict[int, float]:
    """A histogram: for each e, the share of all numbers with 2^e <= |number| < 2^(e + 1). Zeros are in no bin."""
    flat = torch.cat([gradient.detach().flatten() for gradient in gradients]).double()
    # frexp's mantissas start at a half, the usual ones at 1
    found = Counter((torch.frexp(flat[flat != 0]).exponent - 1).tolist())
    return {exponent: found[exponent] / len(flat) for exponent in sorted(found)}


class Format(NamedTuple):
    """The range of a floating-point format, in powers of two.

    Numbers up to 2^lowest become zero; larger ones round at least to the smallest number, 2^(lowest + 1). Numbers from
    2^highest on become infinite, as do some just below, within half a last digit.
    """

    name: str
    lowest: int
    highest: int

    @classmethod
    def of(cls, dtype: torch.dtype) -> Format:
        """The format of a dtype. Raises TypeError for one that is not floating-point."""
        info = torch.finfo(dtype)
        smallest = info.smallest_normal * info.eps
        return cls(str(dtype).removeprefix("torch."), round(math.log2(smallest)) - 1, math.frexp(info.max)[1])
