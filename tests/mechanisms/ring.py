"""What a ring adds up, in one process."""

from __future__ import annotations

import torch
from torch import Tensor


def contribution(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    numbers = 5 * torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return numbers.to(dtype)


def ring_sum(tensors: list[Tensor]) -> Tensor:
    """The sum, each chunk added up, and rounded at every hop, in the order in which the ring meets the ranks."""
    n = len(tensors)
    chunks = [tensor.flatten().tensor_split(n) for tensor in tensors]
    summed = []
    for c in range(n):
        total = chunks[(c + 1) % n][c]
        for step in range(2, n + 1):
            total = chunks[(c + step) % n][c] + total
        summed.append(total)
    return torch.cat(summed).view(tensors[0].shape)
