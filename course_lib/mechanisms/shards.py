"""Shards: tensors laid end to end in one flat tensor and cut into N parts of equal length, one for each rank.

    tensors      | a a a a a a a | b b b | c c c c c - - |       7 + 3 + 5 numbers and 2 of padding, on 4 ranks
    shards       | rank 0  | rank 1  | rank 2  | rank 3  |

A reduce-scatter sums the ranks' tensors and leaves each rank its shard of the sum, an all-gather makes the shards whole
again, and whatever works element by element, as most optimizers do, can work on a shard alone.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.mechanisms.buckets import nobody_had_one
from course_lib.mechanisms.groups import Group


class Layout:
    """Where tensors lie when they are put end to end and cut into shards of equal length, of which this rank has one.

    ours: of each tensor the elements that lie in this rank's shard, from one to before another; the last tensor's
        include the padding.
    homes: the rank that has the first element of each tensor.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group) -> None:
        self.group, self.n, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.shapes = [parameter.shape for parameter in parameters]
        self.sizes = [parameter.numel() for parameter in parameters]
        self.shard_size = -(-sum(self.sizes) // self.n)
        self.padding = self.n * self.shard_size - sum(self.sizes)
        begin, end = self.rank * self.shard_size, (self.rank + 1) * self.shard_size
        bounds = [*itertools.accumulate(self.sizes[:-1], initial=0), self.n * self.shard_size]
        self.ours = [
            (min(max(begin, first), last) - first, min(max(end, first), last) - first)
            for first, last in itertools.pairwise(bounds)
        ]
        self.homes = [min(first // max(1, self.shard_size), self.n - 1) for first in bounds[:-1]]

    def join(self, tensors: Iterable[Tensor | None], like: Tensor) -> Tensor:
        """Copy tensors of these shapes into one flat tensor [n x shard_size].

        None stands for zeros in the dtype of `like`, and so does the padding.
        """
        pairs = zip(tensors, self.sizes, strict=True)
        pieces = [like.new_zeros(size) if tensor is None else tensor.reshape(-1) for tensor, size in pairs]
        return torch.cat([*pieces, like.new_zeros(self.padding)])

    def split(self, flat: Tensor) -> list[Tensor]:
        """The tensors again, as views of the flat one."""
        *pieces, _ = flat.split([*self.sizes, self.padding])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def shard(self, flat: Tensor) -> Tensor:
        """This rank's part of the flat tensor [shard_size], a view."""
        return flat[self.rank * self.shard_size : (self.rank + 1) * self.shard_size]

    def pieces(self, shard: Tensor) -> list[Tensor]:
        """This rank's shard cut into its part of each tensor, views; some are empty, and the last has the padding."""
        return list(shard.split([end - begin for begin, end in self.ours]))

    def piece(self, number: int, tensor: Tensor) -> Tensor:
        """This rank's part of one of the tensors, a copy."""
        begin, end = self.ours[number]
        part = tensor.reshape(-1)[begin:end]
        return F.pad(part, (0, end - begin - len(part)))

    def whole(self, number: int, parts: Iterable[Tensor]) -> Tensor:
        """One of the tensors, from the parts of it that the ranks have."""
        return torch.cat(list(parts))[: self.sizes[number]].view(self.shapes[number])

    def gather(self, shard: Tensor) -> list[Tensor]:
        """The whole tensors, from every rank's shard of them. All ranks call it."""
        flat = shard.new_empty(self.n * self.shard_size)
        dist.all_gather_single(flat, shard.contiguous(), group=self.group)
        return self.split(flat)


class Bucket:
    """Parameters that travel together, of which every rank keeps and updates a shard.

    flat, views: the whole of them, in one tensor and in their shapes.
    shard, pieces: this rank's part of all and of each. They may be part of the flat tensor, or a copy in another dtype.
    updated: what an optimizer has and what gets the gradients: the parameters, unless somebody says otherwise.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout, flat: Tensor, shard: Tensor) -> None:
        self.parameters, self.layout, self.flat, self.shard = parameters, layout, flat, shard
        self.views, self.pieces = layout.split(flat), layout.pieces(shard)
        self.updated = parameters
        self._arriving: Callable[[], Tensor] | None = None

    def send(self, gradients: Iterable[Tensor | None]) -> None:
        """Begin to average gradients of the parameters over the ranks."""
        self.receive()
        self._arriving = reduce_scatter(join_gradients(self.layout, gradients, self.flat), self.layout)

    def receive(self) -> None:
        """Wait for what was sent, if anything was, and add this rank's part of it to the gradients it has."""
        if self._arriving is not None:
            accumulate(self.updated, self.layout.pieces(self._arriving()), self.layout.n)
            self._arriving = None

    def gather(self) -> dist.Work:
        """Begin to fill the flat tensor with the shards of all ranks."""
        own = self.shard.to(self.flat.dtype)
        return dist.all_gather_single(self.flat, own, group=self.layout.group, async_op=True)


def reduce_scatter(flat: Tensor, layout: Layout) -> Callable[[], Tensor]:
    """Begin to sum a flat tensor over the ranks.

    Returns a function that waits for it and returns this rank's shard of the sum, in float32 if `flat` has 16 bits.
    """
    # Every rank sends each shard to its owner, who adds up: the bytes of a ring's reduce-scatter, and a sum in 32 bits,
    # in the order of the ranks. gloo's own reduce-scatter is an all-reduce that drops the rest: twice the bytes.
    arrived = torch.empty_like(flat)
    work = dist.all_to_all_single(arrived, flat, group=layout.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        first, *others = arrived.chunk(layout.n)
        total = first.to(master_dtype(first.dtype), copy=True)
        for other in others:
            total += other
        return total

    return finish


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a sum or a copy to be updated is kept in: float32 for 16 bits, else the same."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# Parameters that nobody has used, and those that somebody has replaced


def join_gradients(layout: Layout, gradients: Iterable[Tensor | None], like: Tensor) -> Tensor:
    """Gradients in one flat tensor, with -0.0 where there is none (see `nobody_had_one`)."""
    gradients = list(gradients)
    if any(gradient is not None and gradient.layout != torch.strided for gradient in gradients):
        raise ValueError("a gradient is sparse, and shards are dense; build the nn.Embedding with sparse=False")
    flat = layout.join(gradients, like).add_(0.0)  # -0.0 + 0.0 is 0.0
    for gradient, view in zip(gradients, layout.split(flat), strict=True):
        if gradient is None:
            view.fill_(-0.0)
    return flat


def accumulate(owners: Iterable[nn.Parameter], sums: Iterable[Tensor], n: int) -> None:
    """Add 1 / n of the sums over n ranks to the owners' gradients, unless no rank had one."""
    sums = list(sums)
    for owner, total, is_missing in zip(owners, sums, nobody_had_one(sums), strict=True):
        if is_missing:
            continue
        mean = total.div_(n).to(owner.dtype)
        owner.grad = mean if owner.grad is None else owner.grad.add_(mean)


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


def check_frozen(parameters: Iterable[Tensor], sharded: Container[Tensor], owner: str) -> None:
    """Raise RuntimeError if one that is to be trained is not among those of which ranks have a shard."""
    for parameter in parameters:
        if parameter.requires_grad and parameter not in sharded:
            raise RuntimeError(
                f"a parameter of shape {list(parameter.shape)} was frozen when {owner} was made, so no rank has a "
                f"shard of it, and now it is to be trained; set requires_grad first, and make {owner} after that"
            )


# The state of an optimizer

States = Mapping[Any, Mapping[str, Any]]  # by parameter


def gather_state(bucket: Bucket, states: States) -> dict[nn.Parameter, dict[str, Any]]:
    """What an optimizer has for `updated` -> what it would have for the whole parameters. All ranks call it."""
    own = [
        {name: value.cpu() if _is_flat(value) else value for name, value in states.get(part, {}).items()}
        for part in bucket.updated
    ]
    everyone: list[Any] = [None] * bucket.layout.n
    dist.all_gather_object(everyone, own, group=bucket.layout.group)
    wholes: dict[nn.Parameter, dict[str, Any]] = {}
    for number, parameter in enumerate(bucket.parameters):
        parts = [theirs[number] for theirs in everyone]
        wholes[parameter] = whole = dict(parts[bucket.layout.homes[number]])
        for name in [name for name, value in whole.items() if _is_flat(value)]:  # a count of steps is not cut
            joined = bucket.layout.whole(number, (part[name] for part in parts if name in part))
            whole[name] = joined.to(parameter.device, copy=True)
    return wholes


def cut_state(bucket: Bucket, states: States) -> dict[Any, dict[str, Any]]:
    """The reverse of `gather_state`. Any parameter may have no state, or another one than the others."""
    cut: dict[Any, dict[str, Any]] = {}
    for number, (parameter, part) in enumerate(zip(bucket.parameters, bucket.updated, strict=True)):
        cut[part] = copy.deepcopy(dict(states.get(parameter, {})))
        for name, value in cut[part].items():
            # For a parameter of shape [] the shape alone does not tell a count of steps.
            if isinstance(value, Tensor) and value.shape == bucket.layout.shapes[number] and name != "step":
                cut[part][name] = bucket.layout.piece(number, value).to(bucket.shard.device)
    return cut


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1
