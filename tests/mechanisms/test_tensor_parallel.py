"""Tensor parallelism, against one process that has the whole model and against DTensor's parallelize_module.

Every rank builds its model from a seed of its own, so nothing here passes without the first synchronization. Neither
two nor four ranks divide the vocabulary, and four do not divide the hidden units.

Cutting a matrix changes the order of sums: a product is added up from parts. A gradient is a sum over samples x
positions, of products that are themselves sums as long as the widest layer, and n numbers of rounding error eps make an
error of at most n eps relative to the sum of magnitudes. `close` allows that, for each step, relative to the largest
number in the tensor. Where nothing is added up, bits have to be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, parallel

from course_lib import RankFailed, data, launch, timeline
from course_lib.mechanisms import tensor_parallel
from course_lib.mechanisms.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    full_state,
    parallelize,
    placements,
    sum_partial_gradients,
    vocab_parallel_cross_entropy,
)
from course_lib.mechanisms.tensor_parallel.placement import gather, shard
from course_lib.model import GPTConfig, TinyGPT
from tests.mechanisms.training import (
    DTYPES,
    State,
    differ_by_at_most,
    equal,
    gradient_of,
    make_optimizer,
    minibatch,
    snapshot,
    train_alone,
)

pytestmark = pytest.mark.long

STEPS = 3
SAMPLES = 6
CONFIG = GPTConfig(vocab=13, layers=2, hidden=16, heads=4, ffn_hidden=50)
SUM_LENGTH = SAMPLES * CONFIG.sequence + CONFIG.ffn_width
F32, F64 = DTYPES
WAYS = {2: [(F32, "SGD"), (F64, "Adam")], 4: [(F64, "SGD"), (F32, "Adam")]}  # by the number of ranks


def build(case: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> TinyGPT:
    shape = replace(
        CONFIG,
        tied_embeddings="tied" in case,
        heads=8 if "narrow" in case else 4,
        ffn_hidden=64 if "even" in case else CONFIG.ffn_hidden,
    )
    model = TinyGPT(shape, seed, dtype)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # biases of zero would hide that they are added once for each rank
            parameter.data += torch.linspace(-0.1, 0.1, len(parameter), dtype=dtype)
        if "frozen" in case and name.endswith(("1.attention.query.weight", "1.mlp.down.bias", "2.mlp_norm.weight")):
            parameter.requires_grad_(False)
    return model


def whole(model: nn.Module, group: dist.ProcessGroup | None = None) -> State:
    """The snapshot of the model before it was cut."""
    where, state = placements(model), snapshot(model)
    for name, tensor in state.items():
        placement = where[name.removesuffix(" grad")]
        if placement.dim is not None:
            state[name] = gather(tensor, placement.dim, placement.length, group)
    return state


def close(state: State, reference: State, steps: int = STEPS) -> None:
    differ_by_at_most(state, reference, steps * SUM_LENGTH)


def alone(case: str, dtype: torch.dtype, optimizer_name: str) -> State:
    model = build(case, dtype)
    train_alone(model, optimizer_name, [minibatch(step, SAMPLES) for step in range(STEPS)])
    return snapshot(model)


def loss_of(model: nn.Module, step: int, group: dist.ProcessGroup | None = None) -> Tensor:
    inputs, targets = minibatch(step, SAMPLES)
    return vocab_parallel_cross_entropy(model(inputs), targets, CONFIG.vocab, group)


def train_cut(rank: int, case: str, dtype: torch.dtype, optimizer_name: str) -> tuple[State, State]:
    """The whole state after training, and the part of it of which every rank has a copy."""
    model = parallelize(build(case, dtype, seed=rank), sequence_parallel="sequence" in case)
    optimizer = make_optimizer(optimizer_name, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        sum_partial_gradients(model)
        optimizer.step()
    where = placements(model)
    copies = {n: t for n, t in snapshot(model).items() if not where[n.removesuffix(" grad")].is_sharded}
    return whole(model), copies


def train_with_torch(rank: int, case: str, dtype: torch.dtype, optimizer_name: str) -> State:
    from benchmarks.tensor_parallel import torch_plan  # here, as ranks import this file anew for every run

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallel.parallelize_module(build(case, dtype), mesh, torch_plan(CONFIG.layers, "sequence" in case))
    optimizer = make_optimizer(optimizer_name, model)
    for step in range(STEPS):
        inputs, targets = minibatch(step, SAMPLES)
        optimizer.zero_grad()
        with parallel.loss_parallel():
            data.answer_loss(model(inputs), targets).backward()
        optimizer.step()
    state = snapshot(model)
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


def each_way(rank: int, train: Callable[..., Any], case: str, ways: list[tuple[torch.dtype, str]]) -> list[Any]:
    return [train(rank, case, *way) for way in ways]


@pytest.mark.parametrize(
    ("n", "case"),
    [
        (2, "plain"),
        (2, "sequence"),
        (2, "tied frozen narrow sequence"),
        (4, "narrow"),
        (4, "tied frozen"),
        (4, "tied frozen narrow sequence"),
    ],
)
def test_training_is_that_of_one_process_with_the_whole_model(case: str, n: int) -> None:
    results = launch(each_way, n, (train_cut, case, WAYS[n])).results
    for way, *by_rank in zip(WAYS[n], *results, strict=True):
        trained, copies = zip(*by_rank, strict=True)
        close(trained[0], alone(case, *way))
        assert any(name.endswith("norm.weight grad") for name in copies[0])
        for rank in range(1, n):
            equal(trained[rank], trained[0])
            equal(copies[rank], copies[0])


@pytest.mark.parametrize(("case", "dtype"), [("even", F32), ("even sequence", F64)])
def test_training_is_that_of_parallelize_module(case: str, dtype: torch.dtype) -> None:
    """Which wants hidden units that divide evenly, while the vocabulary need not."""
    theirs = launch(train_with_torch, 2, (case, dtype, "Adam")).results[0]
    ours, _ = launch(train_cut, 2, (case, dtype, "Adam")).results[0]
    close(ours, theirs)


def test_two_tensor_groups_side_by_side_train_two_models() -> None:
    """As on a mesh: ranks 0 and 2 hold one model, ranks 1 and 3 another."""

    def train(rank: int) -> State:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = groups[rank % 2]
        model = parallelize(build("narrow", torch.float64, seed=rank), group, sequence_parallel=True)
        loss_of(model, 0, group).backward()
        sum_partial_gradients(model, group)
        return whole(model, group)

    states = launch(train, 4).results
    for rank, state in enumerate(states):
        model = build("narrow", torch.float64, seed=rank % 2)
        inputs, targets = minibatch(0, SAMPLES)
        data.answer_loss(model(inputs), targets).backward()
        close(state, snapshot(model), steps=1)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_stages_of_a_pipeline_can_be_cut_one_by_one(sequence_parallel: bool) -> None:
    def logits(rank: int) -> Tensor:
        model = build("plain", torch.float64)
        stages = [parallelize(model.blocks[first:last], None, sequence_parallel) for first, last in ((0, 2), (2, 4))]
        x = minibatch(0, SAMPLES)[0]
        for stage in stages:
            x = stage(x)
        return tensor_parallel.gather_from_ranks(x, -1, CONFIG.vocab)

    inputs, _ = minibatch(0, SAMPLES)
    for result in launch(logits, 2).results:
        close({"logits": result}, {"logits": build("plain", torch.float64)(inputs)})


def test_gradients_of_several_backward_passes_are_summed_over_ranks_once() -> None:
    def accumulate(rank: int) -> State:
        model = parallelize(build("narrow", torch.float64, seed=rank), sequence_parallel=True)
        for step in range(STEPS):
            loss_of(model, step).backward()
        sum_partial_gradients(model)
        return whole(model)

    model = build("narrow", torch.float64)
    for step in range(STEPS):
        inputs, targets = minibatch(step, SAMPLES)
        data.answer_loss(model(inputs), targets).backward()
    for state in launch(accumulate, 4).results:
        close(state, snapshot(model))


# What travels


def marked_step(rank: int, layers: int, case: str) -> None:
    model = parallelize(TinyGPT(replace(CONFIG, layers=layers)), sequence_parallel="sequence" in case)
    inputs, targets = minibatch(0, SAMPLES)
    with timeline.compute("forward"):
        logits = model(inputs)
    with timeline.compute("other", "loss"):
        loss = vocab_parallel_cross_entropy(logits, targets, CONFIG.vocab)
    with timeline.compute("backward"):
        loss.backward()
    with timeline.compute("other", "sum"):
        sum_partial_gradients(model)


def travels(layers: int, case: str, kind: str, name: str = "") -> list[tuple[str, int]]:
    """Name and bytes of each operation that rank 0 begins within the mark, in order."""
    spans = launch(marked_step, 2, (layers, case)).timeline.of(0)
    mark = next(span for span in spans if span.kind == kind and (not name or span.name == name))
    return [(s.name, s.bytes) for s in spans if s.kind == "transfer" and mark.start <= s.start and s.end <= mark.end]


HIDDEN_STATES = SAMPLES * CONFIG.sequence * CONFIG.hidden * 4  # bytes; on two ranks, what an all-reduce sends


@pytest.mark.parametrize("layers", [1, 3])
def test_a_block_costs_two_all_reduces_forward_and_two_backward(layers: int) -> None:
    """And the model one more each way: forward for the embedding, backward for the head."""
    for kind in ("forward", "backward"):
        assert travels(layers, "plain", kind) == [("all_reduce", HIDDEN_STATES)] * (2 * layers + 1)


def test_sequence_parallelism_sends_the_same_bytes_as_reduce_scatter_and_all_gather() -> None:
    for kind in ("forward", "backward"):
        few, many = (travels(layers, "sequence", kind) for layers in (1, 3))
        added = [("all_gather", HIDDEN_STATES // 2), ("reduce_scatter", HIDDEN_STATES // 2)] * 4
        assert sorted(many) == sorted(few + added)
        assert sum(size for _, size in added) == 2 * 2 * HIDDEN_STATES


def test_the_loss_sends_three_numbers_for_each_target_and_never_the_logits() -> None:
    number = SAMPLES * CONFIG.sequence * 4
    assert travels(1, "plain", "other", "loss") == [("all_reduce", number), ("all_reduce", 2 * number)]


def test_gradients_need_one_all_reduce_more_only_where_they_are_partial() -> None:
    assert travels(1, "plain", "other", "sum") == []
    norms, biases = 3 * 2, 2  # of the model, outside of what is cut; each as wide as the hidden states
    assert travels(1, "sequence", "other", "sum") == [("all_reduce", (norms + biases) * CONFIG.hidden * 4)]


# Layers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_column", [True, False], ids=["column", "row"])
@pytest.mark.parametrize("n", [2, 4])
def test_a_cut_linear_layer_and_its_gradients_are_those_of_the_whole_one(n: int, is_column: bool, bias: bool) -> None:
    """Seven outputs or inputs, which neither two nor four ranks divide."""
    sizes = (5, 7) if is_column else (7, 5)
    x, upstream = (torch.randn(2, 3, size, generator=torch.Generator().manual_seed(size)) for size in sizes)

    def on_a_rank(rank: int) -> State:
        torch.manual_seed(rank)
        layer = (ColumnParallelLinear if is_column else RowParallelLinear)(nn.Linear(*sizes, bias))
        own = (x if is_column else shard(x, -1)).clone().requires_grad_()
        out = layer(own)
        out.backward(shard(upstream, -1) if is_column else upstream)
        results = {"out": out.detach(), "x grad": gradient_of(own)}
        cut_one = "out" if is_column else "x grad"
        return results | {cut_one: gather(results[cut_one], -1, 7)} | whole(layer)

    torch.manual_seed(0)
    linear = nn.Linear(*sizes, bias)
    given = x.clone().requires_grad_()
    out = linear(given)
    out.backward(upstream)
    for state in launch(on_a_rank, n).results:
        close(state, {"out": out.detach(), "x grad": gradient_of(given)} | snapshot(linear))


@pytest.mark.parametrize("vocab", [2, 13, 1000])
def test_the_cut_embedding_has_the_bits_of_the_whole_one(vocab: int) -> None:
    tokens = torch.randint(vocab, (3, 9), generator=torch.Generator().manual_seed(1))

    def embed(rank: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(rank)
        layer = VocabParallelEmbedding(nn.Embedding(vocab, 4))
        out = layer(tokens)
        out.backward(torch.arange(out.numel(), dtype=torch.float32).view_as(out))
        return out.detach(), gather(gradient_of(layer.weight), 0, vocab)

    torch.manual_seed(0)
    reference = nn.Embedding(vocab, 4)
    expected = reference(tokens)
    expected.backward(torch.arange(expected.numel(), dtype=torch.float32).view_as(expected))
    for out, its_gradient in launch(embed, 2).results:
        assert torch.equal(out, expected)
        assert torch.equal(its_gradient, gradient_of(reference.weight))


def loss_and_gradient(logits: Tensor, targets: Tensor, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> State:
    logits = logits.clone().requires_grad_()
    loss = loss_fn(logits, targets)
    loss.backward()
    return {"loss": loss.detach(), "gradient": gradient_of(logits)}


@pytest.mark.parametrize(
    ("n", "dtype", "vocab", "scale"), [(2, F32, 5, 1), (2, F64, 13, 1e4), (4, F32, 13, 1e4), (4, F64, 5, 1)], ids=str
)
def test_the_loss_from_shares_is_cross_entropy_and_so_is_that_from_gathered_ones(
    n: int, dtype: torch.dtype, vocab: int, scale: float
) -> None:
    """Also where exp would overflow: 1e4 is far beyond what even float64 can take."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(3, 7, vocab, dtype=dtype, generator=generator)
    targets = torch.randint(vocab, (3, 7), generator=generator)
    targets[0, :4] = data.NO_LOSS

    def on_a_rank(rank: int, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> State:
        state = loss_and_gradient(shard(logits, -1), targets, loss_fn)
        return state | {"gradient": gather(state["gradient"], -1, vocab)}

    reference = loss_and_gradient(logits, targets, data.answer_loss)
    for loss_fn in (
        lambda x, t: vocab_parallel_cross_entropy(x, t, vocab),
        lambda x, t: data.answer_loss(tensor_parallel.gather_from_ranks(x, -1, vocab), t),
    ):
        for state in launch(on_a_rank, n, (loss_fn,)).results:
            close(state, reference)


# Shares


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gathered_shares_are_the_tensor(n: int, dim: int) -> None:
    tensor = torch.arange(5 * 7 * 6).view(5, 7, 6)
    for result in launch(lambda rank: gather(shard(tensor, dim), dim, tensor.shape[dim]), n).results:
        assert torch.equal(result, tensor)


def test_a_checkpoint_moves_between_numbers_of_ranks() -> None:
    case = "tied frozen narrow"

    def save(rank: int) -> State:
        return full_state(parallelize(build(case, seed=rank + 3)))

    def load_and_save(rank: int, state: State) -> State:
        model = build(case, seed=rank)
        model.load_state_dict(state)
        return full_state(parallelize(model, sequence_parallel=True))

    original = build(case, seed=3)
    for state in launch(save, 4).results:
        equal(state, original.state_dict())
    for n in (1, 2):
        for state in launch(load_and_save, n, (original.state_dict(),)).results:
            equal(state, original.state_dict())
    build(case).load_state_dict(state)


def test_each_rank_holds_its_share_of_the_matrices_and_of_their_gradients() -> None:
    def held(rank: int) -> tuple[int, int]:
        model = parallelize(TinyGPT(GPTConfig(vocab=64, hidden=64, heads=4)))
        where = placements(model)
        sharded = [p.numel() for name, p in model.named_parameters() if where[name].is_sharded]
        return sum(sharded), sum(p.numel() for p in model.parameters())

    whole_model = sum(p.numel() for p in TinyGPT(GPTConfig(vocab=64, hidden=64, heads=4)).parameters())
    for sharded, total in launch(held, 4).results:
        assert 4 * sharded + (total - sharded) == whole_model
        assert total < 0.27 * whole_model


@pytest.mark.parametrize("case", ["tied", "tied narrow sequence"])
def test_the_norm_of_the_gradient_counts_shares_everywhere_and_copies_once(case: str) -> None:
    def norm(rank: int) -> float:
        model = parallelize(build(case, torch.float64, seed=rank), sequence_parallel="sequence" in case)
        loss_of(model, 0).backward()
        sum_partial_gradients(model)
        where = placements(model)
        squares = torch.zeros(2, dtype=torch.float64)
        for name, parameter in model.named_parameters():
            squares[int(where[name].is_sharded)] += parameter.grad.square().sum()
        dist.all_reduce(squares[1])
        return float(squares.sum().sqrt())

    model = build(case, torch.float64)
    inputs, targets = minibatch(0, SAMPLES)
    data.answer_loss(model(inputs), targets).backward()
    expected = float(nn.utils.get_total_norm([gradient_of(p) for p in model.parameters()]))
    assert launch(norm, 4).results == pytest.approx([expected] * 4, rel=1e-12)


# Refusals


def test_ranks_that_cannot_share_the_heads_are_told_how_many_could() -> None:
    words = r"3 ranks cannot share heads=4, but one of \[1, 2, 4\] can"
    with pytest.raises(RankFailed, match=words):
        launch(lambda rank: parallelize(TinyGPT(GPTConfig())), 3)


def test_a_rank_outside_of_the_group_is_told_so() -> None:
    def on_a_rank(rank: int) -> None:
        parallelize(TinyGPT(), dist.new_group([0]))

    with pytest.raises(RankFailed, match="group does not contain rank 1"):
        launch(on_a_rank, 2)
