"""Shards: tensors laid end to end in one flat tensor and cut into N parts of equal length, one for each rank.

    tensors      | a a a a a a a | b b b | c c c c c - - |       7 + 3 + 5 numbers and 2 of padding, on 4 ranks
    shards       | rank 0  | rank 1  | rank 2  | rank 3  |

A reduce-scatter sums the ranks' tensors and leaves each rank its shard of the sum, an all-gather makes the shards whole
again, and whatever works element by element, as most optimizers do, can work on a shard alone.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_HALF = (torch.float16, torch.bfloat16)


def from_first_rank(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Make all parameters and buffers those of the group's first rank, in one message for each dtype and 256 MiB."""
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    dist._broadcast_coalesced(group or dist.group.WORLD, tensors, 2**28, 0)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Layout:
    """Where tensors of these shapes lie when they are put end to end and cut into `n` shards of equal length."""

    shapes: tuple[torch.Size, ...]
    n: int

    @classmethod
    def of(cls, tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> Layout:
        return cls(tuple(tensor.shape for tensor in tensors), dist.get_world_size(group))

    @functools.cached_property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    @functools.cached_property
    def shard_size(self) -> int:
        return -(-sum(self.sizes) // self.n)

    @functools.cached_property
    def padding(self) -> int:
        return self.n * self.shard_size - sum(self.sizes)

    def join(self, tensors: Iterable[Tensor | None], like: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy tensors of these shapes into one flat tensor [n x shard_size], `out` if given.

        None stands for zeros in the dtype of `like`, and so does the padding.
        """
        pairs = zip(tensors, self.sizes, strict=True)
        pieces = [like.new_zeros(size) if tensor is None else tensor.reshape(-1) for tensor, size in pairs]
        return torch.cat([*pieces, like.new_zeros(self.padding)], out=out)

    def split(self, flat: Tensor) -> list[Tensor]:
        """The tensors again, as views of the flat one."""
        *pieces, _ = flat.split([*self.sizes, self.padding])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def shard(self, flat: Tensor, rank: int) -> Tensor:
        """The part of the flat tensor that belongs to a rank [shard_size], a view."""
        return flat[rank * self.shard_size : (rank + 1) * self.shard_size]

    def gather(self, shard: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
        """The whole tensors, from every rank's shard of them. All ranks call it."""
        flat = shard.new_empty(self.n * self.shard_size)
        dist.all_gather_single(flat, shard.contiguous(), group=group)
        return self.split(flat)


def reduce_scatter(
    flat: Tensor, group: dist.ProcessGroup | None, arrived: Tensor | None = None
) -> Callable[[], Tensor]:
    """Begin to sum a flat tensor [n x shard_size] over the group.

    arrived: room for what the others send, as large as flat; None to make some.

    Returns a function that waits for it and returns this rank's shard of the sum, in float32 if `flat` has 16 bits.
    """
    # Every rank sends each shard to its owner, who adds up: the bytes of a ring's reduce-scatter, and a sum in 32 bits,
    # in the order of the ranks. gloo's own reduce-scatter is an all-reduce that drops the rest: twice the bytes.
    arrived, dtype = torch.empty_like(flat) if arrived is None else arrived, master_dtype(flat.dtype)
    work = dist.all_to_all_single(arrived, flat, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        first, *others = arrived.chunk(dist.get_world_size(group))
        total = first.to(dtype, copy=True)
        for other in others:
            total += other
        return total

    return finish


def accumulate(shard: nn.Parameter, gradient: Tensor) -> None:
    """Add a gradient of the shard's shape to the one it has, in the shard's dtype."""
    if shard.grad is None:
        shard.grad = gradient.to(shard.dtype)
    else:
        shard.grad += gradient


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a sum or a copy to be updated is kept in: float32 for 16 bits, else the same."""
    return torch.float32 if dtype in _HALF else dtype


def gather_state(
    state: Mapping[str, Any], shard: Tensor, layout: Layout, group: dist.ProcessGroup | None
) -> list[dict[str, Any]]:
    """An optimizer's state for a shard -> its state for each of the tensors in the layout. All ranks call it."""
    states: list[dict[str, Any]] = [{} for _ in layout.shapes]
    for name, value in state.items():
        is_cut = isinstance(value, Tensor) and value.shape == shard.shape  # a count of steps, for instance, is not
        wholes = layout.gather(value.detach(), group) if is_cut else [value] * len(states)
        for state_of_one, whole in zip(states, wholes, strict=True):
            state_of_one[name] = whole.clone() if isinstance(whole, Tensor) else whole
    return states


def cut_state(states: list[dict[str, Any]], layout: Layout, rank: int) -> dict[str, Any]:
    """The reverse of `gather_state`."""
    cut = {}
    for name, value in states[0].items():
        if isinstance(value, Tensor) and value.shape == layout.shapes[0]:
            flat = layout.join([state[name] for state in states], like=value)
            cut[name] = layout.shard(flat, rank).clone()
        else:
            cut[name] = copy.deepcopy(value)
    return cut


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The method as a hook. Hooks live as long as what they hang on, and should not keep the method's owner alive."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*args)

    return hook
