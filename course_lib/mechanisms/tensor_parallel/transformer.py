"""A whole model, cut for tensor ranks: its layers are replaced by their parallel twins, in place.

layers of a block            cut by                     f and g
query, key, value; out       columns; rows (heads)      f once, for query, key and value together; g after out
up; down                     columns; rows              f before up, g after down
token                        vocabulary                 g
output                       vocabulary, as columns     f
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.mechanisms.groups import Group, rank_in
from course_lib.mechanisms.replicas import from_first_rank
from course_lib.mechanisms.tensor_parallel.dropout import DropoutGenerators, replace_dropout
from course_lib.mechanisms.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    enter,
    scatter_sequence,
)
from course_lib.mechanisms.tensor_parallel.placement import check_length, mark_partial, note_equal, shard_parameters
from course_lib.mechanisms.tensor_parallel.vocab import VocabParallelEmbedding, check_embedding

Model = TypeVar("Model", bound=nn.Module)


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
    note_equal(model)
    names_of_each = _names_of_each_parameter(model)
    for module, cut in _to_be_cut(model):
        cut(module, group, sequence_parallel)
    _tie(model, names_of_each)
    if sequence_parallel:
        _mark_partial_gradients(model)
    replace_dropout(model, DropoutGenerators(seed, group, sequence_parallel, next(model.parameters()).device))
    return model


def _cut_attention(attention: Any, group: Group, sequence_parallel: bool) -> None:
    _, kv_heads = _heads(attention)
    n, width = dist.get_world_size(group), attention.head_width
    head = dist.get_rank(group) * kv_heads // n
    for name in ("query", "key", "value"):
        layer = getattr(attention, name)
        if name == "query" or kv_heads % n == 0:
            setattr(attention, name, ColumnParallelLinear(layer, group, communicates=False))
        else:
            setattr(attention, name, SharedColumnLinear(layer, slice(head * width, (head + 1) * width), group))
    attention.out = RowParallelLinear(attention.out, group, sequence_parallel)
    attention.register_forward_pre_hook(lambda _, inputs: enter(inputs[0], group, sequence_parallel))


def _cut_mlp(mlp: Any, group: Group, sequence_parallel: bool) -> None:
    mlp.up = ColumnParallelLinear(mlp.up, group, sequence_parallel)
    mlp.down = RowParallelLinear(mlp.down, group, sequence_parallel)


def _cut_embedding(embedding: Any, group: Group, sequence_parallel: bool) -> None:
    embedding.token = VocabParallelEmbedding(embedding.token, group)
    if sequence_parallel:
        embedding.register_forward_hook(lambda _, inputs, output: scatter_sequence(output, group))


def _cut_head(head: Any, group: Group, sequence_parallel: bool) -> None:
    head.output = ColumnParallelLinear(head.output, group, sequence_parallel)


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
        shard_parameters(self, linear, {"weight": None, "bias": None}, group, is_partial=True)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias[self.columns]
        return F.linear(x, self.weight[self.columns], bias)


Cut = Callable[[Any, Group, bool], None]
_CUTS: dict[tuple[str, ...], Cut] = {
    ("query", "key", "value", "out"): _cut_attention,
    ("up", "down"): _cut_mlp,
    ("token",): _cut_embedding,
    ("output",): _cut_head,
}


def _to_be_cut(model: nn.Module) -> list[tuple[nn.Module, Cut]]:
    """The modules with layers of the names that are cut, still whole, and the function that cuts each."""
    found = []
    for module in model.modules():
        whole = {name for name, layer in module.named_children() if isinstance(layer, (nn.Linear, nn.Embedding))}
        found += [(module, cut) for names, cut in _CUTS.items() if whole.issuperset(names)]
    return found


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
    embeddings = [m for m in model.modules() if isinstance(getattr(m, "token", None), VocabParallelEmbedding)]
    before_the_split = {module for embedding in embeddings for module in embedding.modules()}
    for module in set(model.modules()) - before_the_split:
        mark_partial(module)


# Models that cannot be cut


def _check_model(model: nn.Module, group: Group) -> None:
    rank_in(group)
    n = dist.get_world_size(group)
    found = _to_be_cut(model)
    if not found:
        names = "; ".join(", ".join(names) for names in _CUTS)
        raise ValueError(f"model has no whole layers to cut; give a model that was not cut before, with layers {names}")
    for module, cut in found:
        if cut is _cut_attention:
            _check_heads(*_heads(module), n)
        if cut is _cut_embedding:
            check_embedding(module.get_submodule("token"))  # type: ignore[arg-type]
        for name, length in (("up", "ffn_hidden"), ("token", "vocab"), ("output", "vocab")):
            if hasattr(module, name):
                check_length(length, len(getattr(module, name).weight), n)


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
