"""Solutions that students write: right ones in many ways, and wrong ones that no single idea is behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import Tensor

from course_lib import checks
from course_lib.checks.exercise import Exercise
from course_lib.checks.tensor_parallel import column, entropy, heads_cut, row, side_by_side, summed
from course_lib.mechanisms.tensor_parallel.linear import conjugate, copy_to_ranks, sum_over_ranks


def place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


# column_parallel, right


class SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient)
        return gradient


def column_with_a_function_of_its_own(x: Any, weight: Any, bias: Any) -> Any:
    return SumGradients.apply(x) @ weight.T + bias


def column_with_conjugate(x: Any, weight: Any, bias: Any) -> Any:
    def f_backward(gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient

    x = conjugate(x, lambda x: x, f_backward)
    return torch.einsum("...i,oi->...o", x, weight) + bias


def column_with_a_hook(x: Any, weight: Any, bias: Any) -> Any:
    x = x.view_as(x)
    x.register_hook(summed)
    return F.linear(x, weight, bias)


def column_of_the_mechanism(x: Any, weight: Any, bias: Any) -> Any:
    return torch.matmul(copy_to_ranks(x), weight.T).add(bias)


def column_by_gathering(x: Any, weight: Any, bias: Any) -> Any:
    def add_up(gradient: Tensor) -> Tensor:
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient)
        return torch.stack(parts).sum(0)

    return F.linear(conjugate(x, lambda x: x, add_up), weight, bias)


# column_parallel, wrong


def column_detached(x: Any, weight: Any, bias: Any) -> Any:
    summed(x)
    return F.linear(x.detach(), weight, bias)


def column_without_bias(x: Any, weight: Any, bias: Any) -> Any:
    return column(x, weight, torch.zeros_like(bias))


def column_in_float32(x: Any, weight: Any, bias: Any) -> Any:
    return column(x, weight, bias).float()


def column_of_two_ranks(x: Any, weight: Any, bias: Any) -> Any:
    return F.linear(conjugate(x, lambda x: x, lambda g: summed(g) * 2 / dist.get_world_size()), weight, bias)


def column_reduced_to_rank_0(x: Any, weight: Any, bias: Any) -> Any:
    def f_backward(gradient: Tensor) -> Tensor:
        dist.reduce(gradient, 0)
        return gradient

    return F.linear(conjugate(x, lambda x: x, f_backward), weight, bias)


def column_returns_a_pair(x: Any, weight: Any, bias: Any) -> Any:
    y = column(x, weight, bias)
    return y, x


def column_broadcasts(x: Any, weight: Any, bias: Any) -> Any:
    def f_backward(gradient: Tensor) -> Tensor:
        dist.broadcast(gradient, 0)
        return gradient

    return F.linear(conjugate(x, lambda x: x, f_backward), weight, bias)


# row_parallel, right


class SumAddends(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, addend: Tensor) -> Tensor:
        return summed(addend)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def row_with_a_function_of_its_own(x: Any, weight: Any, bias: Any) -> Any:
    return SumAddends.apply(x @ weight.T) + bias


def row_with_conjugate(x: Any, weight: Any, bias: Any) -> Any:
    def g_forward(addend: Tensor) -> Tensor:
        total = addend.clone()
        dist.all_reduce(total)
        return total

    return bias + conjugate(torch.einsum("...i,oi->...o", x, weight), g_forward, lambda gradient: gradient)


def row_in_place(x: Any, weight: Any, bias: Any) -> Any:
    """autograd takes no notice of what happens in place to the data, which is what g wants."""
    y = F.linear(x, weight)
    dist.all_reduce(y.data)
    return y + bias


def row_in_place_with_a_warning(x: Any, weight: Any, bias: Any) -> Any:
    y = F.linear(x, weight)
    dist.all_reduce(y)
    return y + bias


def row_of_the_mechanism(x: Any, weight: Any, bias: Any) -> Any:
    return sum_over_ranks(F.linear(x, weight)) + bias


def row_by_gathering(x: Any, weight: Any, bias: Any) -> Any:
    def add_up(addend: Tensor) -> Tensor:
        parts = [torch.empty_like(addend) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, addend.contiguous())
        return torch.stack(parts).sum(0)

    return conjugate(F.linear(x, weight), add_up, lambda gradient: gradient) + bias


# row_parallel, wrong


def row_of_differentiable_all_reduce(x: Any, weight: Any, bias: Any) -> Any:
    return dist_nn.all_reduce(F.linear(x, weight)) + bias


def row_as_a_difference(x: Any, weight: Any, bias: Any) -> Any:
    """The sum, but added to what each rank has: every rank rounds in another way."""
    y = F.linear(x, weight)
    return y + (summed(y.detach()) - y.detach()) + bias


def row_detached(x: Any, weight: Any, bias: Any) -> Any:
    return summed(F.linear(x, weight).detach()) + bias


def row_without_bias(x: Any, weight: Any, bias: Any) -> Any:
    return row(x, weight, torch.zeros_like(bias))


def row_reduced_to_rank_0(x: Any, weight: Any, bias: Any) -> Any:
    y = F.linear(x, weight)
    dist.reduce(y.data, 0)
    return y + bias


def row_of_two_ranks(x: Any, weight: Any, bias: Any) -> Any:
    return row(x * (dist.get_world_size() / 2), weight, bias)


def row_takes_the_largest(x: Any, weight: Any, bias: Any) -> Any:
    y = F.linear(x, weight)
    dist.all_reduce(y.data, dist.ReduceOp.MAX)
    return y + bias


# cut_heads, right


def cut_by_index(qkv: Any, bias: Any, out: Any, heads: int) -> Any:
    return heads_cut(qkv, bias, out, heads)


def cut_by_views(qkv: Any, bias: Any, out: Any, heads: int) -> Any:
    (rank, n), width = place(), len(out) // heads
    own = slice(heads * rank // n * width, heads * (rank + 1) // n * width)
    weight = qkv.view(3, heads * width, -1)[:, own].flatten(0, 1)
    return weight, bias.view(3, -1)[:, own].flatten(), out[:, own]


def cut_in_three(qkv: Any, bias: Any, out: Any, heads: int) -> Any:
    (rank, n), width = place(), len(out) // heads

    def mine(whole: Tensor, dim: int = 0) -> Tensor:
        parts = [torch.cat(one, dim) for one in deal(list(whole.split(width, dim)), n)]
        return parts[rank]

    return [torch.cat([*map(mine, qkv.chunk(3))]), torch.cat([*map(mine, bias.chunk(3))]), mine(out, 1)]


def deal(pieces: list[Tensor], n: int) -> list[list[Tensor]]:
    """Like cards."""
    return [pieces[rank::n] for rank in range(n)]


def cut_in_a_loop(qkv: Any, bias: Any, out: Any, heads: int) -> Any:
    (rank, n), hidden = place(), len(out)
    width = hidden // heads
    rows = [
        part * hidden + head * width + i for part in range(3) for head in range(rank, heads, n) for i in range(width)
    ]
    columns = [row for row in rows if row < hidden]
    return qkv[rows].clone(), bias[rows].clone(), out[:, columns].clone()


# cut_heads, wrong


def cut_nothing_returned(qkv: Any, bias: Any, out: Any, heads: int) -> None:
    heads_cut(qkv, bias, out, heads)


def cut_without_bias(qkv: Any, bias: Any, out: Any, heads: int) -> Any:
    weight, _, own_out = heads_cut(qkv, bias, out, heads)
    return weight, own_out


def cut_without_cutting_the_bias(qkv: Any, bias: Any, out: Any, heads: int) -> Any:
    weight, _, own_out = heads_cut(qkv, bias, out, heads)
    return weight, bias, own_out


def cut_in_float32(qkv: Any, bias: Any, out: Any, heads: int) -> Any:
    return [one.float() for one in heads_cut(qkv, bias, out, heads)]


def cut_and_scaled(qkv: Any, bias: Any, out: Any, heads: int) -> Any:
    weight, own_bias, own_out = heads_cut(qkv, bias, out, heads)
    return weight, own_bias, own_out / dist.get_world_size()


def cut_in_place(qkv: Any, bias: Any, out: Any, heads: int) -> Any:
    shares = heads_cut(qkv, bias, out, heads)
    qkv.zero_()
    return shares


def cut_for_two_ranks(qkv: Any, bias: Any, out: Any, heads: int) -> Any:
    hidden = len(out)
    own = torch.arange(hidden).view(heads, -1).tensor_split(2)[dist.get_rank() % 2].flatten()
    rows = torch.cat([own, own + hidden, own + 2 * hidden])
    return qkv[rows], bias[rows], out[:, own]


def cut_with_all_left_over_on_one(qkv: Any, bias: Any, out: Any, heads: int) -> Any:
    (rank, n), hidden = place(), len(out)
    first = rank * (heads // n)
    last = first + heads // n if rank < n - 1 else heads
    own = torch.arange(hidden).view(heads, -1)[first:last].flatten()
    rows = torch.cat([own, own + hidden, own + 2 * hidden])
    return qkv[rows], bias[rows], out[:, own]


# cross_entropy, right


def loss_in_three_operations(logits: Any, targets: Any, first: int) -> Any:
    largest = logits.max(dim=1).values
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    exponentials = torch.exp(logits - largest.unsqueeze(1))
    total = exponentials.sum(1)
    dist.all_reduce(total)
    gradient, logit = exponentials / total.unsqueeze(1), torch.zeros_like(total)
    for sample, target in enumerate(targets.tolist()):
        if first <= target < first + logits.shape[1]:
            logit[sample] = logits[sample, target - first]
            gradient[sample, target - first] -= 1
    dist.all_reduce(logit)
    return (largest + total.log() - logit).mean(), gradient / len(targets)


def loss_by_logsumexp(logits: Any, targets: Any, first: int) -> Any:
    """Stable without a common largest: log-sum-exp of every rank's log-sum-exp, which are gathered."""
    own = torch.logsumexp(logits, -1)
    is_mine = (targets >= first) & (targets < first + logits.shape[1])
    rows = is_mine.nonzero().flatten()
    columns = targets[rows] - first
    logit = torch.zeros_like(own)
    logit[rows] = logits[rows, columns]
    n = dist.get_world_size()
    parts = [torch.empty(2, len(own), dtype=own.dtype) for _ in range(n)]
    dist.all_gather(parts, torch.stack([own, logit]))
    of_all = torch.stack(parts)
    total = torch.logsumexp(of_all[:, 0], 0)
    gradient = torch.exp(logits - total[:, None])
    gradient[rows, columns] -= 1
    return (total - of_all[:, 1].sum(0)).mean(), gradient / len(targets)


def loss_by_autograd(logits: Any, targets: Any, first: int) -> Any:
    leaf = logits.clone().requires_grad_()
    largest = logits.amax(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    hit = (torch.arange(logits.shape[1]) + first) == targets[:, None]
    shifted = leaf - largest[:, None]
    both = torch.stack([shifted.exp().sum(1), shifted.where(hit, 0).sum(1)])
    total, logit = sum_over_ranks(both)
    loss = (total.log() - logit).mean()
    loss.backward()
    return loss.detach(), leaf.grad


def loss_in_place(logits: Any, targets: Any, first: int) -> Any:
    largest = logits.amax(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    shifted = logits - largest[:, None]
    hit = (torch.arange(logits.shape[1]) + first) == targets[:, None]
    both = torch.empty(2, len(targets), dtype=logits.dtype)
    both[1] = (shifted * hit).sum(1)
    both[0] = shifted.exp_().sum(1)
    dist.all_reduce(both)
    shifted /= both[0][:, None]
    shifted -= hit.to(shifted.dtype)
    return (both[0].log() - both[1]).mean(), shifted.div_(len(targets))


# cross_entropy, wrong


def loss_alone(logits: Any, targets: Any, first: int) -> Any:
    is_mine = (targets >= first) & (targets < first + logits.shape[1])
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf, (targets - first).where(is_mine, 0))
    loss.backward()
    return loss.detach(), leaf.grad


def loss_as_a_number(logits: Any, targets: Any, first: int) -> Any:
    loss, gradient = entropy(logits, targets, first)
    return loss.item(), gradient


def loss_without_gradient(logits: Any, targets: Any, first: int) -> Any:
    return entropy(logits, targets, first)[0]


def loss_in_the_logits(logits: Any, targets: Any, first: int) -> Any:
    loss, gradient = entropy(logits.clone(), targets, first)
    logits.copy_(gradient)
    return loss, gradient


def loss_for_each_target(logits: Any, targets: Any, first: int) -> Any:
    loss, gradient = entropy(logits, targets, first)
    return loss.expand(len(targets)), gradient


def loss_in_base_two(logits: Any, targets: Any, first: int) -> Any:
    loss, gradient = entropy(logits, targets, first)
    return loss * 2**0.5, gradient * 2**0.5


def loss_summed_once_more(logits: Any, targets: Any, first: int) -> Any:
    loss, gradient = entropy(logits, targets, first)
    return summed(loss), gradient


def loss_from_logits_of_all(logits: Any, targets: Any, first: int) -> Any:
    """The right result, from everything, twice."""
    side_by_side(logits)
    return entropy(logits, targets, first)


RIGHT: dict[Exercise, list[Callable[..., object]]] = {
    checks.column_parallel: [
        column_with_a_function_of_its_own,
        column_with_conjugate,
        column_with_a_hook,
        column_of_the_mechanism,
        column_by_gathering,
    ],
    checks.row_parallel: [
        row_with_a_function_of_its_own,
        row_with_conjugate,
        row_in_place,
        row_in_place_with_a_warning,
        row_of_the_mechanism,
        row_by_gathering,
    ],
    checks.cut_heads: [cut_by_index, cut_by_views, cut_in_three, cut_in_a_loop],
    checks.cross_entropy: [loss_in_three_operations, loss_by_logsumexp, loss_by_autograd, loss_in_place],
}

WRONG: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.column_parallel: {
        column_detached: "nothing goes on to x",
        column_without_bias: "`the result[bias.grad]` is not even of the right type",
        column_in_float32: "`the result[y]` is not even of the right type, dtype and shape",
        column_of_two_ranks: "1.5 times too small. There are 3 ranks",
        column_reduced_to_rank_0: "Only rank 0 has what it should have",
        column_returns_a_pair: "not even of the right type",
        column_broadcasts: "not what one process would have",
    },
    checks.row_parallel: {
        row_of_differentiable_all_reduce: "added up once more on the way back",
        row_as_a_difference: "different numbers in their last digits",
        row_detached: "`the result[x.grad]` is not even of the right type",
        row_without_bias: "`the result[bias.grad]` is not even of the right type",
        row_reduced_to_rank_0: "Only rank 0 has what it should have",
        row_of_two_ranks: "not what one process would have",
        row_takes_the_largest: "not what one process would have",
    },
    checks.cut_heads: {
        cut_nothing_returned: "not even of the right type",
        cut_without_bias: "not even of the right type",
        cut_without_cutting_the_bias: "not even of the right type",
        cut_in_float32: "not even of the right type",
        cut_and_scaled: "2 times too small",
        cut_in_place: "changes `qkv`",
        cut_for_two_ranks: "not what was asked for",
        cut_with_all_left_over_on_one: "not what was asked for",
    },
    checks.cross_entropy: {
        loss_alone: "sends nothing",
        loss_as_a_number: "`the result[loss]` is not even of the right type",
        loss_without_gradient: "not even of the right type",
        loss_in_the_logits: "changes `logits`",
        loss_for_each_target: "`the result[loss]` is not even of the right type, dtype and shape",
        loss_in_base_two: "1.41 times too large",
        loss_summed_once_more: "2 times too large",
        loss_from_logits_of_all: "a rank gives",
    },
}
