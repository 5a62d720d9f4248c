"""The two halves of a backward pass, against the whole one of torch.autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.mechanisms.split_backward import WeightGradients
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


def halves(module: nn.Module, x: Tensor) -> tuple[Tensor, WeightGradients]:
    with WeightGradients() as later:
        return module(x), later


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("build", BUILD, ids=NAMES)
def test_both_halves_add_up_to_the_whole_bit_for_bit(
    build: Callable[[], nn.Module], dtype: torch.dtype, times: int
) -> None:
    """But a layer that is used twice adds its numbers in another order: four roundings, relative to the largest one."""
    torch.manual_seed(0)
    module = build().to(dtype)
    x = torch.randn(5, 4, 6, dtype=dtype, requires_grad=True)
    gradients = [torch.randn(module(x).shape, dtype=dtype) for _ in range(times)]
    for gradient in gradients:
        module(x).backward(gradient)
    expected = [p.grad if p.grad is None else p.grad.clone() for p in (x, *module.parameters())]
    x.grad = None
    module.zero_grad()
    for gradient in gradients:
        y, later = halves(module, x)
        y.backward(gradient)
        later.accumulate()
    n_roundings = 4 if build is Reused and times > 1 else 0
    for tensor, reference in zip((x, *module.parameters()), expected, strict=True):
        if not same(tensor.grad, reference):
            assert tensor.grad is not None
            assert reference is not None
            allowed = n_roundings * torch.finfo(dtype).eps * float(reference.abs().max())
            assert float((tensor.grad - reference).abs().max()) <= allowed


def test_the_first_half_leaves_the_weights_alone_and_the_second_one_the_inputs() -> None:
    module = nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 6, bias=False))
    x = torch.randn(5, 6, requires_grad=True)
    y, later = halves(module, x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert [parameter.grad for parameter in module.parameters()] == [None] * 2
    x.grad = None
    later.accumulate()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert x.grad is None


@pytest.mark.parametrize("half", ["first", "second"])
def test_each_half_does_its_products_and_not_the_other_s(half: str) -> None:
    """Three layers, so three products of the size of a weight gradient and three for the gradients of the inputs."""
    module = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))
    y, later = halves(module, torch.randn(5, 6, requires_grad=True))
    with torch.profiler.profile() as first:
        y.backward(torch.ones_like(y))
    with torch.profiler.profile() as second:
        later.accumulate()
    profile = first if half == "first" else second
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::mm") == 3


def test_the_first_stage_of_a_pipeline_has_halves_too() -> None:
    """Its input is not differentiated, and the weights of its linear layers wait nevertheless."""
    stage, tokens = TinyGPT(GPTConfig(hidden=6, heads=2, layers=1)).blocks[:2], torch.arange(8)[None]
    y, later = halves(stage, tokens)
    y.backward(torch.ones_like(y))
    weights = {layer.weight for layer in stage.modules() if isinstance(layer, nn.Linear)}
    assert {p for p in stage.parameters() if p.grad is None} == weights
    later.accumulate()
    found = [parameter.grad.clone() for parameter in stage.parameters()]
    stage.zero_grad()
    stage(tokens).backward(torch.ones_like(y))
    for parameter, half in zip(stage.parameters(), found, strict=True):
        assert same(parameter.grad, half)


def test_a_sample_may_come_without_a_batch() -> None:
    layer, x = nn.Linear(3, 2), torch.ones(3)
    y, later = halves(layer, x)
    y.sum().backward()
    later.accumulate()
    assert layer.weight.grad.tolist() == [[1.0] * 3] * 2
    assert layer.bias.grad.tolist() == [1.0] * 2


def test_sixteen_bits_are_added_up_in_the_dtype_that_a_weight_asks_for() -> None:
    layer = nn.Linear(6, 6, bias=False).to(torch.bfloat16)
    layer.weight.grad_dtype = torch.float32
    y, later = halves(layer, torch.randn(5, 6, dtype=torch.bfloat16))
    y.backward(torch.ones_like(y))
    later.accumulate()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
