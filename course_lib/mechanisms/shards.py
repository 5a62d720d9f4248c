"""Shards: tensors laid end to end in one flat tensor and cut into N parts of equal length, one for each rank.

    tensors      | a a a a a a a | b b b | c c c c c - - |       7 + 3 + 5 numbers and 2 of padding, on 4 ranks
    shards       | rank 0  | rank 1  | rank 2  | rank 3  |

A reduce-scatter sums the ranks' tensors and leaves each rank its shard of the sum, an all-gather makes the shards whole
again, and whatever works element by element, as most optimizers do, can work on a shard alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms.buckets import Bucket
from course_lib.mechanisms.groups import Group


class Shards:
    """Parameters end to end, of which every rank keeps and updates a shard.

    whole: a bucket with all of them, in `dtype`; None: in their own.
    shard, pieces: this rank's part of the bucket and of each parameter, in 32 bits at least. They are views of the
        bucket, or copies if it has 16 bits or `is_apart`. Some pieces are empty; the last one includes the padding.
    local_ranges: for each parameter, the range of its elements that lie in this rank's shard.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: Group, is_apart: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        self.parameters, self.group = parameters, group
        self.rank, self.n = dist.get_rank(group), dist.get_world_size(group)
        sizes = [parameter.numel() for parameter in parameters]
        self.shard_size = -(-sum(sizes) // self.n)
        begin, end = self.rank * self.shard_size, (self.rank + 1) * self.shard_size
        self.local_ranges = [
            range(min(max(begin - start, 0), size), min(max(end - start, 0), size))
            for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)
        ]
        values = self._laid_out([parameter.detach() for parameter in parameters])
        self.whole = Bucket(parameters, values.to(dtype or values.dtype))
        self.shard = values.chunk(self.n)[self.rank].to(master_dtype(values.dtype), copy=is_apart)
        self.pieces = self._cut(self.shard)
        self._arriving: tuple[dist.Work, Tensor] | None = None

    def _laid_out(self, tensors: Sequence[Tensor]) -> Tensor:
        padding = self.n * self.shard_size - sum(tensor.numel() for tensor in tensors)
        return torch.cat([*(tensor.reshape(-1) for tensor in tensors), tensors[0].new_zeros(padding)])

    def _cut(self, shard: Tensor) -> list[Tensor]:
        lengths = [len(own) for own in self.local_ranges[:-1]]
        return list(shard.split([*lengths, len(shard) - sum(lengths)]))

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
        like = next((gradient for gradient in gradients if gradient is not None), self.whole.flat)
        pairs = zip(gradients, self.whole.views, strict=True)
        flat = self._laid_out([like.new_zeros(view.shape) if mine is None else mine for mine, view in pairs])
        counts = like.new_tensor([gradient is not None for gradient in gradients])
        # An overflow in any gradient makes all counts nan, on all ranks: infinity times zero is nan.
        counts += 0 * torch.linalg.vector_norm(flat, math.inf)
        return torch.cat([flat.view(self.n, -1), counts.expand(self.n, -1)], 1)

    def receive(self) -> list[Tensor | None]:
        """Wait for the gradients; returns this rank's piece of each mean, None where no rank had a gradient."""
        if self._arriving is None:
            return [None for _ in self.parameters]
        (work, arrived), self._arriving = self._arriving, None
        work.wait()
        total = arrived[0].to(master_dtype(arrived.dtype), copy=True)
        for other in arrived[1:]:
            total += other
        counts = total[self.shard_size :].tolist()
        mean = (total[: self.shard_size] / self.n).to(self.shard.dtype)
        if any(map(math.isnan, counts)):
            mean.fill_(math.nan)
        return [piece if count else None for piece, count in zip(self._cut(mean), counts, strict=True)]

    def all_gather(self) -> dist.Work:
        """Start to gather the bucket from the shards of all ranks."""
        flat = self.whole.flat
        return dist.all_gather_single(flat, self.shard.to(flat.dtype), group=self.group, async_op=True)

    def gather(self) -> list[Tensor]:
        """The whole parameters, in the dtype of the shards. All ranks call it."""
        flat = self.shard.new_empty(self.n * self.shard_size)
        dist.all_gather_single(flat, self.shard, group=self.group)
        return self.whole.split(flat)

    @property
    def has_master(self) -> bool:
        return self.shard.dtype != self.whole.flat.dtype

    def take_over_changes(self) -> None:
        """Set masters anew where somebody has changed the parameters, for instance by loading a state."""
        own = self.whole.flat.chunk(self.n)[self.rank]
        if self.has_master:
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
