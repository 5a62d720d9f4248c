"""Mixed precision without each of its ingredients, which goes wrong, and with it, which works.

Real trainings of a small model on two-digit sums, against float32 with the same seed and data.
"""

from __future__ import annotations

import math
from functools import cache, partial
from itertools import islice
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from course_lib import data
from course_lib.classroom.runs.training import train
from course_lib.mechanisms.mixed_precision import LossScaler, MasterWeights
from course_lib.model import GPTConfig, TinyGPT
from lessons.L07_mixed_precision.runs import RoundedWeights, exponents, running_sum

CONFIG = GPTConfig(layers=1, hidden=32, heads=2)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
GLOBAL = 2**18  # micro-batches in a minibatch, by which each loss is divided


@cache
def losses(
    dtype: torch.dtype,
    steps: int,
    lr: float,
    master_weights: bool = False,
    scale: float | None = None,
) -> list[float]:
    problems, _ = data.train_test_split()
    model = TinyGPT(CONFIG, dtype=dtype)
    scaler = None if scale is None else LossScaler(scale)
    make: Any = partial(torch.optim.AdamW, lr=lr)
    optimizer = MasterWeights(model.parameters(), make, scaler) if master_weights else make(model.parameters())
    return train(model, islice(data.minibatches(problems, 32), steps), data.answer_loss, optimizer, scaler)


def end(found: list[float]) -> float:
    return mean(found[-20:])


@pytest.mark.parametrize(("dtype", "stalls_at"), [(BF16, 256), (F16, 2048)])
def test_counting_ones_stalls_in_16_bits(dtype: torch.dtype, stalls_at: int) -> None:
    counted = running_sum(0, 1, 2 * stalls_at, dtype)
    assert counted[: stalls_at + 1] == list(range(stalls_at + 1))
    assert set(counted[stalls_at:]) == {stalls_at}
    assert running_sum(0, 1, 2 * stalls_at, F32)[-1] == 2 * stalls_at


@pytest.mark.parametrize(("dtype", "last_digit"), [(BF16, 2.0**-7), (F16, 2.0**-10), (F32, 2.0**-23)])
def test_an_update_below_half_the_last_digit_of_a_weight_changes_nothing(dtype: torch.dtype, last_digit: float) -> None:
    assert set(running_sum(1, last_digit / 2, 100, dtype)) == {1.0}  # a tie, which goes to the even number
    assert running_sum(1, 0.51 * last_digit, 100, dtype)[-1] == 1 + 100 * last_digit


def test_a_training_stalls_without_master_weights_and_is_rescued_by_them() -> None:
    reference = losses(F32, 100, 2e-5)
    stalled, rescued = losses(BF16, 100, 2e-5), losses(BF16, 100, 2e-5, master_weights=True)
    progress = reference[0] - end(reference)
    assert progress > 0.3
    assert reference[0] - end(stalled) < 0.25 * progress
    assert abs(end(rescued) - end(reference)) < 0.05 * progress


def test_a_training_diverges_without_master_weights_and_is_rescued_by_them() -> None:
    """In float16, Adam's squared gradients and its epsilon are zero: its steps are 0 / 0."""
    diverged, rescued = losses(F16, 60, 3e-3), losses(F16, 60, 3e-3, master_weights=True, scale=2.0**16)
    assert len(diverged) == 2
    assert math.isnan(diverged[-1])
    assert len(rescued) == 60
    assert end(rescued) < 1.7 < 2.5 < rescued[0]


def gradients(dtype: torch.dtype, scale: float) -> list[Tensor]:
    model = TinyGPT(CONFIG, dtype=dtype)
    inputs, targets = next(data.minibatches(data.train_test_split()[0], 64))
    (data.answer_loss(model(inputs).float(), targets) * scale).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def vanished(gradients: list[Tensor], dtype: torch.dtype, scale: float = 1.0) -> float:
    """The share of nonzero numbers that become zero when they are scaled and cast."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    return ((scale * flat[flat != 0]).to(dtype) == 0).double().mean().item()


def test_gradients_vanish_in_float16_and_scaling_saves_them() -> None:
    small = gradients(F32, 1 / GLOBAL)
    vanishing = [vanished(small, F16), vanished(small, F16, GLOBAL), vanished(small, BF16)]
    assert vanishing[0] > 0.1 > 0.01 > vanishing[1] > vanishing[2] == 0
    # Within the backward pass numbers are smaller still, so more is lost than its final gradients show.
    zeros = [torch.cat([g.flatten() == 0 for g in gradients(F16, scale)]).double().mean() for scale in (1 / GLOBAL, 1)]
    assert zeros[0] > 0.5
    assert zeros[1] < 0.1


def test_the_histogram_counts_powers_of_two() -> None:
    numbers = torch.tensor([0.0, 1.0, 1.5, -1.99, 2.0, 0.25, 2.0**-149, 0.0])
    assert exponents([numbers[:3], numbers[3:]]) == {-149: 1 / 8, -2: 1 / 8, 0: 3 / 8, 1: 1 / 8}


def test_the_histogram_shows_what_vanishes() -> None:
    """All numbers below 2^-25 vanish, none from 2^-24 on; between them, only numbers that round to the even zero."""
    small = gradients(F32, 1 / GLOBAL)
    shares = exponents(small)
    is_zero = 1 - sum(shares.values())
    below = sum(share for exponent, share in shares.items() if exponent < -25) / (1 - is_zero)
    assert vanished(small, F16) == pytest.approx(below)


def weights_with(gradient: float, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    weight = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    weight.grad = torch.full_like(weight, gradient)
    return [weight]


def test_rounded_weights_are_what_the_plain_optimizer_makes_of_them() -> None:
    problems, _ = data.train_test_split()

    def trained(keeps: Any) -> list[Tensor]:
        model = TinyGPT(CONFIG, dtype=BF16)
        optimizer = keeps(model.parameters(), lr=1e-3)
        train(model, islice(data.minibatches(problems, 64), 3), data.answer_loss, optimizer)
        return list(model.parameters())

    plain, rounded = (
        trained(torch.optim.AdamW),
        trained(lambda weights, lr: RoundedWeights(weights, torch.optim.AdamW, lr=lr)),
    )
    assert all(torch.equal(one, other) for one, other in zip(plain, rounded, strict=True))


def test_what_is_unscaled_goes_back_into_16_bits_and_may_vanish_there() -> None:
    (kept,), (lost,) = weights_with(2.0**-4, F16), weights_with(2.0**-12, F16)
    for weight in (kept, lost):
        assert RoundedWeights([weight], torch.optim.SGD, LossScaler(2.0**16, dynamic=False), lr=1.0).step()
    assert kept.tolist() == [-(2.0**-20)] * 3
    assert lost.tolist() == [0.0] * 3  # 2^-28 is too small


def test_rounded_weights_skip_a_step_that_overflows() -> None:
    (weight,) = weights_with(math.inf, F16)
    scaler = LossScaler(2.0**16)
    assert not RoundedWeights([weight], torch.optim.SGD, scaler, lr=1.0).step()
    assert weight.tolist() == [0.0] * 3
    assert weight.grad is None
    assert scaler.scale_factor == 2.0**15
