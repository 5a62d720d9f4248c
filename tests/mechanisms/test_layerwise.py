"""Layer-wise model parallelism, against one process that holds the whole model.

A stage computes what one process computes for the same layers, in the same order, and the gradient of a shared
parameter is a + b = b + a. So wherever numbers are compared here, bits have to be equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from course_lib import RankFailed, data, launch
from course_lib.mechanisms import layerwise
from course_lib.mechanisms.layerwise import LayerWise, split_layers
from course_lib.model import GPTConfig, TinyGPT
from tests.mechanisms.training import State

STEPS = 2
CONFIG = GPTConfig(layers=3, hidden=16, heads=2)


def every_split(n_layers: int, n_stages: int) -> Iterator[list[range]]:
    for cuts in itertools.combinations(range(1, n_layers), n_stages - 1):
        yield [range(first, last) for first, last in itertools.pairwise([0, *cuts, n_layers])]


@given(draws=st.data())
def test_no_other_split_has_a_cheaper_dearest_stage_nor_among_those_a_cheaper_second_one(draws: st.DataObject) -> None:
    costs = draws.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    n_stages = draws.draw(st.integers(1, len(costs)))

    def price(stages: list[range]) -> list[int]:
        return sorted((sum(costs[layer] for layer in layers) for layers in stages), reverse=True)

    chosen = split_layers(len(costs), n_stages, costs)
    assert [layer for layers in chosen for layer in layers] == list(range(len(costs)))
    assert price(chosen) == min(map(price, every_split(len(costs), n_stages)))


@given(draws=st.data())
def test_without_costs_stages_differ_by_one_layer_at_most_and_the_longer_come_first(draws: st.DataObject) -> None:
    n_layers = draws.draw(st.integers(1, 40))
    n_stages = draws.draw(st.integers(1, min(n_layers, 12)))
    lengths = [len(layers) for layers in split_layers(n_layers, n_stages)]
    assert lengths == [n_layers // n_stages + (stage < n_layers % n_stages) for stage in range(n_stages)]


def build(case: str, dtype: torch.dtype, seed: int = 0) -> TinyGPT:
    model = TinyGPT(replace(CONFIG, tied_embeddings="tied" in case), seed, dtype)
    if "frozen" in case:
        model.get_parameter("blocks.2.attention.query.weight").requires_grad_(False)
    if "frozen start" in case:
        model.blocks[:2].requires_grad_(False)
    if "same layer twice" in case:
        model.blocks[3] = model.blocks[1]
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def minibatch(step: int) -> tuple[Tensor, Tensor]:
    return data.examples([(10 + 7 * sample, 99 - step - 5 * sample) for sample in range(7 - step)])


def snapshot(model: nn.Module) -> State:
    """Parameters, and gradients where there are some, by every name they have."""
    state = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        state[name] = parameter.detach().clone()
        if parameter.grad is not None:
            state[f"{name} grad"] = parameter.grad.clone()
    return state


def train_alone(case: str, dtype: torch.dtype) -> State:
    model = build(case, dtype)
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for inputs, targets in (minibatch(step), minibatch(step + 1)):  # gradients accumulate
            data.answer_loss(model(inputs), targets).backward()
        optimizer.step()
    return snapshot(model)


def train_in_a_chain(rank: int, case: str, dtype: torch.dtype) -> State:
    chain = LayerWise(build(case, dtype, seed=rank).blocks)
    optimizer = make_optimizer(chain)
    for step in range(STEPS):
        optimizer.zero_grad()
        for inputs, targets in (minibatch(step), minibatch(step + 1)):
            output = chain(inputs)
            chain.backward(None if output is None else data.answer_loss(output, targets))
        optimizer.step()
    return snapshot(chain)


@pytest.mark.parametrize("case", ["plain", "tied", "frozen", "frozen start", "tied frozen, same layer twice"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [2, 4])
def test_training_in_a_chain_has_the_bits_of_one_process(case: str, dtype: torch.dtype, n: int) -> None:
    reference = train_alone(case, dtype)
    states = launch(train_in_a_chain, n, (case, dtype)).results
    assert set().union(*states) == set(reference)
    for name, tensor in itertools.chain.from_iterable(state.items() for state in states):
        assert torch.equal(tensor, reference[name]), name


def test_two_chains_side_by_side_talk_within_their_groups_only() -> None:
    def train(rank: int) -> State:
        groups = [dist.new_group([2, 0]), dist.new_group([1, 3])]
        chain = LayerWise(build("tied", torch.float32, seed=rank).blocks, groups[rank % 2])
        inputs, targets = minibatch(0)
        output = chain(inputs)
        chain.backward(None if output is None else data.answer_loss(output, targets))
        return snapshot(chain)

    states = launch(train, 4).results
    for seed in (0, 1):
        model = build("tied", torch.float32, seed)
        inputs, targets = minibatch(0)
        data.answer_loss(model(inputs), targets).backward()
        reference = snapshot(model)
        for name, tensor in (states[seed] | states[seed + 2]).items():
            assert torch.equal(tensor, reference[name]), name


def one_step(rank: int) -> None:
    chain = LayerWise(TinyGPT(CONFIG).blocks)
    inputs, targets = minibatch(0)
    output = chain(inputs)
    chain.backward(None if output is None else data.answer_loss(output, targets))


@pytest.mark.parametrize("n", [2, 4])
def test_only_one_rank_computes_at_any_time_down_the_chain_and_back(n: int) -> None:
    timeline = launch(one_step, n).timeline
    computing = sorted(
        (span for span in timeline.spans if span.kind in ("forward", "backward")), key=lambda span: span.start
    )
    order = [("forward", stage) for stage in range(n)] + [("backward", stage) for stage in reversed(range(n))]
    assert [(span.kind, span.stage) for span in computing] == order
    assert all(span.rank == span.stage for span in computing)
    assert all(before.end <= after.start for before, after in itertools.pairwise(computing))


def test_hidden_states_travel_right_once_and_their_gradients_left_once() -> None:
    n, samples = 4, 7
    timeline = launch(one_step, n).timeline
    size = samples * CONFIG.sequence * CONFIG.hidden * 4
    sent = {(s.rank, s.peer) for s in timeline.spans if s.name == "send" and s.kind == "transfer" and s.bytes == size}
    assert sent == {(rank, rank + step) for rank in range(n) for step in (-1, 1) if 0 <= rank + step < n}


def test_each_rank_holds_its_own_layers_and_a_shared_matrix_on_each_stage_that_uses_it() -> None:
    def held(rank: int) -> tuple[int, list[int]]:
        blocks = TinyGPT(replace(CONFIG, tied_embeddings=True)).blocks
        chain = LayerWise(blocks)
        return sum(parameter.nbytes for parameter in chain.parameters()), layerwise.stage_bytes(blocks, chain.stages)

    held_by, predicted = zip(*launch(held, 4).results, strict=True)
    assert list(held_by) == predicted[0]
    whole = sum(parameter.nbytes for parameter in TinyGPT(CONFIG).parameters())  # untied: two matrices
    assert sum(held_by) == whole
    assert max(held_by) < 0.6 * whole


def test_without_gradients_the_chain_only_computes() -> None:
    def logits(rank: int) -> Tensor | None:
        chain = LayerWise(build("plain", torch.float32, seed=rank).blocks)
        with torch.no_grad():
            return chain(minibatch(0)[0])

    first, last = launch(logits, 2).results
    assert first is None
    assert torch.equal(last, build("plain", torch.float32)(minibatch(0)[0]))


def validated_in_between(inputs: Tensor, targets: Tensor, forward: Callable[[Tensor], Any]) -> Any:
    """A loss on the last rank, where `forward` gives an output."""
    output = forward(inputs)
    forward(minibatch(5)[0])
    return None if output is None else data.answer_loss(output, targets)


def sum_of_two_losses(inputs: Tensor, targets: Tensor, forward: Callable[[Tensor], Any]) -> Any:
    first, second = forward(inputs), forward(minibatch(5)[0])
    return None if first is None else data.answer_loss(first, targets) + second.logsumexp(-1).mean()


@pytest.mark.parametrize("loss_of", [validated_in_between, sum_of_two_losses])
@pytest.mark.parametrize("case", ["plain", "tied"])
def test_a_backward_pass_goes_back_through_all_forward_passes_since_the_last_one(case: str, loss_of: Any) -> None:
    def train(rank: int) -> State:
        chain = LayerWise(build(case, torch.float64, seed=rank).blocks)
        for step in range(STEPS):
            chain.backward(loss_of(*minibatch(step), chain))
        return snapshot(chain)

    model = build(case, torch.float64)
    for step in range(STEPS):
        loss_of(*minibatch(step), model).backward()
    reference, states = snapshot(model), launch(train, 4).results
    for name, tensor in itertools.chain.from_iterable(state.items() for state in states):
        # One process adds up both passes before it adds them to the gradient: n products, n roundings in another order.
        n = 2 * STEPS * 7 * CONFIG.sequence * CONFIG.ffn_width
        allowed = n * torch.finfo(torch.float64).eps * max(1, float(reference[name].abs().max()))
        assert float((tensor - reference[name]).abs().max()) <= allowed, name


def test_a_loss_on_another_rank_than_the_last_is_named() -> None:
    def on_a_rank(rank: int) -> None:
        chain = LayerWise(TinyGPT(CONFIG).blocks)
        chain(minibatch(0)[0])
        chain.backward(torch.ones(()))

    with pytest.raises(RankFailed, match="loss=a tensor on rank 0 of 2; the last one gives the loss"):
        launch(on_a_rank, 2)


def test_more_ranks_than_layers_are_refused_with_what_would_work() -> None:
    def on_a_rank(rank: int) -> Any:
        LayerWise(TinyGPT(GPTConfig(layers=1)).blocks)

    with pytest.raises(RankFailed, match=r"n_stages=4 .*n_layers=3; choose n_stages from 1 to 3"):
        launch(on_a_rank, 4)
