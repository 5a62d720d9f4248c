"""What the lesson on mixed precision says is so."""

from __future__ import annotations

import pytest
import torch

from course_lib.experiments.ablations import running_sum
from course_lib.mechanisms.mixed_precision import LossScaler
from course_lib.planner import Cluster, memory
from course_lib.planner.spec import Plan
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "mixed_precision"
numbers, shows = lesson(NAME).numbers, lesson(NAME).shows
BF16, FP16 = torch.bfloat16, torch.float16
DEVICES = ("V100-32GB", "A100-80GB", "H100-80GB")


def rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=torch.float64).to(dtype).item()


def hops(place: int) -> list[float]:
    """The partial sums, in bfloat16, of five numbers of which the one at this place is 256 and the others are 1."""
    total, sums = 0.0, []
    for number in [1.0] * place + [256.0] + [1.0] * (4 - place):
        total = rounded(total + number, BF16)
        sums.append(total)
    return sums


def exact_hop(place: int) -> set[float]:
    """What these sums were before they were rounded."""
    before = [0.0, *hops(place)[:-1]]
    return {have + (256 if k == place else 1) for k, have in enumerate(before)}


def gains() -> list[tuple[float, float]]:
    """For each device: by which factor 16 bits raise the peak, and a step's speed."""
    rows = [numbers('for name in ("V100-32GB"', f"{name} ")[-4:] for name in DEVICES]
    return [(peak16 / peak32, step32 / step16) for peak32, peak16, step32, step16 in rows]


PROOFS: Proofs = {
    "In **bfloat16** the next number after 1 is 1.0078, and in **float16** it is 1.00098.": lambda: (
        round(1 + torch.finfo(BF16).eps, 4) == 1.0078 and round(1 + torch.finfo(FP16).eps, 5) == 1.00098
    ),
    "bfloat16 reaches as far as float32, with two to three digits.": lambda: (
        torch.finfo(BF16).max > 0.99 * torch.finfo(torch.float32).max and 1e-3 < torch.finfo(BF16).eps < 1e-2
    ),
    "float16 has one digit more and ends early: at 65504 above, and at $2^{-24}$ below.": lambda: (
        torch.finfo(FP16).max == 65504 and rounded(2**-24, FP16) == 2**-24 and rounded(2**-25, FP16) == 0
    ),
    "Eight to sixteen times the peak, and less than that in a step": lambda: all(
        7.5 < peak < 16.5 and step < peak for peak, step in gains()
    ),
    "Here is what their data sheets say of matrix products": lambda: all(
        f"{Cluster(name).spec.peak['fp16'] / 1e12:5.1f} in float16" in lesson(NAME).shown('for name in ("V100-32GB"')
        for name in DEVICES
    ),
    "From 256 on, bfloat16 has only every second number.": lambda: (
        [rounded(n, BF16) for n in (256, 257, 258, 259, 260)] == [256, 256, 258, 260, 260]
        and running_sum(0, 1, 1000, BF16)[-1] == 256
    ),
    "In float16 the same happens at 2048. (And in float32 at 16,777,216.)": lambda: (
        rounded(2049, FP16) == 2048 and rounded(2**24 + 1, torch.float32) == 2**24 == 16_777_216
    ),
    "Three quarters of the micro-batches were computed for nothing": lambda: (
        numbers("def accumulate(", "16 bits")[-1] == 256 and numbers("def accumulate(", "32 bits")[-1] == 1000
    ),
    "Where the 256 comes first or second, all ones after it are lost.": lambda: (
        hops(0)[-1] == hops(1)[-1] == 256 and shows("def total(", "[260.0, 260.0, 260.0, 256.0, 256.0]")
    ),
    "Where it comes last, the ones have added up to 4, and 256 + 4 is 260.": lambda: hops(4)[-2:] == [4, 260],
    "on their way they come to 259, which lies halfway between 258 and 260, and 260 is the even one": lambda: (
        all(hops(place)[-1] == 260 and 259 in exact_hop(place) for place in (2, 3)) and 259 not in exact_hop(4)
    ),
    "That costs not a byte more.": lambda: (
        lesson(NAME).shown("def total(").count("16 bytes sent") == 2
        and shows("def total(", "float32  : [260.0, 260.0, 260.0, 260.0, 260.0]")
    ),
    "Each step of that training was right, and most of it was forgotten at once.": lambda: shows(
        'progress["bfloat16"] < ', "less than a quarter as far: True", "it is like float32: True"
    ),
    "2 bytes in 16 bits make **16**; 4 bytes in 32 bits, in which micro-batches are added up, make **18**; and both "
    "side by side, as here while micro-batches are being collected, make **20**.": lambda: (
        sum(memory.recipe(Plan())) == 2 + 2 + 12 == 16
        and sum(memory.recipe(Plan(fp32_gradients=True))) == 2 + 4 + 12 == 18
        and 2 + 2 + 4 + 12 == 20
    ),
    "Half, but for the few that are in 32 bits in both": lambda: (
        0.5 < numbers("bytes of activations", "bfloat16")[-1] / numbers("bytes of activations", "float32")[-1] < 0.53
    ),
    "In float16 everything below $2^{-25}$ is zero.": lambda: (
        rounded(0.99 * 2**-25, FP16) == 0 != rounded(1.01 * 2**-25, FP16)
    ),
    "above them is a lot of room: it ends at $2^{16}$": lambda: 2**15 < torch.finfo(FP16).max < 2**16,
    "a power of two changes no digit of them": lambda: 0.1 * 2**16 / 2**16 == 0.1,
    "float16 alone ends at once": lambda: shows("float16 alone: its loss is", "is nan after 1 step"),
    "It takes both.": lambda: shows(
        "float16 alone: its loss is",
        "less than a quarter as far: True",
        "master weights and scaling: like float32: True",
    ),
    "above 65504 there is only `inf`": lambda: rounded(65520, FP16) == float("inf") != rounded(65519, FP16),
    "(Real runs wait for 2000 steps before they try.)": lambda: LossScaler().growth_interval == 2000,
    "`torch.amp.GradScaler` does exactly the same, number for number": lambda: (
        torch.amp.GradScaler("cpu").get_growth_interval() == 2000
        and torch.amp.GradScaler("cpu").get_backoff_factor() == 0.5
    ),
    "Half the bytes, and just as good.": lambda: (
        0.49 < numbers("def whole_training(", "float16")[-1] / numbers("def whole_training(", "float32")[-1] < 0.51
        and shows("in_32, in_16 =", "as far as float32: True")
    ),
    "a mean with an `inf` in it is `inf` on all ranks": lambda: torch.tensor([1.0, float("inf")]).mean().isinf(),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)
