"""Numbers of 8 and of 4 bits, emulated in float32: a few numbers share a scale, and what is multiplied is rounded.

    format     digits after the 1   smallest   largest   in a block    its scale
    MXFP8      3 bits (E4M3)        2^-9       448       32 numbers    a power of two, 8 bits (E8M0)
    NVFP4      1 bit (E2M1)         0.5        6         16 numbers    an E4M3 number, times a float32 for the tensor

    x      0.03   -0.41    0.09    1.70   ...      a block, whose largest number is 1.70
    x / s  0.11   -1.45    0.32    6.00   ...      s = 1.70 / 6
           0.00   -1.50    0.50    6.00   ...      rounded to E2M1: one of 0, 0.5, 1, 1.5, 2, 3, 4, 6

The lesson's page multiplies such numbers in the three matrix products of a linear layer, which add up in float32.

Rouhani et al. 2023, "Microscaling Data Formats for Deep Learning", arXiv:2310.10537; NVIDIA 2025, "Pretraining Large
Language Models with NVFP4", arXiv:2509.25149.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Element(NamedTuple):
    """A format of few bits. digits: bits after the leading one; lowest: the exponent from which on they are fewer."""

    digits: int
    lowest: int
    largest: float


E4M3, E2M1 = Element(3, -6, 448.0), Element(1, 0, 6.0)


def rounded(numbers: Tensor, element: Element, stochastic: bool = False) -> Tensor:
    """Each number rounded to the nearest of the format; stochastic: up or down, so that the mean is the number."""
    exponent = (torch.frexp(numbers).exponent - 1).clamp(min=element.lowest)
    step = torch.exp2(exponent - element.digits)
    steps = numbers / step
    steps = (steps + torch.rand_like(steps)).floor() if stochastic else steps.round()
    return (steps * step).clamp(-element.largest, element.largest)


def in_e4m3(scales: Tensor) -> Tensor:
    of_tensor = scales.max() / E4M3.largest
    return rounded(scales / of_tensor, E4M3).clamp(min=2.0**-9) * of_tensor


class Quantizer(NamedTuple):
    """How a tensor is rounded. block: how many numbers of a row share a scale; None: the whole tensor shares one."""

    element: Element
    block: int | None = None
    scales: Callable[[Tensor], Tensor] = Tensor.float

    def __call__(self, tensor: Tensor) -> Tensor:
        blocks = tensor.reshape(-1, min(self.block, tensor.shape[-1]) if self.block else tensor.numel())
        largest = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)
        scales = self.scales(largest / self.element.largest)
        return (rounded(blocks / scales, self.element) * scales).view(tensor.shape)


FP8, FP8_BLOCKS = Quantizer(E4M3), Quantizer(E4M3, 128)
MXFP8 = Quantizer(E4M3, 32, lambda scales: scales.log2().ceil().exp2())
FP4, NVFP4 = Quantizer(E2M1), Quantizer(E2M1, 16, in_e4m3)
