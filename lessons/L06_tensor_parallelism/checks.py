"""The checks for the exercise on tensor parallelism: every rank holds a share of a layer, and computes that share.

column_parallel(x, weight, bias)      some outputs of a linear layer, whole
row_parallel(x, weight, bias)         partial sums of all its outputs, added up
cut_heads(qkv, bias, out, heads)      a rank's shares of an attention layer
cross_entropy(logits, targets, first) loss and gradient from a share of the logits
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.classroom.checks.evidence import kind
from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.messages import most_sent, on_one_link
from course_lib.classroom.checks.part import Budget, Case, Observed, Values, normal, prepared
from course_lib.mechanisms.tensor_parallel.linear import conjugate
from course_lib.ranks import Link, Pace
from course_lib.timeline import compute

PACE = Pace(device={"forward": 0.02, "backward": 0.04}, link=Link(latency=0.002, bandwidth=1e6))
exact = partial(Exercise, pace=PACE, rounding=1e-12)  # everything is float64; mistakes are off by far more


def _random(*shapes: tuple[int, ...], seed: int) -> list[Tensor]:
    """Random tensors of these shapes, the same on all ranks."""
    return [*map(normal(seed), shapes)]


def _share(tensor: Tensor, dim: int, n: int, rank: int) -> Tensor:
    return tensor.tensor_split(n, dim)[rank].clone()


# A linear layer


def column(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x = conjugate(x, unchanged, summed)
    return F.linear(x, weight, bias)


def row(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    partial_sum = F.linear(x, weight)
    return conjugate(partial_sum, summed, unchanged) + bias


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


def summed(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def side_by_side(tensor: Tensor) -> Tensor:
    """All ranks' tensors, concatenated along the last dimension, in which their sizes may differ."""
    wide = F.pad(tensor.detach(), (0, 64 - tensor.shape[-1]), value=torch.nan)
    dist.all_gather(parts := [torch.empty_like(wide) for _ in range(dist.get_world_size())], wide)
    whole = torch.cat(parts, -1)
    return whole[..., ~whole.flatten(0, -2).isnan().any(0)]


def _linear(cut: str, n: int, samples: tuple[int, ...], inputs: int, outputs: int, new: str = "") -> Case:
    """A case with a linear layer, cut for n ranks along its "inputs" or its "outputs"."""
    text = f"{n} ranks, {' x '.join(map(str, samples))} samples, and a layer from {inputs} to {outputs}"
    return Case(text, n, partial(_linear_arguments, cut, n, samples, inputs, outputs), new)


def _linear_arguments(cut: str, n: int, samples: tuple[int, ...], inputs: int, outputs: int, rank: int) -> tuple:
    """This rank's x, weight, bias, and the gradient of its output."""
    shapes = (*samples, inputs), (outputs, inputs), (outputs,), (*samples, outputs)
    cut_along = {"outputs": (None, 0, 0, -1), "inputs": (-1, 1, None, None)}[cut]
    whole = _random(*shapes, seed=sum(map(sum, shapes)))
    pairs = zip(whole, cut_along, strict=True)
    return tuple(tensor if dim is None else _share(tensor, dim, n, rank) for tensor, dim in pairs)


def _linear_cases(cut: str, seed: int) -> list[Case]:
    uneven, batches, s = f"the ranks do not divide the {cut}", "x has a dimension more, as for batch and sequence", seed
    two = [_linear(cut, 2, (3,), 4, 4 + 2 * s), _linear(cut, 2, (3 + s,), 5, 7, uneven)]
    three = [_linear(cut, 3, (2,), 6 + 3 * s, 9), _linear(cut, 3, (2, 2 + s), 6, 6, batches)]
    return [*two, *three, _linear(cut, 3, (4,), 5 + 3 * s, 7, uneven), _linear(cut, 4, (1 + s,), 7, 5, uneven)]


def _play_linear(fn: Any, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> dict[str, Any]:
    """Run a forward and a backward pass. x comes from a layer before, weight and bias are parameters."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    with compute("forward"):
        from_before = leaves[0].clone()
    y = fn(from_before, *leaves[1:])
    with compute("backward"):
        can_go_back = isinstance(y, Tensor) and y.requires_grad and y.shape == dy.shape
    if can_go_back:
        y.backward(dy)
    return {"y": y, **{f"{name}.grad": leaf.grad for name, leaf in zip(("x", "weight", "bias"), leaves, strict=True)}}


column_parallel_cases, column_parallel_price = partial(_linear_cases, "outputs"), _linear("outputs", 4, (16,), 32, 64)
column_parallel = exact("column_parallel", column, _play_linear, column_parallel_cases, column_parallel_price)


row_parallel_cases, row_parallel_price = partial(_linear_cases, "inputs"), _linear("inputs", 4, (16,), 64, 32)
row_parallel = exact("row_parallel", row, _play_linear, row_parallel_cases, row_parallel_price)


# A block on a slow link


def one_after_the_other(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    y = conjugate(first(conjugate(x, unchanged, summed)), summed, unchanged)
    z = conjugate(second(conjugate(x, unchanged, summed)), summed, unchanged)
    return x + y + z


def with_one_f_and_g(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    own = conjugate(x, unchanged, summed)
    return x + conjugate(first(own) + second(own), summed, unchanged)


def _block(n: int, samples: int, width: int) -> Case:
    return Case(f"{n} ranks, {samples} samples of {width} numbers", n, partial(_block_arguments, samples, width))


def _block_arguments(samples: int, width: int, rank: int) -> tuple:
    x, dy = _random((samples, width), (samples, width), seed=samples)
    pairs = [(nn.Linear(width, 3 + rank), nn.Linear(3 + rank, width, bias=False)) for _ in range(2)]
    cut = [prepared(nn.Sequential(up, nn.ReLU(), down), normal(10 + rank)) for up, down in pairs]
    return x.requires_grad_(), *cut, dy


def _play_block(fn: Any, x: Tensor, first: nn.Module, second: nn.Module, dy: Tensor) -> Any:
    y = fn(x, first, second)
    read = y.detach().clone()  # what is not there yet when the function returns is no result
    y.backward(dy)
    return {"y": read, "x.grad": x.grad}


_blocks, pace = lambda seed: [_block(2, 3 + seed, 4), _block(3, 2, 5)], Pace(PACE.device, Link(0.002, 1e5))
levels = Budget("emulated milliseconds", 530, 400, with_one_f_and_g, 374)
faster_block = partial(Exercise, rounding=1e-12, budget=levels, breach=on_one_link)(
    "faster_block", one_after_the_other, _play_block, _blocks, _block(4, 64, 16), pace
)


# Attention

HEADS = "how many heads ranks have"


def heads_cut(qkv: Tensor, bias: Tensor, out: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    n, rank, hidden = dist.get_world_size(), dist.get_rank(), len(out)
    own = torch.arange(hidden).view(heads, -1).tensor_split(n)[rank].flatten()
    rows = torch.cat([own, own + hidden, own + 2 * hidden])
    return qkv[rows], bias[rows], out[:, own]


def attention(x: Tensor, shares: Sequence[Tensor], width: int) -> Tensor:
    """The partial sum of y that a rank's heads compute, before g: [batch, sequence, hidden]."""
    qkv, bias, out = shares
    query, key, value = F.linear(x, qkv, bias).unflatten(-1, (3, -1, width)).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return F.linear(mixed.transpose(1, 2).flatten(2), out)


def _heads(n: int, heads: int, width: int, new: str = "") -> Case:
    text = f"{n} ranks and {heads} heads that are {width} wide"
    return Case(text, n, partial(_heads_arguments, heads, width), new)


def _heads_arguments(heads: int, width: int, rank: int) -> tuple[Any, ...]:
    hidden = heads * width
    shapes = (2, 3, hidden), (3 * hidden, hidden), (3 * hidden,), (hidden, hidden)
    return *_random(*shapes, seed=hidden), heads


def _heads_cases(seed: int) -> list[Case]:
    several, uneven = "more than one head for a rank", "the ranks do not divide the heads"
    two = [_heads(2, 2, 5 + seed), _heads(2, 4, 4 + seed, several), _heads(2, 3 + 2 * seed, 4, uneven)]
    three = [_heads(3, 3, 4 + seed), _heads(3, 6, 4 + seed, several), _heads(3, 5, 4 + seed, uneven)]
    return [*two, *three, _heads(4, 8, 4 + seed), _heads(4, 5, 4 + seed, uneven)]


def _play_heads(fn: Any, x: Tensor, qkv: Tensor, bias: Tensor, out: Tensor, heads: int) -> dict[str, Any]:
    width, shares = len(out) // heads, fn(qkv, bias, out, heads)
    with compute("forward"):
        if not _are_heads(shares, width, len(out)):
            return {"shares": shares}
        pairs = zip(shares, (qkv, bias[:, None], out.T), strict=True)
        three = [(one.view(len(one), -1) if one is not shares[2] else one.T, whole) for one, whole in pairs]
        taken = [[*(whole == row).all(1).nonzero().flatten(), -1][0] for own, whole in three for row in own]
        y = attention(x, shares, width)
        return {"heads": torch.tensor(len(shares[1]) // 3 // width), "partial sum": y, "rows": torch.tensor(taken)}


def _are_heads(shares: Any, width: int, hidden: int) -> bool:
    """Whether these are three tensors of whole heads, with shapes that fit each other."""
    is_triple = isinstance(shares, tuple | list) and len(shares) == 3
    if not is_triple or not all(isinstance(one, Tensor) and one.dtype == torch.float64 for one in shares):
        return False
    own = shares[2].shape[-1] if shares[2].dim() else 0
    wanted = [(3 * own, hidden), (3 * own,), (hidden, own)]
    return own > 0 and own % width == 0 and [tuple(one.shape) for one in shares] == wanted


def _view_heads(observed: list[Observed]) -> list[Values]:
    """The values to compare: numbers of heads, and the sum of all outputs. Which heads a rank has is free."""
    results = ([seen.values.get(f"the result[{name}]", "") for seen in observed] for name in ("heads", "partial sum"))
    counts, partial_sums = ([one for one in values if isinstance(one, Tensor)] for values in results)
    if len(partial_sums) < len(observed):
        kinds = ["; ".join(kind(one) for k, one in seen.values.items() if "result" in k) for seen in observed]
        return [one.values | {HEADS: f"not in whole heads: {k}"} for one, k in zip(observed, kinds, strict=True)]
    of_all: Values = {HEADS: str(sorted(map(int, counts))), "the attention of all": torch.stack(partial_sums).sum(0)}
    return [{k: v for k, v in seen.values.items() if "result" not in k} | of_all for seen in observed]


def _rows_taken(observed: list[Observed]) -> str:
    """A sentence about the rows and columns that rank 0 takes, if they do not belong to the same heads."""
    taken, hidden = observed[0].values.get("the result[rows]", ""), len(observed[0].before["out"])
    if not isinstance(taken, Tensor) or taken.min() < 0:
        return ""
    rows, bias, columns = taken.split([len(taken) * 3 // 7, len(taken) * 3 // 7, len(taken) // 7])
    if torch.equal(rows, bias) and torch.equal(rows, torch.cat([columns + i * hidden for i in range(3)])):
        return ""
    begin = f"In qkv and bias, queries begin at row 0, keys at {hidden}, values at {2 * hidden}."
    rows, bias, columns = (one.tolist() for one in (rows, bias, columns))
    return f"{begin} Rank 0 takes the rows {rows} of qkv, {bias} of bias, and the columns {columns} of out."


cut = partial(exact, compared=_view_heads, rule=_rows_taken)
cut_heads = cut("cut_heads", heads_cut, _play_heads, _heads_cases, price_case=_heads(4, 8, 4))


# Loss


def entropy(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor]:
    largest = logits.amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    exponentials = logits - largest[:, None]
    place = targets - first
    rows = ((place >= 0) & (place < logits.shape[-1])).nonzero().flatten()
    total, logit = sums = logits.new_zeros(2, len(targets))
    logit[rows] = exponentials[rows, place[rows]]
    total += exponentials.exp_().sum(-1)
    dist.all_reduce(sums)
    gradient = exponentials.div_(total[:, None])
    gradient[rows, place[rows]] -= 1
    return (total.log() - logit).mean(), gradient.div_(len(targets))


def _tokens(n: int, samples: int, vocab: int, size: float = 1.0, shift: float = 0.0, new: str = "") -> Case:
    """A case of logits. size: their scale.  shift: by how much each row of logits is lower than the one before."""
    text = f"{n} ranks, {samples} targets and {vocab} tokens"
    return Case(text, n, partial(_tokens_arguments, n, samples, vocab, size, shift), new)


def _tokens_arguments(n: int, samples: int, vocab: int, size: float, shift: float, rank: int) -> tuple[Any, ...]:
    (logits,) = _random((samples, vocab), seed=samples + vocab)
    targets = torch.randint(vocab, (samples,), generator=torch.Generator().manual_seed(samples))
    first = sum(len(part) for part in torch.arange(vocab).tensor_split(n)[:rank])
    with compute("forward"):
        return _share(size * logits - shift * torch.arange(samples)[:, None], 1, n, rank), targets, first


def _tokens_cases(seed: int) -> list[Case]:
    uneven, s = "the ranks do not divide the tokens", seed
    large = "logits whose exponentials no number can hold"
    low = "targets whose logits are all far below those of others"
    small = [_tokens(2, 4 + s, 6), _tokens(2, 5 + s, 7, new=uneven), _tokens(2, 4 + s, 6, 1e3, new=large)]
    more = [_tokens(2, 4, 6 + s, 1, 2e3, low), _tokens(3, 7 + s, 8), _tokens(4, 6, 9 + s, 1e3, 2e3), _tokens(4, 1, 4)]
    return [*small, *more]


def _play_entropy(fn: Any, logits: Tensor, targets: Tensor, first: int) -> Any:
    result = fn(logits, targets, first)
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    return dict(zip(("loss", "gradient"), result, strict=True)) if is_pair else result


def _three_numbers(observed: list[Observed]) -> str:
    (_, most), allowed = most_sent(observed), 3 * len(observed[0].before["targets"])
    too_much = f"The loss is right, but a rank gives {most} numbers to the others, where {allowed} would do"
    return f"{too_much}: three a target." * (most > allowed)


price = _tokens(4, 16, 64)
cross_entropy = exact("cross_entropy", entropy, _play_entropy, _tokens_cases, price, breach=_three_numbers)
