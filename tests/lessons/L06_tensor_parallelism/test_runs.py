"""Two matrices, cut in four ways, against one process with whole matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib import launch
from course_lib.mechanisms.tensor_parallel import linear as tp
from lessons.L06_tensor_parallelism import runs as cuts
from lessons.L06_tensor_parallelism.runs import CUTS, DIMENSION

HIDDEN, WIDE = 8, 34  # 34 columns do not divide evenly among 4 ranks


def numbers(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """a, b, x, and the gradient of y: the same on all ranks, whatever their seeds."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((HIDDEN, WIDE), (WIDE, HIDDEN), (2, 8, HIDDEN), (2, 8, HIDDEN))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) / 3 for shape in shapes)


def one_process(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The results of one process: y, and the gradients of x, a and b."""
    a, b, x, gradient = numbers(dtype)
    for tensor in (a, b, x):
        tensor.requires_grad_()
    y = F.gelu(x @ a) @ b
    y.backward(gradient)
    assert x.grad is not None and a.grad is not None and b.grad is not None
    return y.detach(), x.grad, a.grad, b.grad


def differences(
    rank: int, cut: tuple[str, str], dtype: torch.dtype, sequence_parallel: bool = False, mistake: str = ""
) -> list[float]:
    """The differences of y and of the gradients of x, a and b from those of one process."""
    a, b, x, gradient = numbers(dtype)
    a.requires_grad_(), b.requires_grad_()
    operations = cuts.cut_mlp(a, b, cut, sequence_parallel=sequence_parallel)
    operations = cuts.gelu_first(operations) if mistake == "gelu" else cuts.without_sum(operations, mistake)
    if sequence_parallel:
        x, gradient = tp.shard(x, 1), tp.shard(gradient, 1)
    y, of_x = cuts.forward_and_backward(operations, x, gradient)
    right = list(one_process(dtype))
    if sequence_parallel:
        right[:2] = [tp.shard(tensor, 1) for tensor in right[:2]]
    found = [y, of_x, *(tp.shard(m.grad, DIMENSION[how]) for m, how in zip((a, b), cut, strict=True))]  # type: ignore[arg-type]
    right[2:] = [tp.shard(tensor, DIMENSION[how]) for tensor, how in zip(right[2:], cut, strict=True)]
    return [(one - other).abs().max().item() for one, other in zip(found, right, strict=True)]


def rounding(dtype: torch.dtype) -> float:
    """A bound for rounding: sums of at most 34 products, twice, of numbers up to about 3, in another order on ranks."""
    return 2 * WIDE * 9 * torch.finfo(dtype).eps


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("dtype", "ranks"), [(torch.float64, 4), (torch.float32, 2)])
def test_every_cut_gives_the_numbers_of_one_process(
    cut: tuple[str, str], sequence_parallel: bool, dtype: torch.dtype, ranks: int
) -> None:
    for found in launch(differences, ranks, (cut, dtype, sequence_parallel)).results:
        assert max(found) < rounding(dtype)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("cut", "mistake", "wrong"),
    [
        (("columns", "rows"), "f", [False, True, False, False]),
        (("columns", "rows"), "g", [True, False, False, False]),
        (("rows", "columns"), "gelu", [True, True, True, True]),
    ],
)
def test_each_mistake_shows_where_the_lesson_says(
    cut: tuple[str, str], mistake: str, wrong: list[bool], sequence_parallel: bool
) -> None:
    run = launch(differences, 4, (cut, torch.float64, sequence_parallel, mistake))
    worst = [max(found[i] for found in run.results) for i in range(4)]
    assert [value > 0.01 for value in worst] == wrong


def travel(rank: int, cut: tuple[str, str]) -> None:
    x = torch.ones(1, 8, 16)
    a, b = torch.ones(16, 64, requires_grad=True), torch.ones(64, 16, requires_grad=True)
    cuts.forward_and_backward(cuts.cut_mlp(a, b, cut), x, x)


@pytest.mark.parametrize(("cut", "factor"), zip(CUTS, (4, 15, 15, 18), strict=True))
def test_each_cut_sends_what_the_table_says(cut: tuple[str, str], factor: int) -> None:
    x_bytes, ranks = 8 * 16 * 4, 4
    sent = launch(travel, ranks, (cut,)).timeline.bytes_sent(0)
    assert sent == factor * x_bytes * (ranks - 1) / ranks


def described(rank: int) -> list[list[Any]]:
    a, b = torch.ones(16, 64), torch.ones(64, 16)
    return [[operation._replace(run=abs) for operation in cuts.cut_mlp(a, b, cut)] for cut in CUTS]


def test_what_an_operation_says_of_its_traffic_is_what_the_trace_shows() -> None:
    for cut, operations in zip(CUTS, launch(described, 2).results[0], strict=True):
        announced = [operation.forward for operation in operations] + [
            operation.backward for operation in reversed(operations)
        ]
        spans = launch(travel, 2, (cut,)).timeline.of(0)
        traced = [span.name.replace("_", "-") for span in spans if span.kind == "transfer"]
        assert [name for name in announced if name] == traced
