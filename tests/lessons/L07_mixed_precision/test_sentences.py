"""The sentences of the lesson on mixed precision, with their proofs."""

from __future__ import annotations

from functools import cache
from itertools import islice

import pytest
import torch
from torch.distributed.fsdp import sharded_grad_scaler
from torch.nn.parallel import DistributedDataParallel

from course_lib import data, launch
from course_lib.classroom.runs.training import SMALL, train
from course_lib.figures import loss_at_end
from course_lib.model import TinyGPT
from course_lib.planner import Cluster
from lessons.L07_mixed_precision.explorer import (
    MICRO_BATCHES,
    MixedPrecisionSetting,
    OngoingTraining,
    first_gradients,
)
from lessons.L07_mixed_precision.runs import share_moved
from tests.lessons.L07_mixed_precision.page import page
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME, SHORT = "mixed_precision", 60  # steps
numbers, shows = lesson(NAME).numbers, lesson(NAME).shows
BF16, FP16 = torch.bfloat16, torch.float16
A100_TF32, H100_TF32 = 156, 494.7  # TFLOP/s, dense: NVIDIA's data sheets of A100 (June 2021) and H100 (2023)


def rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=torch.float64).to(dtype).item()


def sums(place: int) -> list[tuple[float, float]]:
    """Sums at each hop, exact and rounded, of five numbers: 256 at this place, else 1."""
    found, total = [], 0.0
    for number in [1.0] * place + [256.0] + [1.0] * (4 - place):
        found.append((total + number, total := rounded(total + number, BF16)))
    return found


def in_half(of: str, code: str) -> bool:
    """Whether the number in this line is a little more than half of that in the line for float32."""
    return 0.5 <= numbers(code, of)[-1] / numbers(code, "float32")[-1] < 0.53


@cache
def moved(lr: float) -> float:
    """The share of weights that a step of AdamW in bfloat16 changes."""
    model = TinyGPT(SMALL, dtype=BF16)
    before = [weight.detach().clone() for weight in model.parameters()]
    minibatch = islice(data.minibatches(data.train_test_split()[0], 64), 1)
    train(model, minibatch, data.answer_loss, torch.optim.AdamW(model.parameters(), lr=lr))
    return share_moved(before, model.parameters())


@cache
def explored(
    format: str, scale: float | None, has_master_weights: bool, lr: float = 3e-3, divisor: int = MICRO_BATCHES
) -> OngoingTraining:
    """Run the first steps of a training of the explorer."""
    training = OngoingTraining(MixedPrecisionSetting(format, scale, has_master_weights, lr, divisor))
    while len(training.losses) < SHORT:
        training.go_on()
    return training


def gained(
    format: str, scale: float | None, has_master_weights: bool, lr: float = 3e-3, divisor: int = MICRO_BATCHES
) -> float:
    """The fall of the loss, as a share of its fall in float32."""
    settings = ((format, scale, has_master_weights), ("float32", 1.0, True))
    curves = [explored(*setting, lr, divisor).losses for setting in settings]
    here, in_32_bits = (curve[0] - loss_at_end(curve) for curve in curves)
    return here / in_32_bits


def an_outlier_changes_no_output() -> bool:
    model, tokens = TinyGPT(SMALL), torch.arange(8)[None]
    before = model(tokens)
    page().grow_outlier(model)
    return torch.allclose(model(tokens), before, atol=1e-5)


# PyTorch's own


def a_weight_is_rounded_once_in_a_context() -> bool:
    weight, x = torch.nn.Parameter(torch.eye(8)), torch.ones(3, 8)
    with torch.autocast("cpu", BF16):
        before = x @ weight
        weight.data.zero_()
        is_kept = torch.equal(x @ weight, before)
    with torch.autocast("cpu", BF16):
        return is_kept and not (x @ weight).any()


def autocast_chooses_by_operation() -> bool:
    x = torch.eye(8)
    with torch.autocast("cpu", BF16):
        product = x @ x
        return (product.dtype, (product + x).dtype) == (BF16, torch.float32)


def between_blocks_under_autocast() -> set[torch.dtype]:
    """The dtypes of the outputs between a model's blocks, under autocast."""
    model, seen = TinyGPT(), set()
    for block in list(model.blocks.children())[:-1]:
        block.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    with torch.autocast("cpu", BF16):
        model(torch.zeros(2, 8, dtype=torch.long))
    return seen


def replica(rank: int) -> None:
    """Run a step of DistributedDataParallel with 64 parameters, under autocast."""
    model = DistributedDataParallel(torch.nn.Linear(64, 1, bias=False))
    with torch.autocast("cpu", BF16):
        output = model(torch.ones(2, 64))
    output.float().sum().backward()


def replicas_send_32_bits() -> bool:
    spans = launch(replica, 2).timeline.of(0)
    return sum(span.bytes for span in spans if span.name == "all_reduce") == 4 * 64  # all of it, once


PROOFS: Proofs = {
    "bfloat16 reaches as far as float32, with two to three digits. float16 has one digit more and ends early": lambda: (
        torch.finfo(BF16).max > 0.99 * torch.finfo(torch.float32).max
        and 1e-3 < torch.finfo(BF16).eps < 1e-2
        and 1e-4 < torch.finfo(FP16).eps < 1e-3
    ),
    "times the peak, and less than that in a step": lambda: all(
        step_32 / step_16 < peak_16 / peak_32
        for peak_32, peak_16, step_32, step_16 in (
            numbers('for name in ("V100-32GB"', name)[-4:] for name in ("V100", "A100", "H100")
        )
    ),
    "half as fast as in 16 bits": lambda: (
        [Cluster(name).spec.peak["fp16"] / 2e12 for name in ("A100-80GB", "H100-80GB")] == [A100_TF32, H100_TF32]
    ),
    "so the 256 comes first in one sum, last in another, and the same sum comes out differently. Where the 256 comes "
    "first or second, all ones after it are lost. Where it comes last, the ones have added up to 4, and 256 + 4 is "
    "260. (The other two get to 260 by luck: on their way they come to 259, which lies halfway between 258 and 260, "
    "and 260 is the even one.)": lambda: (
        shows("def total(", "[260.0, 260.0, 260.0, 256.0, 256.0]")
        and [sums(place)[-1][1] for place in range(5)] == [256, 256, 260, 260, 260]
        and sums(4)[-2:] == [(4, 4), (260, 260)]
        and all((259, 260) in sums(place) for place in (2, 3))
    ),
    "What is below half of the weight's last digit rounds away. The smaller the learning rate, the fewer weights are "
    "left that still learn": lambda: (
        rounded(1 + 0.49 * 2**-7, BF16) == 1 < rounded(1 + 0.51 * 2**-7, BF16)
        and 1 > moved(1e-3) > moved(1e-4) > moved(1e-5) > 0
    ),
    "Half the bytes, and it learns as well. (What is not halved are the few": lambda: (
        in_half("bfloat16", "runs = {dtype:") and shows("runs = {dtype:", "as far as float32: True")
    ),
    # The answers to the tasks of the explorer.
    "At 2⁴⁰ gradients overflow in every step, so every step is skipped. Divided by its own tokens, the loss needs no": (
        lambda: explored("float16", 2.0**40, True).skipped == SHORT and gained("float16", 1.0, True, divisor=1) > 0.95
    ),
    "It comes down from 2⁴⁰, at the price of a few skipped steps. The largest gradients come to rest near the": (
        lambda: (
            0 < (dynamic := explored("float16", None, True)).skipped < 20
            and 2.0**10 < dynamic.scale / MICRO_BATCHES * 2.0 ** max(first_gradients()) <= 2.0**17
        )
    ),
    "At 0.003 it is as good as float32, and at 0.00001 it hardly learns.": lambda: (
        abs(gained("bfloat16", 1.0, False, 3e-3) - 1) < 0.05 and gained("bfloat16", 1.0, False, 1e-5) < 0.1
    ),
    "so it gets a channel a hundred times as large as the others, and the layers that read it have weights a hundred "
    "times smaller: the same function.": an_outlier_changes_no_output,
    # PyTorch's own.
    "Autocast rounds a weight when a pass first needs it, and keeps the copy until the `with` ends.": (
        a_weight_is_rounded_once_in_a_context
    ),
    "gradients have 32 bits in the end, and these are what DistributedDataParallel sends": replicas_send_32_bits,
    "Matrix products take 16 bits, and a sum of numbers of 16 and of 32 bits takes 32.": autocast_chooses_by_operation,
    "So in a whole model what goes from block to block has 32 bits": lambda: (
        between_blocks_under_autocast() == {torch.float32}
    ),
    "On a CPU autocast takes bfloat16, on a GPU float16, unless you name another format.": lambda: (
        (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")) == (BF16, FP16)
    ),
    "`torch/amp/autocast_mode.py` and `torch/amp/grad_scaler.py`, from `unscale_` to `update`; and "
    "`torch/distributed/fsdp/sharded_grad_scaler.py`, which asks the other ranks": lambda: (
        torch.autocast.__module__ == "torch.amp.autocast_mode"
        and torch.amp.GradScaler.unscale_.__module__ == "torch.amp.grad_scaler"
        and "unscale_" in vars(sharded_grad_scaler.ShardedGradScaler)
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)
