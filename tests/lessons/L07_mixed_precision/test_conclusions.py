"""What the lesson on mixed precision concludes, confirmed away from the setting that showed it.

Another model, seed, format or length than on the page; or a figure that somebody has published.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import islice

import pytest
import torch

from course_lib import data
from course_lib.classroom.runs.training import train
from course_lib.figures import loss_at_end
from course_lib.mechanisms.mixed_precision import LossScaler, MasterWeights
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import Cluster, Plan, memory
from lessons.L07_mixed_precision.few_bits import FP4, FP8, MXFP8, NVFP4, Quantizer
from lessons.L07_mixed_precision.runs import running_sum, share_moved
from tests.lessons.conclusions import Conclusion, confirm
from tests.lessons.L07_mixed_precision.page import page

NAME = "mixed_precision"
DEEPER = GPTConfig(layers=2, hidden=48, heads=3)  # the page has one layer, and 32 hidden
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALL_TOKENS, SEED = 2**17, 5


def minibatches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(islice(data.minibatches(data.train_test_split()[0], 32, SEED), steps))


@cache
def fall(dtype: torch.dtype, divisor: int = 1, scale: float = 1.0) -> float:
    """How far 25 steps with master weights bring the loss down."""
    model, scaler = TinyGPT(DEEPER, SEED, dtype), LossScaler(scale)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, scaler, lr=3e-3, eps=1e-8 / divisor)
    losses = train(model, minibatches(25), partial(divided, divisor), optimizer, scaler)
    return divisor * (losses[0] - loss_at_end(losses))


def divided(divisor: int, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return data.answer_loss(logits, targets) / divisor


@cache
def end(low: Quantizer | None, factor: float = 50.0) -> float:
    """The loss after 40 steps with products of few bits, and an outlier."""
    model = TinyGPT(DEEPER, SEED)
    page().grow_outlier(model, factor)
    if low:
        page().quantize(model, low)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return loss_at_end(train(model, minibatches(40), data.answer_loss, optimizer))


def moved(lr: float) -> float:
    """The share of weights that one step of SGD with momentum moves in bfloat16."""
    model = TinyGPT(DEEPER, SEED, BF16)
    before = [weight.detach().clone() for weight in model.parameters()]
    train(model, minibatches(1), data.answer_loss, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))
    return share_moved(before, model.parameters())


def off(low: Quantizer, outlier: float) -> float:
    """The relative error of numbers in other rows than an outlier's."""
    numbers = torch.randn(64, 512, generator=torch.Generator().manual_seed(SEED)) * 1e-3
    numbers[7, 3] = 1e-3 * outlier
    others = torch.arange(64) != 7
    return ((low(numbers) - numbers)[others].norm() / numbers[others].norm()).item()


CONCLUSIONS = [
    Conclusion(
        "a long sum stalls, a small update rounds away, a small gradient becomes zero.",
        "other numbers: 3 to which 1/256 is added in bfloat16, and 0.1 from 0 in float16",
        lambda: set(running_sum(3, 1 / 256, 50, BF16)) == {3.0} and running_sum(0, 0.1, 4000, FP16)[-1] == 256,
    ),
    Conclusion(
        "The smaller the learning rate, the fewer weights are left that still learn",
        "SGD in a deeper model, where the page has AdamW",
        lambda: 0.9 > moved(1e-1) > 2 * moved(1e-2) > 4 * moved(1e-3) > 0,
    ),
    Conclusion(
        "You will read three different numbers for that, and they differ in the gradients:",
        "Rajbhandari et al. 2020, section 3.1: 2 + 2 + 12; Megatron-LM's distributed optimizer: 18 without sharding",
        lambda: (sum(memory.recipe(Plan())), sum(memory.recipe(Plan(fp32_gradients=True)))) == (16, 18),
    ),
    Conclusion(
        "Half the bytes, and it learns as well.",
        "a deeper model, and minibatches of half the size",
        lambda: fall(BF16) == pytest.approx(fall(FP32), rel=0.05),
    ),
    Conclusion(
        "divided by its own tokens, our model trains in float16 as in float32",
        "a deeper model; Micikevicius et al. 2018, section 4.1: none for image classifiers",
        lambda: fall(FP16) == pytest.approx(fall(FP32), rel=0.05),
    ),
    Conclusion(
        "bfloat16 has the range of float32 and needs no loss scaling.",
        "a deeper model whose loss is divided by 131,072; Kalamkar et al. 2019 trained without one",
        lambda: (
            torch.finfo(BF16).tiny == torch.finfo(FP32).tiny
            and fall(BF16, ALL_TOKENS) == pytest.approx(fall(FP32), rel=0.05)
        ),
    ),
    Conclusion(
        "whether it needs scaling depends on the model and on what its loss is divided by.",
        "a deeper model, and twice as many micro-batches of half the size",
        lambda: (
            fall(FP16, ALL_TOKENS) < 0.75 * fall(FP32)
            and fall(FP16, ALL_TOKENS, scale=2.0**14) == pytest.approx(fall(FP32), rel=0.05)
        ),
    ),
    Conclusion(
        "An outlier takes the range away from all that share its scale.",
        "numbers a thousand times smaller, in another shape",
        lambda: (
            off(FP4, 100) > 0.9
            and off(FP8, 100) < 0.03 < 0.1 < off(FP8, 100_000)
            and off(MXFP8, 100_000) < 0.03
            and off(NVFP4, 100_000) < 0.12
        ),
    ),
    Conclusion(
        "In 8 bits both follow float32. In 4 bits one scale falls far behind, and blocks come most of the way.",
        "a deeper model, and an outlier of half the size",
        lambda: max(end(FP8), end(MXFP8)) < end(None) + 0.1 and end(FP4) - end(None) > 2 * (end(NVFP4) - end(None)),
    ),
    Conclusion(
        "times the peak with numbers of 8 bits that it has with 16",
        "data sheets: H100 SXM with 989.4 TFLOP/s in 16 bits and 1,978.9 in 8; A100 has no circuits for 8 bits",
        lambda: [round(Cluster("H100-80GB").spec.peak[name] / 1e12, 1) for name in ("bf16", "fp8")] == [989.4, 1978.9],
    ),
]


@pytest.mark.parametrize("conclusion", CONCLUSIONS, ids=lambda one: one.sentence[:40])
def test_it_holds_elsewhere(conclusion: Conclusion) -> None:
    confirm(NAME, conclusion)
