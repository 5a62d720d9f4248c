"""A whole model, cut for tensor ranks: its layers are replaced by their parallel twins, in place.

layers of a block            cut by                     f and g
query, key, value; out       columns; rows (heads)      f once, for query, key and value together; g after out
up; down                     columns; rows              f before up, g after down
token                        vocabulary                 g
output                       vocabulary, as columns     f
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

from course_lib.mechanisms import guards
from course_lib.mechanisms.groups import Group
from course_lib.mechanisms.replicas import from_first_rank, named_tensors
from course_lib.mechanisms.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    enter,
    scatter_sequence,
)
from course_lib.mechanisms.tensor_parallel.placement import Placement
from course_lib.mechanisms.tensor_parallel.vocab import VocabParallelEmbedding

Model = TypeVar("Model", bound=nn.Module)


def parallelize(model: Model, group: Group = None, sequence_parallel: bool = False) -> Model:
    """Turn a TinyGPT, or a stage of its blocks, into its tensor-parallel twin, in place, and return it.

    Every rank gives the whole model; the weights of the group's first rank count. The twin takes the same tokens on all
    ranks and outputs this rank's share of the logits, [batch, sequence, vocab / ranks]. Names stay as they are, what
    was tied is tied, what was frozen is frozen; make optimizers afterwards. A step is

        loss = vocab_parallel_cross_entropy(model(tokens), targets, vocab, group)
        loss.backward()
        sum_partial_gradients(model, group)
        optimizer.step()

    sequence_parallel: between the blocks, each rank has its positions of the hidden states only.

    Cut are the layers that TinyGPT's blocks are made of, known by their names: query, key, value and out; up and down;
    token; output. Heads, of queries and of keys and values, go to ranks whole and in equal numbers; hidden units and
    vocabulary need not divide evenly. A model with dropout is not supported: ranks that hold the same hidden states
    would drop different parts of them.

    Raises ValueError if the ranks cannot share the heads.
    """
    found = _to_be_cut(model)
    guards.can_share_heads([module for module, _ in found], group)
    from_first_rank(named_tensors(model).values(), group)
    whole = list(model.named_parameters(remove_duplicate=False))
    for module, cut in found:
        cut(module, group, sequence_parallel)
    _tie(model, whole)
    if sequence_parallel:
        _mark_partial_gradients(model)
    return model


def _cut_attention(attention: Any, group: Group, sequence_parallel: bool) -> None:
    for name in ("query", "key", "value"):
        setattr(attention, name, ColumnParallelLinear(getattr(attention, name), group, communicates=False))
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


Cut = Callable[[Any, Group, bool], None]
_CUTS: dict[tuple[str, ...], Cut] = {
    ("query", "key", "value", "out"): _cut_attention,
    ("up", "down"): _cut_mlp,
    ("token",): _cut_embedding,
    ("output",): _cut_head,
}


def _to_be_cut(model: nn.Module) -> list[tuple[nn.Module, Cut]]:
    """The modules with whole layers that are to be cut, and the function that cuts each."""
    found = []
    for module in model.modules():
        whole = {name for name, layer in module.named_children() if isinstance(layer, (nn.Linear, nn.Embedding))}
        found += [(module, cut) for names, cut in _CUTS.items() if whole.issuperset(names)]
    return found


def _tie(model: nn.Module, whole: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Tie parameters again: each of their names has got a shard of its own."""
    first: dict[nn.Parameter, str] = {}
    for name, parameter in whole:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, model.get_parameter(first.setdefault(parameter, name)))


def _mark_partial_gradients(model: nn.Module) -> None:
    """With sequence parallelism, whatever is not cut works on this rank's positions, except before they are split."""
    embeddings = [m for m in model.modules() if isinstance(getattr(m, "token", None), VocabParallelEmbedding)]
    before_the_split = {parameter for embedding in embeddings for parameter in embedding.parameters()}
    for parameter in set(model.parameters()) - before_the_split:
        if not hasattr(parameter, "placement"):
            parameter.placement = Placement(is_partial=True)  # type: ignore[attr-defined]
