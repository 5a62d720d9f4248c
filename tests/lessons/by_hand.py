"""Steps that beat those of the checks, as the pages say that one can. Most of them send straight:

one shot      each rank sends all it has to all others: one latency, (n - 1) tensors
two shots     to the rank that adds up a part, and from it to all: two latencies, 2 (n - 1) / n tensors, as in a ring
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms.tensor_parallel.linear import conjugate
from course_lib.timeline import compute
from lessons.L02_data_parallelism.checks_averaging import gradients
from lessons.L06_tensor_parallelism.checks import unchanged


def straight(tensor: Tensor, group: Any = None) -> Callable[[], Tensor]:
    """Send a tensor straight to all other ranks of a group. Returns a function that waits for theirs, for the sum.

    A ring pays the latency in each of its rounds, and this once, but it sends more bytes.
    """
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
    parts = [tensor if one == rank else torch.empty_like(tensor) for one in ranks]
    turned = sorted(zip(ranks, parts, strict=True), key=lambda pair: (pair[0] - rank) % dist.get_world_size())[1:]
    works: list[Any] = [dist.isend(tensor, peer, group) for peer, _ in turned]
    works += [dist.irecv(part, peer, group) for peer, part in turned]

    def finish() -> Tensor:
        for work in works:
            work.wait()
        return torch.stack(parts).sum(0)

    return finish


def two_shots(tensor: Tensor, n_pieces: int) -> None:
    """Sum a vector over all ranks, in place: of each piece every rank adds up a part, and sends it to the others."""
    rank, n = dist.get_rank(), dist.get_world_size()
    others = [(rank + i) % n for i in range(1, n)]

    def exchange(outgoing: list[Tensor], incoming: list[Tensor]) -> list[Any]:
        triples = zip(outgoing, incoming, others, strict=True)
        return [work for one, other, peer in triples for work in (dist.isend(one, peer), dist.irecv(other, peer))]

    pieces = [piece.tensor_split(n) for piece in tensor.tensor_split(n_pieces)]
    arriving = [[torch.empty_like(parts[rank]) for _ in others] for parts in pieces]
    there = [exchange([parts[i] for i in others], into) for parts, into in zip(pieces, arriving, strict=True)]
    back: list[Any] = []
    for parts, into, works in zip(pieces, arriving, there, strict=True):
        for work in works:
            work.wait()
        parts[rank].add_(torch.stack(into).sum(0))
        back += exchange([parts[rank]] * (n - 1), [parts[i] for i in others])
    for work in back:
        work.wait()


def shots(model: nn.Sequential, loss: Tensor) -> None:
    """Send each gradient straight, but those of the first layer, behind which nothing is left to hide: in two shots."""
    sums: list[tuple[Any, Callable]] = []
    hooks = [
        one.register_post_accumulate_grad_hook(lambda one: sums.append((one, straight(one.grad))))
        for one in model[1:].parameters()
        if one.requires_grad
    ]
    loss.backward()
    for hook in hooks:
        hook.remove()
    first = gradients(model[0])
    message = torch.cat([*map(torch.flatten, first)])
    two_shots(message, max(1, len(message) // 4 // dist.get_world_size()))
    for gradient, part in zip(first, message.split([*map(Tensor.numel, first)]), strict=True):
        gradient.copy_(part.view_as(gradient))
    for one, finish in sums:
        one.grad.copy_(finish())
    for gradient in gradients(model):
        gradient /= dist.get_world_size()


@torch.no_grad()
def layer_by_layer(stage: nn.Sequential, inputs: Tensor, targets: Tensor, loss_fn: Callable, width: int) -> Any:
    """Keep nothing of a forward pass but its input: compute the input of each layer again, and add in place."""
    rank, last, total = dist.get_rank(), dist.get_world_size() - 1, inputs.new_zeros(())
    for x, target in zip(inputs.split(1), targets.split(1), strict=True):
        if rank > 0:
            dist.recv(x := inputs.new_empty(1, width), rank - 1)
        dy = stage(x)  # first y, then its gradient
        if rank < last:
            dist.send(dy, rank + 1)
            dist.recv(dy, rank + 1)
        else:
            with torch.enable_grad():
                loss = loss_fn(dy.requires_grad_(), target) / len(targets)
                dy = torch.autograd.grad(loss, dy)[0]
            total += loss
            del loss
        with compute("backward"):
            for i in reversed(range(0, len(stage), 2)):
                dy = _back_through(stage[i], stage[:i](x), dy)
        if rank > 0:
            dist.send(dy, rank - 1)
        del dy, x
    return total if rank == last else None


def _back_through(linear: Any, x: Tensor, dy: Tensor) -> Tensor:
    """Go back through tanh(linear(x)) by hand; add to the gradients of its parameters, in place; return that of x."""
    y = linear(x).tanh_()
    dy -= y.square_().mul_(dy)
    del y
    if linear.weight.requires_grad:
        for parameter in linear.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        linear.weight.grad.addmm_(dy.T, x)
        linear.bias.grad.add_(dy[0])
    return dy @ linear.weight


def with_one_f_and_g_by_hand(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    own = conjugate(x, unchanged, summed_by_hand)
    return x + conjugate(first(own) + second(own), summed_by_hand, unchanged)


def summed_by_hand(tensor: Tensor) -> Tensor:
    two_shots(total := tensor.flatten().clone(), 2)
    return total.view_as(tensor)


def all_sent(gradients: list[Any], added_on: list[Any], groups: dict[str, Any]) -> None:
    """Send everything straight: what is complete at once, partial sums first inside the node."""
    early = [one for one, axes in zip(gradients, added_on, strict=True) if one is not None and not axes]
    means = [(early, _sent(early, groups["dp"]))]
    for axis in ("tp", "pp"):
        chosen = [one for one, axes in zip(gradients, added_on, strict=True) if axis in axes]
        _take(chosen, _sent(chosen, groups[axis])())
    late = [one for one, axes in zip(gradients, added_on, strict=True) if axes]
    for ones, finish in [*means, (late, _sent(late, groups["dp"]))]:
        _take(ones, finish() / dist.get_world_size(groups["dp"]))


def _sent(gradients: list[Tensor], group: Any) -> Callable[[], Tensor]:
    return straight(torch.cat([one.flatten() for one in gradients]), group) if gradients else lambda: torch.zeros(0)


def _take(gradients: list[Tensor], flat: Tensor) -> None:
    for one, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        one.copy_(part.view_as(one))


def number_by_number(weights: list[Tensor], gradients: list[Tensor], backward: Any, steps: int, lr: float) -> None:
    """Keep nothing but the lower halves of a shard, and put together one master at a time, in the same four bytes."""
    lower = [weight.new_zeros(len(_own(weight)), dtype=torch.int16) for weight in weights]
    master = torch.zeros(1)
    low, up = master.view(torch.int16).split(1)
    for _ in range(steps):
        backward()
        for weight, gradient, kept in zip(weights, gradients, lower, strict=True):
            mine = _own(weight).view(torch.int16)
            for i in range(len(mine)):
                low.copy_(kept[i : i + 1])
                up.copy_(mine[i : i + 1])
                master.sub_(_own(gradient)[i : i + 1], alpha=lr)
                kept[i : i + 1].copy_(low)
                mine[i : i + 1].copy_(up)
        for rank, shards in enumerate(zip(*map(_shards, weights), strict=True)):
            for shard in shards:
                dist.broadcast(shard, rank)


def _shards(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.view(-1).tensor_split(dist.get_world_size())


def _own(tensor: Tensor) -> Tensor:
    return _shards(tensor)[dist.get_rank()]
