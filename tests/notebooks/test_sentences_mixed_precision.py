"""What the lesson on mixed precision says is so."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import sharded_grad_scaler
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import data, launch
from course_lib.figures import loss_at_end
from course_lib.mechanisms.mixed_precision import LossScaler
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import Cluster, memory
from course_lib.planner.spec import Plan
from lessons.L01_one_machine_is_not_enough.explorer import FAMILY
from lessons.L07_mixed_precision.explorer import SCALES, STEPS, MixedPrecisionSetting, Training, first_gradients
from lessons.L07_mixed_precision.runs import running_sum
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "mixed_precision"
numbers, shows = lesson(NAME).numbers, lesson(NAME).shows
BF16, FP16 = torch.bfloat16, torch.float16
GOOD = [1.0] * 5
DEVICES = ("V100-32GB", "A100-80GB", "H100-80GB")
A100_TF32, H100_TF32 = 156, 494.7  # TFLOP/s, dense: NVIDIA's data sheets of A100 (June 2021) and H100 (2023)
COMPARED = "def compare(run, others)"
OURS = "loss scales 2^15, 2^15, 2^15, 2^15; our weights on 4 of 4 ranks"


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


@cache
def moved(lr: float) -> float:
    """The share of weights that a step of AdamW in bfloat16 changes."""
    model = TinyGPT(GPTConfig(layers=1, hidden=32, heads=2), dtype=BF16)
    before = [weight.detach().clone() for weight in model.parameters()]
    problems, _ = data.train_test_split()
    inputs, targets = next(data.minibatches(problems, 64))
    data.answer_loss(model(inputs).float(), targets).backward()
    torch.optim.AdamW(model.parameters(), lr=lr).step()
    changed = [(old != new).sum().item() for old, new in zip(before, model.parameters(), strict=True)]
    return sum(changed) / sum(weight.numel() for weight in before)


class Roundings(TorchDispatchMode):
    """Counts the copies of 16 bits that are made of tensors of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (args[0].dtype, result.dtype) == (torch.float32, BF16):
            self.count += args[0].dim() == 2 and args[0].shape == (8, 8)
        return result


def a_weight_is_rounded_once_in_a_context() -> bool:
    weight, x = torch.nn.Parameter(torch.eye(8)), torch.ones(3, 8)
    with Roundings() as roundings, torch.autocast("cpu", BF16):
        for _ in range(5):
            x @ weight
    return roundings.count == 1


def autocast_chooses_by_operation() -> bool:
    x = torch.eye(8)
    with torch.autocast("cpu", BF16):
        product = x @ x
        return (product.dtype, (product + x).dtype) == (BF16, torch.float32)


def between_blocks(autocast: bool) -> set[torch.dtype]:
    """What a block of a whole model hands to the next."""
    model, tokens = TinyGPT(dtype=torch.float32 if autocast else BF16), torch.zeros(2, 8, dtype=torch.long)
    seen: set[torch.dtype] = set()
    for block in list(model.blocks.children())[:-1]:
        block.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    with torch.autocast("cpu", BF16, enabled=autocast):
        model(tokens)
    return seen


def _replica(rank: int) -> int:
    """Bytes of gradients that DistributedDataParallel sends for each parameter."""
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    with torch.autocast("cpu", BF16):
        output = model(torch.ones(2, 64))
    output.float().sum().backward()
    return sum(weight.numel() for weight in model.parameters())


def replicas_send_32_bits() -> bool:
    run = launch(_replica, 2)
    sent = sum(span.bytes for span in run.timeline.of(0) if span.name == "all_reduce")
    return sent == 4 * run.results[0]  # of two ranks in a ring, each sends what it has once


@cache
def explored(*setting: Any) -> Training:
    """A training of the explorer, to its end."""
    training = Training(MixedPrecisionSetting(*setting))
    while training.pieces_left:
        training.go_on()
    return training


def scale_after(gradients: list[float]) -> float:
    """Of a scaler that begins at 2^16 and has seen these gradients, one in each step."""
    scaler, weight = LossScaler(growth_interval=5), torch.nn.Parameter(torch.zeros(1))
    for gradient in gradients:
        weight.grad = torch.tensor([gradient])
        scaler.unscale_and_update([weight])
    return scaler.scale_factor


def gained(*setting: Any) -> float:
    """By how much the loss has fallen, as a share of what it falls in float32."""
    curves = [explored(*one).losses for one in (setting, ("float32", 1.0, True, setting[-1]))]
    here, in_32_bits = (curve[0] - loss_at_end(curve) for curve in curves)
    return here / in_32_bits


PROOFS: Proofs = {
    # The answers to the tasks of the explorer.
    "2⁸ is enough, and then it learns as well as float32. At 2⁴⁰ gradients overflow in every step, so every step is "
    "skipped.": lambda: (
        list(SCALES.values())[:2] == [1.0, 2.0**8]
        and gained("float16", 1.0, True, 3e-3) < 0.1
        and abs(gained("float16", 2.0**8, True, 3e-3) - 1) < 0.05
        and explored("float16", 2.0**40, True, 3e-3).skipped == STEPS
    ),
    "It comes down from 2⁴⁰, at the price of a few skipped steps. The largest gradients come to rest near the": (
        lambda: (
            0 < (dynamic := explored("float16", None, True, 3e-3)).skipped < 20
            and 2.0**10 < dynamic.scale * 2.0 ** max(first_gradients()) <= 2.0**17
        )
    ),
    "At 0.003 it is as good as float32, and at 0.00001 it hardly learns.": lambda: (
        abs(gained("bfloat16", 1.0, False, 3e-3) - 1) < 0.05 and gained("bfloat16", 1.0, False, 1e-5) < 0.1
    ),
    "After one step the loss is not a number.": lambda: all(
        explored("float16", scale, False, 3e-3).is_broken and len(explored("float16", scale, False, 3e-3).losses) == 2
        for scale in (2.0**8, 2.0**16)
    ),
    "No, not a digit.": lambda: all(
        explored(name, 2.0**16, True, 3e-3).losses == explored(name, 1.0, True, 3e-3).losses
        for name in ("float32", "bfloat16")
    ),
    "With 16, twice as many fit into the same memory and through the same cable, and a GPU multiplies them many times "
    "as fast.": lambda: 2 * BF16.itemsize == torch.float32.itemsize and all(peak > 7 for peak, _ in gains()),
    "These have such circuits, the older ones for float16 alone.": lambda: (
        [
            sorted(set(Cluster(device).spec.peak) & {"bf16", "fp16"})
            for device in ("V100-32GB", "A100-80GB", "H100-80GB")
        ]
        == [["fp16"], ["bf16", "fp16"], ["bf16", "fp16"]]
    ),
    "for one step of a model with 1.3 billion parameters": lambda: round(FAMILY["1.3B"].parameters / 1e9, 1) == 1.3,
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
    "half as fast as in 16 bits": lambda: (
        tuple(Cluster(name).spec.peak["fp16"] / 2e12 for name in DEVICES[1:]) == (A100_TF32, H100_TF32)
    ),
    "Begin at 0 and add 1, a thousand times, in bfloat16.": lambda: (
        "(torch.bfloat16, 1000)" in lesson(NAME).code("ones add up to")
    ),
    "$256 + 1$ lies halfway between two of them and is rounded to the even one, which is 256 again": lambda: (
        rounded(257, BF16) == 256 and rounded(258, BF16) == 258
    ),
    "Five ranks add up five copies of the same sum, 256 + 1 + 1 + 1 + 1, where rank 0 has the 256.": lambda: all(
        part in lesson(NAME).code("def total(") for part in ("(5,), 256.0 if rank == 0 else 1.0", "world_size=5")
    ),
    "It starts each of the five numbers on another rank, so the 256 comes first in one sum, last in another": lambda: (
        {hops(place)[-1] for place in range(5)} == {256, 260}
    ),
    "In the second line the numbers *travel* in 16 bits all the same, and are *added* in 32 by one rank": lambda: (
        lesson(NAME).shown("def total(").count("16 bytes sent") == 2  # 2 x 4 / 5 of five numbers of 2 bytes
    ),
    "What is below half of the weight's last digit rounds away. The smaller the learning rate, the fewer weights are "
    "left that still learn": lambda: (
        rounded(1 + 0.49 * 2**-7, BF16) == 1 != rounded(1 + 0.51 * 2**-7, BF16)
        and 1 > moved(1e-3) > moved(1e-4) > moved(1e-5) > 0
    ),
    "let us say that it is one of 65,536 micro-batches of a large minibatch": lambda: (
        "MICRO_BATCHES = 2**16" in lesson(NAME).code("MICRO_BATCHES =") and 2**16 == 65_536
    ),
    "squares vanish first. Its first step is 0 / 0.": lambda: (
        rounded(2.0**-13, FP16) > 0 == rounded(2.0**-26, FP16) and rounded(1e-15, FP16) == 0  # which AdamW adds
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
    "(The other two get to 260 by luck: on their way they come to 259, which lies halfway between 258 and 260, and 260 "
    "is the even one": lambda: (
        all(hops(place)[-1] == 260 and 259 in exact_hop(place) for place in (2, 3)) and 259 not in exact_hop(4)
    ),
    "That costs not a byte more.": lambda: (
        lesson(NAME).shown("def total(").count("16 bytes sent") == 2
        and shows("def total(", "float32  : [260.0, 260.0, 260.0, 260.0, 260.0]")
    ),
    "Each step of that training was right, and most of it was forgotten at once.": lambda: shows(
        'progress["bfloat16"] < ', "less than a quarter as far: True", "it is like float32: True"
    ),
    "For what is kept for each weight, you will read of 16, 18 and 20 bytes. They differ in the gradients: 2 bytes in "
    "16 bits make **16**; 4 bytes in 32 bits, in which micro-batches are added up, make **18**; and both "
    "side by side, as here while micro-batches are being added up, make **20**.": lambda: (
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
    "This course says 16 unless it says more.": lambda: sum(memory.recipe(Plan())) == 16,
    "The same training four times: in float32, and in float16 without and with what you now know.": lambda: (
        lesson(NAME).code("everything = ").count("losses_of_micro_batches(") == 4
    ),
    "Matrix products take 16 bits, and a sum of numbers of 16 and of 32 bits takes 32.": autocast_chooses_by_operation,
    "Three things go wrong in 16 bits: a long sum stalls, a small update rounds away, a small gradient becomes zero.": (
        lambda: rounded(257, BF16) == 256 and rounded(1 + 2**-9, BF16) == 1 and rounded(2.0**-26, FP16) == 0
    ),
    "messages and activations are still half as large": lambda: (
        numbers("bytes of activations", "bfloat16")[-1] < 0.53 * numbers("bytes of activations", "float32")[-1]
    ),
    "Rank 3 has inputs that are eight times as large": lambda: (
        "* (8 if rank == 3 else 1)" in lesson(NAME).code("def own_data(")
    ),
    "With `ShardedGradScaler` the ranks end with our scale and, to the last bit, with our weights.": lambda: shows(
        COMPARED, f"ours              {OURS}", f"ShardedGradScaler {OURS}"
    ),
    "`GradScaler` asks no other rank: where rank 3 skips, the others go on, and soon they have another scale.": (
        lambda: shows(COMPARED, "GradScaler        loss scales 2^20, 2^20, 2^20, 2^15; our weights on 1 of 4 ranks")
    ),
    "Autocast rounds a weight when a pass first needs it, and keeps the copy until the `with` ends.": (
        a_weight_is_rounded_once_in_a_context
    ),
    "gradients have 32 bits in the end, and these are what DistributedDataParallel sends": replicas_send_32_bits,
    "So in a whole model what goes from block to block has 32 bits, where ours has 16 everywhere.": lambda: (
        between_blocks(autocast=True) == {torch.float32} and between_blocks(autocast=False) == {BF16}
    ),
    "On a CPU autocast takes bfloat16, on a GPU float16, unless you name another format.": lambda: (
        (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")) == (BF16, FP16)
    ),
    "`torch/amp/autocast_mode.py` and `torch/amp/grad_scaler.py`, from `unscale_` to `update`": lambda: (
        torch.autocast.__module__ == "torch.amp.autocast_mode"
        and torch.amp.GradScaler.__module__ == "torch.amp.grad_scaler"
        and hasattr(torch.amp.GradScaler, "unscale_")
    ),
    "`torch/distributed/fsdp/sharded_grad_scaler.py` for the all-reduce in between": lambda: hasattr(
        sharded_grad_scaler.ShardedGradScaler, "unscale_"
    ),
    "After five good steps in a row it is doubled again; where that goes over the edge, a step is skipped, and it is "
    "halved.": lambda: (
        "growth_interval=5" in lesson(NAME).code("def trajectory(")
        and [*map(scale_after, (GOOD[:4], GOOD, [*GOOD, math.inf]))] == [2**16, 2**17, 2**16]
    ),
    "With master weights the squares are taken in 32 bits, but of gradients most of which are zero.": lambda: (
        (explored("float16", 1.0, True, 3e-3).zeros or 0) > 0.5
    ),
    "(Real runs wait for 2000 steps before they try.)": lambda: LossScaler().growth_interval == 2000,
    "`torch.amp.GradScaler` does exactly the same, number for number": lambda: (
        torch.amp.GradScaler("cpu").get_growth_interval() == 2000
        and torch.amp.GradScaler("cpu").get_backoff_factor() == 0.5
    ),
    "Half the bytes, and just as good.": lambda: (
        0.49 < numbers("runs = {dtype:", "float16")[-1] / numbers("runs = {dtype:", "float32")[-1] < 0.51
        and shows("in_32, in_16 =", "as far as float32: True")
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)
