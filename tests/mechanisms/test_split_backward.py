"""The two halves of a backward pass, against the whole one of torch.autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.mechanisms.split_backward import accumulators, input_gradient
from course_lib.model import GPTConfig, TinyGPT


class Reused(nn.Module):
    """One layer in two places, one weight twice in one place, and one cut into parts that go separate ways."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.packed = nn.Linear(6, 6), nn.Linear(6, 12)
        self.scale = nn.Parameter(torch.full((6,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        left, right = F.linear(x, self.packed.weight[:6]), F.linear(x, self.packed.weight[6:])
        return self.shared(torch.tanh(self.shared(left))) * self.scale * self.scale + right


def same(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return torch.equal(found, expected)


def frozen_in_part() -> nn.Module:
    stage = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 6))
    stage.get_parameter("0.weight").requires_grad_(False)
    stage.get_parameter("3.bias").requires_grad_(False)
    return stage


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)


BUILD: list[Callable[[], nn.Module]] = [
    lambda: TinyGPT(GPTConfig(hidden=6, heads=2)).blocks[1:3],
    lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)),
    Reused,
    frozen_in_part,
    attention,
    nn.Identity,
]
NAMES = ["gpt", "linear", "reused", "frozen", "attention", "empty"]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("build", BUILD, ids=NAMES)
def test_both_halves_add_up_to_the_whole_bit_for_bit(
    build: Callable[[], nn.Module], dtype: torch.dtype, times: int
) -> None:
    torch.manual_seed(0)
    module = build().to(dtype)
    x = torch.randn(5, 4, 6, dtype=dtype, requires_grad=True)
    whole, halves = [], []
    for _ in range(times):
        y = module(x)
        gradient = torch.randn(y.shape, dtype=dtype)
        torch.autograd.backward(y, gradient)
        whole.append(gradient)
    expected = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    expected_inputs, x.grad = x.grad, None
    module.zero_grad()
    leaves = accumulators(module.parameters())
    for gradient in whole:
        found, weights = input_gradient(module(x), gradient, x, leaves)
        halves.append(found)
        weights.accumulate()
    for parameter, reference in zip(module.parameters(), expected, strict=True):
        assert same(parameter.grad, reference)
    there = [half for half in halves if half is not None]
    assert same(torch.stack(there).sum(0) if there else None, expected_inputs)


def test_the_first_half_leaves_the_weights_alone_and_the_second_one_the_inputs() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    x = torch.randn(5, 6, requires_grad=True)
    y = module(x)
    found, weights = input_gradient(y, torch.ones_like(y), x, accumulators(module.parameters()))
    assert found is not None
    assert found.shape == x.shape
    assert [parameter.grad for parameter in module.parameters()] == [None] * 4
    weights.accumulate()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert x.grad is None


@pytest.mark.parametrize("half", ["first", "second"])
def test_each_half_does_its_products_and_not_the_other_s(half: str) -> None:
    """Three layers, so three products of the size of a weight gradient and three for the gradients of the inputs."""
    module = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))
    x = torch.randn(5, 6, requires_grad=True)
    y = module(x)
    with torch.profiler.profile() as first:
        _, weights = input_gradient(y, torch.ones_like(y), x, accumulators(module.parameters()))
    with torch.profiler.profile() as second:
        weights.accumulate()
    profile = first if half == "first" else second
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::mm") == 3


def test_the_first_stage_of_a_pipeline_has_halves_too() -> None:
    """Without an input to be differentiated, the gradients still travel down to where the first weights join."""
    model = TinyGPT(GPTConfig(hidden=6, heads=2, layers=1))
    stage, tokens = model.blocks[:2], torch.arange(8)[None]
    y = stage(tokens)
    found, weights = input_gradient(y, torch.ones_like(y), tokens, accumulators(stage.parameters()))
    assert found is None
    assert [parameter.grad for parameter in stage.parameters() if parameter.grad is not None] == []
    weights.accumulate()
    halves = [parameter.grad.clone() for parameter in stage.parameters()]
    stage.zero_grad()
    stage(tokens).backward(torch.ones_like(y))
    for parameter, half in zip(stage.parameters(), halves, strict=True):
        assert same(parameter.grad, half)


def test_an_input_without_use_has_no_gradient() -> None:
    module, unused = nn.Linear(6, 6), torch.randn(5, 6, requires_grad=True)
    y = module(torch.ones(5, 6))
    found, weights = input_gradient(y, torch.ones_like(y), unused, accumulators(module.parameters()))
    weights.accumulate()
    assert found is None
    assert module.bias.grad.tolist() == [5.0] * 6


def test_a_module_without_anything_to_train_has_nothing_left_to_do() -> None:
    module, x = nn.Linear(6, 6).requires_grad_(False), torch.ones(5, 6)
    y = module(x)
    found, weights = input_gradient(y, torch.ones_like(y), x, accumulators(module.parameters()))
    assert (found, weights.steps) == (None, [])
