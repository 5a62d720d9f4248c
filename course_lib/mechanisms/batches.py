"""Cutting a minibatch: into shares for ranks that work at the same time, into micro-batches for one after another.

    minibatch of 10     [0 1 2 3 4 5 6 7 8 9]
    split over 4        [0 1 2] [3 4 5] [6 7] [8 9]       every sample exactly once, in order

Pieces of different size count differently: the mean over the minibatch is the mean of the pieces' means, each
weighted by its number of samples.
"""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


def split(batch: Any, n: int) -> list[Any]:
    """n shares of a minibatch, one for each rank.

    batch: a tensor [samples, ...], or a tuple, list or dict of batches with the same number of samples.
    Returns n batches of the same structure, views of the original along dimension 0. Where n does not divide the
    samples, the first (samples mod n) shares hold one more than the others.

    Raises ValueError if there are fewer samples than shares, or tensors of different length.
    """
    samples = size(batch)
    if not 1 <= n <= samples:
        raise ValueError(f"{n} pieces cannot be cut from a batch of samples={samples}; choose from 1 to {samples}")
    tensors, structure = tree_flatten(batch)
    rows = zip(*(tensor.tensor_split(n) for tensor in tensors), strict=True)
    return [tree_unflatten(row, structure) for row in rows]


def micro_batches(batch: Any, m: int) -> list[Any]:
    """m micro-batches of what one rank holds, cut by the same rules and with the same errors as `split`."""
    return split(batch, m)


def size(batch: Any) -> int:
    """The number of samples in a batch. Raises ValueError if its tensors disagree."""
    lengths = {len(part) for part in tree_leaves(batch)}
    if len(lengths) != 1:
        raise ValueError(
            f"batch holds tensors of {sorted(lengths) or 'no'} samples; dimension 0 has to be the same in all of them"
        )
    return lengths.pop()
