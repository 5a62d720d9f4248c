"""Tensor parallelism: every rank holds a share of every layer, and computes a share of every matrix product.

Two linear layers with something between them that works on each hidden unit alone need one communication. The first
is cut by columns (its outputs), so a rank has some of the units, whole; the second by rows (its inputs), so what a
rank puts out is one addend of the result:

                    columns              rows
    rank 0   x --f--  A_0  -- gelu --    B_0  --g-- y        y  =  gelu(x A_0) B_0  +  gelu(x A_1) B_1
    rank 1   x --f--  A_1  -- gelu --    B_1  --g-- y

    forward    f: nothing       g: all-reduce                f and g are conjugate: each does backward
    backward   f: all-reduce    g: nothing                   what the other does forward

Attention is the same with heads for units: query, key and value are cut by columns into whole heads, out by rows.
So a transformer block costs two all-reduces forward and two backward, one each for attention and MLP.

Outside of f and g every rank does the same work on the same hidden states. Sequence parallelism cuts these too, by
position: g becomes a reduce-scatter that leaves each rank its positions of the sum, norms and dropout work on those,
and f becomes an all-gather. The bytes stay the same, as an all-reduce is a reduce-scatter and an all-gather.

    rank 0   x_0 --f--  A_0  -- gelu --  B_0  --g-- y_0      forward    f: all-gather        g: reduce-scatter
    rank 1   x_1 --f--  A_1  -- gelu --  B_1  --g-- y_1      backward   f: reduce-scatter    g: all-gather

Embedding and head are cut by vocabulary; the loss is computed from the shares of the logits.

Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (f, g);
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (sequence parallelism).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.mechanisms.replicas import from_first_rank

Group = dist.ProcessGroup | None
Model = TypeVar("Model", bound=nn.Module)
SEQUENCE = 1  # the dimension of the positions, in hidden states [batch, sequence, hidden]


# Communication that knows its gradient


class _Conjugate(torch.autograd.Function):
    """Do one thing on the way forward and another with the gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Callable, back: Callable, group: Group) -> Tensor:
        ctx.back, ctx.group = back, group
        return ahead(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradients[0], ctx.group), None, None, None


def copy_to_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Megatron's f: x, the same on all ranks, goes into a layer that is cut; its gradients are summed."""
    return _Conjugate.apply(x, _as_it_is, _all_reduce, group)


def sum_over_ranks(x: Tensor, group: Group = None) -> Tensor:
    """Megatron's g: the sum of the ranks' addends; its gradient, the same on all ranks, is that of each addend."""
    return _Conjugate.apply(x, _all_reduce, _as_it_is, group)


def gather_sequence(x: Tensor, group: Group = None) -> Tensor:
    """f with sequence parallelism: [batch, sequence / ranks, hidden] -> [batch, sequence, hidden]."""
    return _Conjugate.apply(x, _all_gather, _reduce_scatter, group)


def sum_and_scatter_sequence(x: Tensor, group: Group = None) -> Tensor:
    """g with sequence parallelism: addends [batch, sequence, hidden] -> the sum, [batch, sequence / ranks, hidden]."""
    return _Conjugate.apply(x, _reduce_scatter, _all_gather, group)


def split_sequence(x: Tensor, group: Group = None) -> Tensor:
    """This rank's positions of x, which is the same on all ranks: [batch, sequence / ranks, hidden].

    Raises ValueError if the ranks do not divide the sequence.
    """
    n, length = dist.get_world_size(group), x.shape[SEQUENCE]
    if length % n:
        raise ValueError(
            f"a sequence of {length} positions cannot be shared equally by {n} ranks; with sequence_parallel=True "
            f"give multiples of {n}, for instance {length + -length % n} by padding"
        )
    return take(x, SEQUENCE, group)


def gather_logits(logits: Tensor, vocab: int, group: Group = None) -> Tensor:
    """All logits [..., vocab] from the shares [..., vocab / ranks], on every rank, as for choosing the next token.

    Training does not need them: see `vocab_parallel_cross_entropy`.
    """
    return join(logits, -1, vocab, group)


def take(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """This rank's share of x, which is the same on all ranks, along one dimension; its gradients are gathered."""

    def gather_all(own: Tensor, group: Group) -> Tensor:
        return gather(own, dim, x.shape[dim], group)

    # A view would keep all of x in memory.
    return _Conjugate.apply(x, lambda x, group: share(x, dim, group).contiguous(), gather_all, group)


def join(x: Tensor, dim: int, length: int, group: Group = None) -> Tensor:
    """All of what the ranks have shares of, `length` long along one dimension, on every rank; `take` backwards."""

    def gather_all(own: Tensor, group: Group) -> Tensor:
        return gather(own, dim, length, group)

    return _Conjugate.apply(x, gather_all, lambda x, group: share(x, dim, group), group)


def _as_it_is(x: Tensor, group: Group) -> Tensor:
    return x


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)  # others may hold on to x
    dist.all_reduce(total, group=group)
    return total


def _all_gather(x: Tensor, group: Group) -> Tensor:
    return gather(x, SEQUENCE, x.shape[SEQUENCE] * dist.get_world_size(group), group)


def _reduce_scatter(x: Tensor, group: Group) -> Tensor:
    parts = x.chunk(dist.get_world_size(group), SEQUENCE)
    own = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    dist.reduce_scatter_single(own, torch.cat(parts), group=group)
    return own


# Shares of a tensor


def share(tensor: Tensor, dim: int, group: Group = None) -> Tensor:
    """This rank's share of a tensor along one dimension; if the ranks do not divide it, the first get one more."""
    return tensor.tensor_split(dist.get_world_size(group), dim)[dist.get_rank(group)]


def gather(tensor: Tensor, dim: int, length: int, group: Group = None) -> Tensor:
    """The whole tensor, `length` long in dimension dim, from the ranks' shares; the inverse of `share`."""
    n = dist.get_world_size(group)
    padding = list(tensor.shape)
    padding[dim] = -(-length // n) - tensor.shape[dim]  # a collective wants equal sizes
    sent = torch.cat([tensor, tensor.new_zeros(padding)], dim) if padding[dim] else tensor.contiguous()
    parts = [torch.empty_like(sent) for _ in range(n)]
    dist.all_gather(parts, sent, group=group)
    return torch.cat([part.narrow(dim, 0, len(_range(length, rank, n))) for rank, part in enumerate(parts)], dim)


def _range(length: int, rank: int, n: int) -> range:
    """What `share` gives a rank."""
    first = rank * (length // n) + min(rank, length % n)
    return range(first, first + length // n + (rank < length % n))


def _own_range(length: int, group: Group) -> range:
    return _range(length, dist.get_rank(group), dist.get_world_size(group))


@dataclass(frozen=True)
class Placement:
    """How one parameter lies on the ranks of a tensor group.

    dim: the dimension along which it is cut; None: every rank holds all of it, and all hold the same.
    length: of the whole parameter in that dimension.
    is_partial: a backward pass leaves an addend of its gradient on each rank, see `sum_partial_gradients`.
    """

    dim: int | None = None
    length: int = 0
    is_partial: bool = False

    @property
    def is_sharded(self) -> bool:
        return self.dim is not None


_PLACEMENTS = "tensor_parallel_placements"  # the attribute of a module that says it of its own parameters


def placements(model: nn.Module) -> dict[str, Placement]:
    """How each parameter lies on the ranks, by name; a tied one is there under all of its names.

    What is sharded counts on every rank in a sum over the model, such as the norm of the gradient; what is not, once.
    """
    found = {}
    for prefix, module in model.named_modules():
        own = getattr(module, _PLACEMENTS, {})
        for name, _ in module.named_parameters(recurse=False):
            found[f"{prefix}.{name}".lstrip(".")] = own.get(name, Placement())
    return found


def sum_partial_gradients(model: nn.Module, group: Group = None) -> None:
    """Make the gradients of replicated parameters whole, in place. Call it once after the last backward pass of a step.

    Some replicated parameters see only this rank's part of the work: with sequence parallelism those of norms and
    biases (their positions), and keys and values that several ranks share (their queries). One all-reduce in all;
    none where no gradient is partial.
    """
    where = placements(model)
    gradients = [p.grad for name, p in model.named_parameters() if where[name].is_partial and p.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def full_state(model: nn.Module, group: Group = None) -> dict[str, Tensor]:
    """The state_dict of the model before it was cut, on every rank: it fits any other number of ranks, also one."""
    where = placements(model)
    state = {}
    for name, tensor in model.state_dict().items():
        placement = where.get(name, Placement())  # buffers are replicated
        dim, length = placement.dim, placement.length
        state[name] = tensor.clone() if dim is None else gather(tensor, dim, length, group)
    return state


def load_full_state(model: nn.Module, state: Mapping[str, Tensor], group: Group = None) -> None:
    """Give each rank its share of a state_dict of the whole model.

    Raises RuntimeError, as load_state_dict does, for names and shapes that do not fit.
    """
    where, own = placements(model), {}
    for name, tensor in state.items():
        dim = where.get(name, Placement()).dim
        own[name] = tensor if dim is None else share(tensor, dim, group)
    model.load_state_dict(own)


# Layers, cut


class ColumnParallelLinear(nn.Module):
    """This rank's outputs of a linear layer: [..., in_features], the same on all ranks -> [..., its out_features].

    linear: the whole layer. The weights of the group's first rank count; the layer itself stays as it is.
    sequence_parallel: the input is this rank's positions [batch, sequence / ranks, in_features].
    communicates: False if the input has been through `copy_to_ranks` or `gather_sequence` already, which
        is enough once for several layers that take the same input.

    Raises ValueError for fewer outputs than ranks.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, linear: nn.Linear, group: Group = None, sequence_parallel: bool = False, communicates: bool = True
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.group, self.sequence_parallel, self.communicates = group, sequence_parallel, communicates
        _cut(self, "weight", linear.weight, 0, group)
        _cut(self, "bias", linear.bias, 0, group)

    def forward(self, x: Tensor) -> Tensor:
        if self.communicates:
            x = _enter(x, self.group, self.sequence_parallel)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer of which this rank has some inputs: [..., its in_features] -> [..., out_features], the sum.

    linear: the whole layer. The weights of the group's first rank count; the layer itself stays as it is. Every rank
        has the whole bias, which is added once, to the sum.
    sequence_parallel: the output is this rank's positions [batch, sequence / ranks, out_features].

    Raises ValueError for fewer inputs than ranks.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, group: Group = None, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.group, self.sequence_parallel = group, sequence_parallel
        _cut(self, "weight", linear.weight, 1, group)
        _copy(self, "bias", linear.bias, group, is_partial=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        total = _leave(F.linear(x, self.weight), self.group, self.sequence_parallel)
        return total if self.bias is None else total + self.bias


class VocabParallelEmbedding(nn.Module):
    """An embedding of which this rank has some tokens' rows: tokens [...] -> hidden states [..., hidden], on all ranks.

    Each rank looks up the tokens that it has and puts out zeros for the others; the sum is the embedding.

    embedding: the whole one. The weights of the group's first rank count; the embedding itself stays as it is.

    Raises ValueError for a vocabulary smaller than the number of ranks, for an embedding with padding_idx, max_norm or
    scale_grad_by_freq, and `forward` for a token outside of the vocabulary.
    """

    weight: nn.Parameter

    def __init__(self, embedding: nn.Embedding, group: Group = None) -> None:
        super().__init__()
        _check_embedding(embedding)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.group = group
        _cut(self, "weight", embedding.weight, 0, group)

    def forward(self, tokens: Tensor) -> Tensor:
        _check_vocabulary("tokens", tokens, self.num_embeddings)
        row, is_mine = _own_rows(tokens, self.num_embeddings, self.group)
        return sum_over_ranks(F.embedding(row, self.weight) * is_mine.unsqueeze(-1), self.group)


class SharedColumnLinear(nn.Module):
    """Some outputs of a linear layer that every rank has as a whole: for keys and values that ranks have to share.

    With fewer key and value heads than ranks, a head cannot belong to one rank. All ranks hold them all, and
    each computes those that its own queries ask for; the gradient on each is an addend.

    columns: which outputs this rank computes.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, columns: slice, group: Group = None) -> None:
        super().__init__()
        self.in_features, self.out_features, self.columns = linear.in_features, linear.out_features, columns
        _copy(self, "weight", linear.weight, group, is_partial=True)
        _copy(self, "bias", linear.bias, group, is_partial=True)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias[self.columns]
        return F.linear(x, self.weight[self.columns], bias)


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, vocab: int, group: Group = None, ignore_index: int = -100
) -> Tensor:
    """The mean cross-entropy, from each rank's share of the logits: what travels is three numbers per target.

    logits: this rank's share [..., vocab / ranks].  targets: tokens [...], the same on all ranks; `ignore_index` is
    left out of the mean.  vocab: size of the whole vocabulary.
    Returns what F.cross_entropy does, on every rank; computed in float32 at least.

    Raises ValueError for logits or targets that are not of this vocabulary.
    """
    if logits.shape[-1] != len(_own_range(vocab, group)) or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits {list(logits.shape)} and targets {list(targets.shape)} do not fit vocab={vocab}: on this rank, "
            f"logits have to be {[*targets.shape, len(_own_range(vocab, group))]}, its share of the vocabulary"
        )
    is_counted = targets != ignore_index
    _check_vocabulary("targets", targets[is_counted], vocab)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    logits = logits - largest.unsqueeze(-1)  # so that exp cannot overflow
    row, is_mine = _own_rows(targets, vocab, group)
    logit = logits.gather(-1, row.unsqueeze(-1)).squeeze(-1) * is_mine
    sum_of_exp, logit = sum_over_ranks(torch.stack([logits.exp().sum(-1), logit]), group)
    return (sum_of_exp.log() - logit)[is_counted].mean()


# A model, cut


def parallelize(model: Model, group: Group = None, sequence_parallel: bool = False, seed: int = 0) -> Model:
    """Turn a TinyGPT, or a stage of its blocks, into its tensor-parallel twin, in place, and return it.

    Every rank gives the whole model; the weights of the group's first rank count. The twin takes the same tokens on all
    ranks and puts out this rank's share of the logits, [batch, sequence, vocab / ranks]. Names stay as they are, what
    was tied is tied, what was frozen is frozen; make optimizers afterwards. A step is

        loss = vocab_parallel_cross_entropy(model(tokens), targets, vocab, group)
        loss.backward()
        sum_partial_gradients(model, group)
        optimizer.step()

    sequence_parallel: between the blocks, each rank has its positions of the hidden states only.
    seed: of dropout. Each nn.Dropout becomes a `Dropout`, with one mask for all ranks where they hold the same hidden
        states and a mask of its own for each where they hold shares. The same on all ranks of the group; replicas
        of the model (data parallelism) and stages of a pipeline need different ones.

    Cut are the layers that TinyGPT's blocks are made of, known by their names: query, key, value and out; up and down;
    token; output. Heads go to ranks whole and in equal numbers; hidden units and vocabulary need not divide evenly.

    Raises ValueError, before anything is changed, for a model without such layers, and if there are more ranks than
    hidden units or tokens, or if they cannot share the heads.
    """
    _check_model(model, group)
    from_first_rank(model, group)
    for parameter in model.parameters():
        setattr(parameter, _EQUAL, parameter._version)
    names_of_each = _names_of_each_parameter(model)
    for part, cut in _parts(model):
        cut(part, group, sequence_parallel)
    _tie(model, names_of_each)
    if sequence_parallel:
        _mark_partial_gradients(model)
    _replace_dropout(model, Masks(seed, group, sequence_parallel, next(model.parameters()).device))
    return model


def _cut_attention(attention: Any, group: Group, sequence_parallel: bool) -> None:
    _, kv_heads = _heads(attention)
    n, rank, width = dist.get_world_size(group), dist.get_rank(group), attention.head_width
    first_head = rank * kv_heads // n
    columns = slice(first_head * width, (first_head + 1) * width)
    for name in ("query", "key", "value"):
        layer = getattr(attention, name)
        if name == "query" or kv_heads % n == 0:
            setattr(attention, name, ColumnParallelLinear(layer, group, communicates=False))
        else:
            setattr(attention, name, SharedColumnLinear(layer, columns, group))
    attention.out = RowParallelLinear(attention.out, group, sequence_parallel)
    attention.register_forward_pre_hook(lambda _, inputs: _enter(inputs[0], group, sequence_parallel))


def _cut_mlp(mlp: Any, group: Group, sequence_parallel: bool) -> None:
    mlp.up = ColumnParallelLinear(mlp.up, group, sequence_parallel)
    mlp.down = RowParallelLinear(mlp.down, group, sequence_parallel)


def _cut_embedding(embedding: Any, group: Group, sequence_parallel: bool) -> None:
    embedding.token = VocabParallelEmbedding(embedding.token, group)
    if sequence_parallel:
        embedding.register_forward_hook(lambda _, inputs, output: split_sequence(output, group))


def _cut_head(head: Any, group: Group, sequence_parallel: bool) -> None:
    head.output = ColumnParallelLinear(head.output, group, sequence_parallel)


Cut = Callable[[Any, Group, bool], None]
_CUTS: dict[tuple[str, ...], Cut] = {
    ("query", "key", "value", "out"): _cut_attention,
    ("up", "down"): _cut_mlp,
    ("token",): _cut_embedding,
    ("output",): _cut_head,
}


def _parts(model: nn.Module) -> list[tuple[nn.Module, Cut]]:
    """The modules with layers of the names that are cut, still whole, and the function that cuts each."""

    def is_whole(layer: nn.Module | None) -> bool:
        return isinstance(layer, (nn.Linear, nn.Embedding))

    found = []
    for module in model.modules():
        layers = dict(module.named_children())
        found += [(module, cut) for names, cut in _CUTS.items() if all(is_whole(layers.get(name)) for name in names)]
    return found


def _check_model(model: nn.Module, group: Group) -> None:
    n = dist.get_world_size(group)
    if dist.get_rank(group) < 0:
        raise ValueError(f"group does not contain rank {dist.get_rank()}; only its members may call this")
    parts = _parts(model)
    if not parts:
        names = "; ".join(", ".join(names) for names in _CUTS)
        raise ValueError(f"model has no whole layers to cut; give a model that was not cut before, with layers {names}")
    for part, cut in parts:
        if cut is _cut_attention:
            _check_heads(*_heads(part), n)
        if cut is _cut_embedding:
            _check_embedding(part.get_submodule("token"))
        for name, length in (("up", "ffn_hidden"), ("token", "vocab"), ("output", "vocab")):
            if hasattr(part, name):
                _check_length(length, len(getattr(part, name).weight), n)


def _heads(attention: Any) -> tuple[int, int]:
    """Heads of queries, and of keys and values."""
    return attention.query.out_features // attention.head_width, attention.key.out_features // attention.head_width


def _check_heads(heads: int, kv_heads: int, n: int) -> None:
    def fit(ranks: int) -> bool:  # a rank's queries ask for whole groups of keys, or for a part of one
        return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)

    if not fit(n):
        works = [ranks for ranks in range(1, heads + 1) if fit(ranks)]
        raise ValueError(
            f"a group of {n} ranks cannot share heads={heads} with kv_heads={kv_heads} equally; "
            f"this model works on one of {works} ranks"
        )


def _check_embedding(embedding: Any) -> None:
    options = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False}
    for name, default in options.items():
        if getattr(embedding, name) != default:
            raise ValueError(
                f"embedding has {name}={getattr(embedding, name)}, which the cut embedding would not follow; "
                f"make it with {name}={default}"
            )


def _check_length(name: str, length: int, n: int) -> None:
    if length < n:
        raise ValueError(f"{name}={length} cannot be cut into shares for {n} ranks; use at most {length} ranks")


def _check_vocabulary(name: str, tokens: Tensor, vocab: int) -> None:
    if not tokens.numel():
        return
    least, most = (int(number) for number in tokens.aminmax())
    if least < 0 or most >= vocab:
        raise ValueError(f"{name} go from {least} to {most}; with vocab={vocab} they have to be from 0 to {vocab - 1}")


def _names_of_each_parameter(model: nn.Module) -> list[list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return list(names.values())


def _tie(model: nn.Module, names_of_each: list[list[str]]) -> None:
    """What was one parameter under several names has been cut under each of them; make it one again."""
    for first, *others in names_of_each:
        for name in others:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, model.get_parameter(first))


def _mark_partial_gradients(model: nn.Module) -> None:
    """With sequence parallelism, whatever is not cut works on this rank's positions, except before they are split."""
    embeddings = [m for m in model.modules() if any(isinstance(c, VocabParallelEmbedding) for c in m.children())]
    before_the_split = {module for embedding in embeddings for module in embedding.modules()}
    for module in set(model.modules()) - before_the_split:
        for name, _ in module.named_parameters(recurse=False):
            if name not in getattr(module, _PLACEMENTS, {}):
                _place(module, name, Placement(is_partial=True))


def _enter(x: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    return gather_sequence(x, group) if sequence_parallel else copy_to_ranks(x, group)


def _leave(x: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    return sum_and_scatter_sequence(x, group) if sequence_parallel else sum_over_ranks(x, group)


def _cut(module: nn.Module, name: str, parameter: Tensor | None, dim: int, group: Group) -> None:
    """Give the module this rank's share of the parameter."""
    if parameter is None:
        return module.register_parameter(name, None)
    length = parameter.shape[dim]
    _check_length(f"{name}.shape[{dim}]", length, dist.get_world_size(group))
    own = share(_of_first_rank(parameter, group), dim, group).clone()
    module.register_parameter(name, nn.Parameter(own, parameter.requires_grad))
    return _place(module, name, Placement(dim, length))


def _copy(module: nn.Module, name: str, parameter: Tensor | None, group: Group, is_partial: bool) -> None:
    """Give the module the whole parameter."""
    if parameter is None:
        return module.register_parameter(name, None)
    module.register_parameter(name, nn.Parameter(_of_first_rank(parameter, group), parameter.requires_grad))
    return _place(module, name, Placement(is_partial=is_partial))


_EQUAL = "tensor_parallel_version"  # the attribute of a parameter with which it was made equal on all ranks


def _of_first_rank(parameter: Tensor, group: Group) -> Tensor:
    whole = parameter.detach().clone()
    if getattr(parameter, _EQUAL, None) != parameter._version:
        dist.broadcast(whole, group=group, group_src=0)
    return whole


def _place(module: nn.Module, name: str, placement: Placement) -> None:
    setattr(module, _PLACEMENTS, getattr(module, _PLACEMENTS, {}) | {name: placement})


def _own_rows(tokens: Tensor, vocab: int, group: Group) -> tuple[Tensor, Tensor]:
    """Which of this rank's rows a token has, and whether it has one; where not, the row is any."""
    own = _own_range(vocab, group)
    return (tokens - own.start).clamp(0, len(own) - 1), (tokens >= own.start) & (tokens < own.stop)


# Dropout


class Masks:
    """Random numbers for dropout on the ranks of a tensor group.

    Where all ranks hold the same hidden states they have to drop the same numbers, or they would go on with
    different ones; where each holds a share, their masks have to differ, or distant units would be dropped together.

        between f and g                                        own
        outside                                                same
        outside, with sequence parallelism                     own
        in the embedding, before the sequence is split         same

    seed: the same on all ranks.
    """

    def __init__(self, seed: int, group: Group, sequence_parallel: bool, device: torch.device) -> None:
        self.same = _generator(f"{seed}", device)
        self.own = _generator(f"{seed} on rank {dist.get_rank(group)}", device)
        self.outside = self.own if sequence_parallel else self.same
        self.current = self.outside

    def use(self, generator: torch.Generator) -> Callable[..., None]:
        """A hook that changes over to it."""

        def change(*_: Any) -> None:
            self.current = generator

        return change


def _generator(seed: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(random.Random(seed).getrandbits(63))  # near seeds, distant numbers


class Dropout(nn.Module):
    """nn.Dropout that takes its mask from `Masks`."""

    def __init__(self, p: float, masks: Masks) -> None:
        super().__init__()
        self.p, self.masks = p, masks

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        kept = torch.empty_like(x).bernoulli_(1 - self.p, generator=self.masks.current)
        return x * kept / (1 - self.p) if self.p < 1 else x * kept


def _replace_dropout(model: nn.Module, masks: Masks) -> None:
    for module in list(model.modules()):
        layers = dict(module.named_children())
        for name, layer in layers.items():
            if isinstance(layer, nn.Dropout):
                setattr(module, name, Dropout(layer.p, masks))
            if isinstance(layer, RowParallelLinear):
                module.register_forward_pre_hook(masks.use(masks.own))
                layer.register_forward_hook(masks.use(masks.outside))
            if isinstance(layer, VocabParallelEmbedding):
                module.register_forward_pre_hook(masks.use(masks.same))
                module.register_forward_hook(masks.use(masks.outside))
