"""Shards: tensors laid end to end in one flat tensor and cut into N parts of equal length, one for each rank.

    tensors      | a a a a a a a | b b b | c c c c c - - |       7 + 3 + 5 numbers and 2 of padding, on 4 ranks
    shards       | rank 0  | rank 1  | rank 2  | rank 3  |

A reduce-scatter sums the ranks' tensors and leaves each rank its shard of the sum, an all-gather makes the shards whole
again, and whatever works element by element, as most optimizers do, can work on a shard alone.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
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

    def pieces(self, shard: Tensor, rank: int) -> list[Tensor]:
        """A rank's shard cut into its part of each tensor, views; some are empty, and the last has the padding."""
        ends = [end - rank * self.shard_size for end in itertools.accumulate(self.sizes[:-1])]
        return list(shard.tensor_split([min(max(end, 0), self.shard_size) for end in ends]))

    def home(self, number: int) -> int:
        """The rank that has the first element of a tensor."""
        return min(sum(self.sizes[:number]) // max(1, self.shard_size), self.n - 1)

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


def join_gradients(
    layout: Layout, gradients: Iterable[Tensor | None], like: Tensor, weight: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """Gradients times a weight in one flat tensor, with -0.0 where there is none.

    Only -0.0 + -0.0 is -0.0. So where the sum over the ranks is, no rank had a gradient, and nothing else has to be
    sent for all to know.
    """
    gradients = list(gradients)
    if any(gradient is not None and gradient.layout != torch.strided for gradient in gradients):
        raise ValueError("a gradient is sparse, and shards are dense; build the nn.Embedding with sparse=False")
    flat = layout.join(gradients, like, out)
    if weight == 0:  # an empty share has a loss of 0 / 0, and 0 x nan is nan
        return flat.fill_(-0.0)
    flat.mul_(weight).add_(0.0)  # -0.0 + 0.0 is 0.0
    for gradient, view in zip(gradients, layout.split(flat), strict=True):
        if gradient is None:
            view.fill_(-0.0)
    return flat


def accumulate(pieces: Iterable[nn.Parameter], sums: Iterable[Tensor], n: int) -> None:
    """Add 1 / n of the sums over n ranks to the pieces' gradients, unless no rank had one (see `join_gradients`)."""
    sums = list(sums)
    firsts = torch.stack([total[0] if len(total) else total.new_zeros(()) for total in sums])
    nobody_had_one = ((firsts == 0) & firsts.signbit()).tolist()  # a GPU is asked once, not for each piece
    for piece, total, is_missing in zip(pieces, sums, nobody_had_one, strict=True):
        if is_missing:
            continue
        mean = total.div_(n).to(piece.dtype)
        piece.grad = mean if piece.grad is None else piece.grad.add_(mean)


def take_back(parameters: Iterable[nn.Parameter], places: Iterable[Tensor]) -> None:
    """Where somebody has replaced a parameter's `.data`, copy the values to its place in the flat tensor.

    Raises RuntimeError if they do not fit there.
    """
    for parameter, place in zip(parameters, places, strict=True):
        if (parameter.dtype, parameter.shape) != (place.dtype, place.shape):
            raise RuntimeError(
                f"a parameter was replaced by {list(parameter.shape)} in {parameter.dtype}, and what is sharded is "
                f"{list(place.shape)} in {place.dtype}; convert the model first, and shard it after that"
            )
        if parameter.data_ptr() != place.data_ptr():
            place.copy_(parameter.detach())
            parameter.data = place


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a sum or a copy to be updated is kept in: float32 for 16 bits, else the same."""
    return torch.float32 if dtype in _HALF else dtype


def gather_state(
    states: Sequence[Mapping[str, Any]], pieces: Sequence[Tensor], layout: Layout, group: dist.ProcessGroup | None
) -> list[dict[str, Any]]:
    """An optimizer's states for this rank's pieces -> its states for the whole tensors. All ranks call it."""
    own = [
        # A count of steps, for instance, is not cut. What is cut is announced by its dtype, and travels below.
        {name: value.dtype if _is_cut(name, value, piece.shape) else value for name, value in state.items()}
        for state, piece in zip(states, pieces, strict=True)
    ]
    everyone: list[Any] = [None] * layout.n
    dist.all_gather_object(everyone, own, group=group)
    wholes = [dict(everyone[layout.home(number)][number]) for number in range(len(pieces))]
    cut = [item for state in wholes for item in state.items() if isinstance(item[1], torch.dtype)]
    for name, dtype in dict.fromkeys(cut):
        parts = [
            s[name] if name in s else p.new_zeros(len(p), dtype=dtype) for s, p in zip(states, pieces, strict=True)
        ]
        for state, whole in zip(wholes, layout.gather(torch.cat(parts).to(dtype), group), strict=True):
            if state.get(name) is dtype:
                state[name] = whole.clone()
    return wholes


def cut_state(states: Sequence[Mapping[str, Any]], layout: Layout, rank: int) -> list[dict[str, Any]]:
    """The reverse of `gather_state`. Any of the tensors may have no state, or another one than the others."""
    own: list[dict[str, Any]] = [
        {name: copy.deepcopy(value) for name, value in state.items() if not _is_cut(name, value, shape)}
        for state, shape in zip(states, layout.shapes, strict=True)
    ]
    for name in dict.fromkeys(name for state in states for name in state):
        values = [None if name in kept else state.get(name) for state, kept in zip(states, own, strict=True)]
        like = next((value for value in values if value is not None), None)
        if like is None:
            continue
        parts = layout.pieces(layout.shard(layout.join(values, like), rank), rank)
        for kept, value, part in zip(own, values, parts, strict=True):
            if value is not None:
                kept[name] = part.clone()
    return own


def _is_cut(name: str, value: Any, shape: torch.Size) -> bool:
    """Whether a state is one number for each element. (For a parameter of shape [] the shape alone does not tell.)"""
    return isinstance(value, Tensor) and value.shape == shape and name != "step"


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The method as a hook. Hooks live as long as what they hang on, and should not keep the method's owner alive."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*args)

    return hook
