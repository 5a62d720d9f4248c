"""TinyGPT: its numbers against formulas and plain re-computations, its blocks against the whole."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib.model import Attention, GPTConfig, TinyGPT

TOKENS = torch.tensor([[3, 7, 10, 4, 8, 11, 0, 8], [1, 0, 10, 9, 9, 11, 1, 0]])


def test_parameters_are_as_many_as_the_textbook_counts() -> None:
    v, s, n, h, f = 12, 8, 3, 32, 48
    attention = 4 * (h * h + h)
    mlp = (h * f + f) + (f * h + h)
    norms = 2 * 2 * h
    expected = v * h + s * h + n * (attention + mlp + norms) + 2 * h + h * v
    model = TinyGPT(GPTConfig(vocab=v, sequence=s, layers=n, hidden=h, heads=4, ffn_hidden=f))
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_tied_embeddings_are_one_parameter_with_two_uses() -> None:
    config = GPTConfig(tied_embeddings=True)
    model = TinyGPT(config)
    assert model.get_submodule("blocks.3.output").weight is model.get_parameter("blocks.0.token.weight")
    untied = sum(parameter.numel() for parameter in TinyGPT().parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == untied - config.vocab * config.hidden


@pytest.mark.parametrize("tied", [False, True])
def test_a_seed_decides_every_parameter(tied: bool) -> None:
    config = GPTConfig(tied_embeddings=tied)
    first, again, other = TinyGPT(config, seed=5), TinyGPT(config, seed=5), TinyGPT(config, seed=6)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    name = "blocks.1.mlp.up.weight"
    assert not torch.equal(first.get_parameter(name), other.get_parameter(name))


def test_building_a_model_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    TinyGPT(seed=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_starts_from_the_same_numbers_rounded(dtype: torch.dtype) -> None:
    exact = TinyGPT(seed=1, dtype=torch.float64)
    model = TinyGPT(seed=1, dtype=dtype)
    for parameter, reference in zip(model.parameters(), exact.parameters(), strict=True):
        assert parameter.dtype == dtype
        assert torch.equal(parameter, reference.to(dtype))
    assert model(TOKENS).dtype == dtype


def test_the_first_loss_is_that_of_guessing() -> None:
    """An untrained model should know nothing: its loss is near ln(vocab), not far above."""
    model = TinyGPT(GPTConfig(layers=6))
    loss = F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
    assert loss < 1.5 * math.log(12)


def test_blocks_run_one_after_the_other_are_the_model() -> None:
    model = TinyGPT(GPTConfig(layers=3))
    x = TOKENS
    for block in model.blocks:
        x = block(x)
    assert torch.equal(x, model(TOKENS))
    first_stage, last_stage = model.blocks[:2], model.blocks[2:]
    assert torch.equal(last_stage(first_stage(TOKENS)), model(TOKENS))


def test_no_position_sees_what_comes_after_it() -> None:
    model = TinyGPT(dtype=torch.float64)
    changed = TOKENS.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 12
    before, after = model(TOKENS), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_attention_is_the_softmax_formula_head_by_head() -> None:
    attention = Attention(GPTConfig(hidden=16, heads=4)).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(attention(x), _attention_by_hand(attention, x, 4), rtol=0, atol=1e-12)


def _attention_by_hand(attention: Attention, x: Tensor, heads: int) -> Tensor:
    query, key, value = attention.query(x), attention.key(x), attention.value(x)
    width = query.shape[-1] // heads
    outputs = torch.zeros_like(query)
    for sample in range(x.shape[0]):
        for head in range(heads):
            q, k, v = (made[sample, :, head * width : (head + 1) * width] for made in (query, key, value))
            for position in range(x.shape[1]):
                scores = k[: position + 1] @ q[position] / math.sqrt(width)
                mix = scores.exp() / scores.exp().sum() @ v[: position + 1]
                outputs[sample, position, head * width : (head + 1) * width] = mix
    return attention.out(outputs)


def test_a_rank_with_half_of_the_heads_can_use_the_attention_module_as_it_is() -> None:
    """The outputs of two halves of the heads add up to the output of all: tensor parallelism relies on it."""
    config = GPTConfig(hidden=16, heads=4)
    whole = Attention(config).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    partial_sums = []
    with torch.no_grad():
        for half in (0, 1):
            part = Attention(config).double()
            for name in ("query", "key", "value"):
                linear, source = getattr(part, name), getattr(whole, name)
                linear.weight = torch.nn.Parameter(source.weight.chunk(2, dim=0)[half])
                linear.bias = torch.nn.Parameter(source.bias.chunk(2)[half])
            part.out.weight = torch.nn.Parameter(whole.out.weight.chunk(2, dim=1)[half])
            part.out.bias.zero_()
            partial_sums.append(part(x))
        assert torch.allclose(sum(partial_sums) + whole.out.bias, whole(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "named", "works"),
    [
        (lambda: GPTConfig(hidden=30, heads=4), "heads=4", "does not divide hidden=30"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused_with_what_would_work(
    shape: Callable[[], GPTConfig], named: str, works: str
) -> None:
    with pytest.raises(ValueError) as refusal:
        shape()
    assert named in str(refusal.value)
    assert works in str(refusal.value)
