"""Shards: tensors laid end to end in one flat tensor and cut into N parts of equal length, one for each rank.

    tensors      | a a a a a a a | b b b | c c c c c - - |       7 + 3 + 5 numbers and 2 of padding, on 4 ranks
    shards       | rank 0  | rank 1  | rank 2  | rank 3  |

A reduce-scatter sums the ranks' tensors and leaves each rank its shard of the sum, an all-gather makes the shards whole
again, and whatever works element by element, as most optimizers do, can work on a shard alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms.groups import Group


class Shards:
    """Parameters end to end, of which every rank keeps and updates a shard.

    whole, views: all of them in one flat tensor, in `dtype`, and the place of each; None: in their own dtype.
    shard, pieces: this rank's part of it and of each parameter, in 32 bits at least. They are views of the whole, or
        copies if that has 16 bits or `is_apart`. Some pieces are empty; the last one includes the padding.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: Group, is_apart: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        self.parameters, self.group = parameters, group
        self.rank, self.n = dist.get_rank(group), dist.get_world_size(group)
        self._shapes = [parameter.shape for parameter in parameters]
        self._sizes = [parameter.numel() for parameter in parameters]
        values = self._laid_out([parameter.detach() for parameter in parameters])
        self.whole = values.to(dtype or values.dtype)
        self.views = self._split(self.whole)
        self.shard = values.chunk(self.n)[self.rank].to(master_dtype(values.dtype), copy=is_apart)
        self.pieces = self._cut(self.shard)
        self._arriving: tuple[dist.Work, Tensor] | None = None

    def _laid_out(self, tensors: Sequence[Tensor]) -> Tensor:
        padding = -sum(self._sizes) % self.n
        return torch.cat([*(tensor.reshape(-1) for tensor in tensors), tensors[0].new_zeros(padding)])

    def _split(self, flat: Tensor) -> list[Tensor]:
        """The places of the parameters, in their shapes."""
        places = flat[: sum(self._sizes)].split(self._sizes)
        return [place.view(shape) for place, shape in zip(places, self._shapes, strict=True)]

    def _cut(self, shard: Tensor) -> tuple[Tensor, ...]:
        """The part of each parameter in this rank's shard."""
        begin, ends = self.rank * len(shard), itertools.accumulate(self._sizes[:-1])
        return shard.tensor_split([min(max(end - begin, 0), len(shard)) for end in ends])

    # Every rank sends each shard to its owner, who adds up: the bytes of a ring's reduce-scatter, and a sum in 32 bits,
    # in the order of the ranks. gloo's own reduce-scatter is an all-reduce that drops the rest: twice the bytes.
    #
    # A message to each rank: | gradients in its shard | for each parameter, how many ranks had a gradient |

    def reduce_scatter(self, gradients: Sequence[Tensor | None]) -> None:
        """Start to average the parameters' gradients over the ranks; None stands for zeros."""
        message = self._message(gradients)
        arriving = torch.empty_like(message)
        work = dist.all_to_all_single(arriving, message, group=self.group, async_op=True)
        self._arriving = work, arriving

    def _message(self, gradients: Sequence[Tensor | None]) -> Tensor:
        like = next((gradient for gradient in gradients if gradient is not None), self.whole)
        pairs = zip(gradients, self.views, strict=True)
        flat = self._laid_out([like.new_zeros(view.shape) if own is None else own for own, view in pairs])
        counts = like.new_tensor([gradient is not None for gradient in gradients])
        # An overflow in any gradient makes all counts nan, on all ranks: infinity times zero is nan.
        counts += sum(0 * extreme for extreme in flat.aminmax())
        return torch.cat([flat.view(self.n, -1), counts.expand(self.n, -1)], 1)

    def receive(self) -> list[Tensor | None]:
        """Wait for the gradients; returns this rank's piece of each mean, None where no rank had a gradient."""
        if self._arriving is None:
            return [None for _ in self.parameters]
        (work, arrived), self._arriving = self._arriving, None
        work.wait()
        total = functools.reduce(torch.add, arrived.to(master_dtype(arrived.dtype)))
        mean, counts = (total[: len(self.shard)] / self.n).to(self.shard.dtype), total[len(self.shard) :].tolist()
        if any(map(math.isnan, counts)):
            mean.fill_(math.nan)
        return [piece if count else None for piece, count in zip(self._cut(mean), counts, strict=True)]

    def all_gather(self) -> dist.Work:
        """Start to gather the whole from the shards of all ranks."""
        return dist.all_gather_single(self.whole, self.shard.to(self.whole.dtype), group=self.group, async_op=True)

    def gather(self) -> list[Tensor]:
        """The whole parameters, in the dtype of the shards. All ranks call it."""
        flat = self.shard.new_empty(len(self.whole))
        dist.all_gather_single(flat, self.shard, group=self.group)
        return self._split(flat)

    def take_over_changes(self) -> None:
        """Set masters anew where somebody has changed the parameters, for instance by loading a state."""
        own = self.whole.chunk(self.n)[self.rank]
        if own.dtype != self.shard.dtype:
            self.shard.copy_(torch.where(own == self.shard.to(own.dtype), self.shard, own))


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of masters: float32 for 16 bits, else the same."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@torch.no_grad()
def clip_grad_norm(
    shards: Iterable[Tensor], max_norm: float, group: Group = None, counted: Iterable[Tensor] | None = None
) -> float:
    """Scale the shards' gradients so that the norm over all parameters is at most `max_norm`; returns the norm before.

    shards: `FullySharded.parameters()`, or `ShardedOptimizer.shards` after `finish()`. Every element is on one
        rank only, so the squares of all ranks add up to the square of the norm.
    counted: those of them that this rank counts, where others hold copies of the rest. None: all.
    """
    shards = list(shards)
    squares = torch.zeros((), dtype=torch.float64, device=shards[0].device)
    for shard in shards if counted is None else counted:
        if shard.grad is not None:
            squares += shard.grad.square().sum()
    dist.all_reduce(squares, group=group)
    norm = float(squares.sqrt())
    for shard in shards:
        if shard.grad is not None:
            shard.grad *= min(1.0, max_norm / (norm + 1e-6))  # as in torch.nn.utils.clip_grad_norm_
    return norm
