"""Situations in which a wrong number would look like a right one: what PyTorch's own class does there, and what ours.

Where PyTorch trains on with numbers that nobody meant, ours has to say a sentence; else both have to come to the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.pipelining as pipelining
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib import RunError, launch
from course_lib.mechanisms import pipeline
from course_lib.mechanisms.data_parallel import DataParallel, average_gradients
from course_lib.mechanisms.layerwise import LayerWise
from course_lib.mechanisms.mixed_precision import LossScaler, MasterWeights
from course_lib.mechanisms.schedules import SCHEDULES
from course_lib.mechanisms.sharding import ShardedOptimizer
from course_lib.mechanisms.tensor_parallel import VocabParallelEmbedding, parallelize
from course_lib.model import TinyGPT
from tests.mechanisms.training import gradient_of

Make = Callable[..., Any]
DDP = nn.parallel.DistributedDataParallel


class Averaged(nn.Module):
    """A model whose gradients `average_gradients` averages."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def finish(self) -> None:
        average_gradients(self.module)


def finish(model: nn.Module) -> None:
    """DistributedDataParallel has finished when backward() returns."""
    if not isinstance(model, DDP):
        model.finish()  # type: ignore[operator]


def one_weight(rank: int, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """A model whose gradient is the mean of its inputs."""
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.zeros_(model.weight)
    return model


def gradient(model: nn.Module) -> list[float]:
    return gradient_of(next(model.parameters())).to_dense().flatten().tolist()


def weight(model: nn.Module) -> list[float]:
    return next(model.parameters()).flatten().tolist()


def number(value: float) -> Tensor:
    return torch.full((1, 1), float(value))


def as_it_is(model: Any) -> Any:
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


# Averaging


def large_gradients(rank: int, make: Make, dtype: torch.dtype, size: float) -> list[float]:
    model = make(one_weight(rank, dtype))
    model(torch.full((1, 1), size, dtype=dtype)).sum().backward()
    finish(model)
    return gradient(model)


def shares_that_grow(rank: int, make: Make) -> list[list[float]]:
    model, seen = make(one_weight(rank, torch.float16)), []
    for size in (1, 8):
        model.zero_grad()
        outputs = model(torch.full((size, 1), 40_000.0, dtype=torch.float16))
        outputs.float().mean().backward()
        finish(model)
        seen.append(gradient(model))
    return seen


def finish_before_backward(rank: int, make: Make) -> list[float]:
    model = make(one_weight(rank))
    optimizer = sgd(model)
    loss = model(number(1 + 2 * rank)).sum()
    finish(model)
    loss.backward()
    optimizer.step()
    return weight(model)


def never_finish(rank: int, make: Make, optimize: Make = torch.optim.SGD) -> list[float]:
    model = make(one_weight(rank))
    optimizer = optimize(model.parameters(), lr=1.0)
    model(number(1 + 2 * rank)).sum().backward()
    optimizer.step()
    return weight(model)


def step_with_gradients_that_were_accumulated(rank: int, make: Make) -> list[float]:
    model = make(one_weight(rank))
    with model.no_sync():
        model(number(1 + 2 * rank)).sum().backward()
    sgd(model).step()
    return gradient(model)


def finish_before_the_last_backward(rank: int, make: Make) -> list[float]:
    model = make(one_weight(rank))
    with model.no_sync():
        model(number(1 + 2 * rank)).sum().backward()
    loss = model(number(1 + 2 * rank)).sum()
    finish(model)
    loss.backward()
    return gradient(model)


def two_passes_before_one_backward(rank: int, make: Make, sizes: Sequence[tuple[int, int]]) -> list[float]:
    model = make(one_weight(rank))
    first, second = (torch.full((size, 1), float(rank)) for size in sizes[rank])
    (model(first).mean() + model(second).mean()).backward()
    finish(model)
    return gradient(model)


def evaluation_between(rank: int, make: Make) -> list[float]:
    """Evaluating in between leaves no trace, and the sizes of earlier steps do not count."""
    model = make(one_weight(rank))
    for size in (2, 3):
        model.zero_grad()
        with torch.no_grad():
            model(torch.ones(7, 1))
        model(torch.full((size, 1), float(rank))).mean().backward()
        finish(model)
    return gradient(model)


def sparse_gradients(rank: int, make: Make) -> list[float]:
    model = make(nn.Embedding(3, 1, sparse=True))
    model(torch.tensor([rank, rank, 2])).sum().backward()
    finish(model)
    return gradient(model)


class TwoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = one_weight(0), one_weight(0)

    def forward(self, x: Tensor, without_first: bool = False) -> Tensor:
        return self.second(x) if without_first else self.first(x) + self.second(x)


def train_two_weights(rank: int, make: Make, freezes: bool) -> list[bool]:
    """The first weight has no gradient, in later steps or in any; the second one's is of zeros."""
    net = TwoWeights()
    nn.init.ones_(net.first.weight)
    model = make(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5, weight_decay=0.5)
    if freezes:
        model(number(1)).sum().backward()
        finish(model)
        optimizer.step()
        net.first.weight.requires_grad_(False)
    before = net.first.weight.item()
    nn.init.ones_(net.second.weight)
    for _ in range(2):
        optimizer.zero_grad()
        model(number(0), without_first=not freezes).sum().backward()
        finish(model)
        optimizer.step()
    return [net.first.weight.item() == before, net.second.weight.item() != 1]


class InADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = one_weight(0)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.weight(batch["inputs"])


def equal_shares_in_a_dict(rank: int, make: Make) -> list[float]:
    model = make(InADict())
    model({"inputs": torch.full((2, 1), float(rank))}).mean().backward()
    finish(model)
    return gradient(model)


def other_buffers(rank: int, make: Make) -> None:
    make(nn.BatchNorm1d(3, track_running_stats=rank == 0))


def other_buffer_sizes(rank: int, make: Make) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("mask", torch.ones(3 + 2 * rank))
    make(model)


def other_dtypes(rank: int, make: Make) -> None:
    make(nn.Linear(2, 2, dtype=(torch.float32, torch.float64)[rank]))


# Embeddings


def train_embedding(rank: int, make: Make, options: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    embedding = make(nn.Embedding(4, 1, **options))
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    return gradient(embedding)


def parallelize_with_padding(rank: int, make: Make) -> None:
    model = TinyGPT()
    embedding: Any = model.blocks[0]
    embedding.token = nn.Embedding(90, 4, padding_idx=0)
    make(model)


# Pipelines


def theirs_in_a_pipeline(rank: int, stage: nn.Module, x: Tensor, loss_fn: Any, scale_grads: bool) -> None:
    held = pipelining.PipelineStage(stage, rank, 2, torch.device("cpu"))
    runtime = pipelining.ScheduleGPipe(held, 4, loss_fn=loss_fn, scale_grads=scale_grads)
    runtime.step(*([x] if rank == 0 else []), target=x if rank == 1 else None)


def ours_in_a_pipeline(rank: int, stage: nn.Module, x: Tensor, loss_fn: Any, scale_grads: bool) -> None:
    pipeline.run_schedule(SCHEDULES["gpipe"](2, 4), {rank: stage}, x, x, loss_fn)


def says_sum(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    function.reduction = "sum"  # type: ignore[attr-defined]
    return function


@says_sum
def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def pipeline_gradient(rank: int, run: Make, loss_fn: Any, scale_grads: bool) -> list[float]:
    stage = one_weight(rank)
    nn.init.constant_(stage.weight, 2.0)
    run(rank, stage, torch.ones(8, 1), loss_fn, scale_grads)
    return gradient(stage)


# What cannot be passed on, and what cannot be trained


@dataclass
class Output:
    hidden: Tensor


class ReturnsADataclass(nn.Module):
    def forward(self, x: Tensor) -> Output:
        return Output(x)


class TakesADataclass(nn.Module):
    def forward(self, output: Output) -> Tensor:
        return output.hidden


def pass_a_dataclass_on(rank: int, make: Make) -> None:
    make(nn.Sequential(nn.Sequential(nn.Linear(1, 1), ReturnsADataclass()), TakesADataclass()))(torch.ones(1, 1))


def train_one_tensor(rank: int, make: Make) -> None:
    make(nn.Parameter(torch.ones(2, 2)))


@dataclass(frozen=True)
class Situation:
    """A program on two ranks, given our class and given theirs; a text is what an error has to say."""

    program: Make
    theirs: Make
    ours: Make
    both: Any = None
    they: Any = None  # where they differ
    we: str | None = None
    ranks: int = 2


def replicas(program: Make, both: Any = None, **outcomes: Any) -> Situation:
    return Situation(program, DDP, DataParallel, both, **outcomes)


HALF = torch.float16
LARGE = [[40_000.0]] * 2
FORGOTTEN = r"step\(\) came before finish\(\), .* call finish\(\) after backward\(\)"
TOO_EARLY = r"finish\(\) was called before backward\(\)"
MISMATCH = "call broadcast with different tensors"  # as `launch` says; by itself PyTorch hangs, dies, or trains on
SITUATIONS: dict[str, Situation] = {
    "16 bits": replicas(functools.partial(large_gradients, dtype=HALF, size=40_000), LARGE),
    "16 bits, in place": Situation(functools.partial(large_gradients, dtype=HALF, size=40_000), DDP, Averaged, LARGE),
    "16 bits, three ranks": replicas(
        functools.partial(large_gradients, dtype=torch.bfloat16, size=2.0**127), [[2.0**127]] * 3, ranks=3
    ),
    "16 bits, growing shares": replicas(shares_that_grow, [[[40_000.0]] * 2] * 2),
    "finish first": replicas(finish_before_backward, they=[[-2.0]] * 2, we=TOO_EARLY),
    "finish before the last backward": replicas(finish_before_the_last_backward, they=[[4.0]] * 2, we=TOO_EARLY),
    "no finish": replicas(never_finish, they=[[-2.0]] * 2, we=FORGOTTEN),
    "no finish, master weights": replicas(
        functools.partial(
            never_finish, optimize=lambda parameters, lr: MasterWeights(parameters, torch.optim.SGD, lr=lr)
        ),
        they=[[-2.0]] * 2,
        we=FORGOTTEN,
    ),
    "no finish, sharded optimizer": replicas(
        functools.partial(
            never_finish,
            optimize=lambda parameters, lr: ShardedOptimizer(parameters, torch.optim.SGD, lr=lr),
        ),
        they=[[-2.0]] * 2,
        we=FORGOTTEN,
    ),
    "step after no_sync": replicas(step_with_gradients_that_were_accumulated, they=[[1.0], [3.0]], we=FORGOTTEN),
    "two equal passes": replicas(
        functools.partial(two_passes_before_one_backward, sizes=[(2, 2), (2, 2)]), [[1.0]] * 2
    ),
    "two unequal passes": replicas(
        functools.partial(two_passes_before_one_backward, sizes=[(3, 2), (1, 2)]),
        they=[[1.0]] * 2,  # the means over all samples make 1/4 + 2/4
        we="a forward pass with (3|1) samples and one with 2 came before one backward",
    ),
    "evaluation in between": replicas(evaluation_between, [[0.5]] * 2),
    "sparse gradients": replicas(sparse_gradients, [[1.0, 1.0, 1.0]] * 2),
    "sparse gradients, in place": Situation(sparse_gradients, DDP, Averaged, [[1.0, 1.0, 1.0]] * 2),
    **{
        name: Situation(
            functools.partial(train_two_weights, freezes=freezes),
            functools.partial(DDP, find_unused_parameters=True),
            DataParallel,
            [[True, True]] * 2,
        )
        for name, freezes in (("frozen later", True), ("never used", False))
    },
    "a dict": replicas(equal_shares_in_a_dict, [[0.5]] * 2),
    "one bucket for all": Situation(
        functools.partial(large_gradients, dtype=torch.float32, size=2.0),
        functools.partial(DDP, bucket_cap_mb=None),
        functools.partial(DataParallel, bucket_mb=None),
        [[2.0]] * 2,
    ),
    "other buffers": replicas(
        other_buffers, they=MISMATCH, we=r"running_mean \(a buffer\) \[3\] is listed only on rank 0"
    ),
    "longer buffers": replicas(
        other_buffer_sizes, they=MISMATCH, we=r"mask \(a buffer\) \[3\] is listed only on rank 0"
    ),
    "other dtypes": replicas(
        other_dtypes, they=MISMATCH, we=r"weight \[2, 2\] is listed only on rank 0 of 2 as torch.float32"
    ),
    "padding": Situation(
        functools.partial(train_embedding, options={"padding_idx": 1}),
        as_it_is,
        VocabParallelEmbedding,
        they=[[0.0, 0.0, 0.0, 1.0]] * 2,
        we="embedding has padding_idx=1, .* make it with padding_idx=None",
    ),
    "norms": Situation(
        functools.partial(train_embedding, options={"max_norm": 0.1}),
        as_it_is,
        VocabParallelEmbedding,
        they=[[0.0, 2.0, 0.0, 1.0]] * 2,
        we="embedding has max_norm=0.1",
    ),
    "frequencies": Situation(
        functools.partial(train_embedding, options={"scale_grad_by_freq": True}),
        as_it_is,
        VocabParallelEmbedding,
        they=[[0.0, 1.0, 0.0, 1.0]] * 2,
        we="embedding has scale_grad_by_freq=True, .* make it with scale_grad_by_freq=False",
    ),
    "padding in a model": Situation(
        parallelize_with_padding, as_it_is, parallelize, they=[None, None], we="embedding has padding_idx=0"
    ),
    "a sum": Situation(
        functools.partial(pipeline_gradient, loss_fn=nn.MSELoss(reduction="sum"), scale_grads=False),
        theirs_in_a_pipeline,
        ours_in_a_pipeline,
        [[96.0]] * 2,  # 8 samples x 2 (2 x 2 - 1) x 2
    ),
    "a sum by hand": Situation(
        functools.partial(pipeline_gradient, loss_fn=squares, scale_grads=False),
        theirs_in_a_pipeline,
        ours_in_a_pipeline,
        [[96.0]] * 2,
    ),
    "a sum, bound": Situation(
        functools.partial(pipeline_gradient, loss_fn=functools.partial(F.mse_loss, reduction="sum"), scale_grads=False),
        theirs_in_a_pipeline,
        ours_in_a_pipeline,
        [[96.0]] * 2,
    ),
    "a mean": Situation(
        functools.partial(pipeline_gradient, loss_fn=F.mse_loss, scale_grads=True),
        theirs_in_a_pipeline,
        ours_in_a_pipeline,
        [[12.0]] * 2,
    ),
    "a dataclass": Situation(
        pass_a_dataclass_on,
        as_it_is,
        LayerWise,
        they=[None, None],
        we="rank 0's last block returned Output, and only a single tensor can be passed on",
    ),
    "one tensor": Situation(
        train_one_tensor,
        functools.partial(torch.optim.SGD, lr=1.0),
        functools.partial(MasterWeights, optimizer_cls=torch.optim.SGD, lr=1.0),
        they="params argument given to the optimizer should be an iterable",
        we=r"parameters is one tensor, \[2, 2\]; give a list",
    ),
    "one tensor to unscale": Situation(
        train_one_tensor,
        functools.partial(torch.optim.SGD, lr=1.0),
        LossScaler().unscale,
        they="params argument given to the optimizer should be an iterable",
        we=r"parameters is one tensor, \[2, 2\]; give a list",
    ),
}


def outcome(program: Make, kind: Make, n: int) -> Any:
    try:
        return launch(program, n, (kind,), device="cpu", timeout=20).results
    except RunError as error:
        return str(error)


@pytest.mark.parametrize("name", SITUATIONS)
def test_ours_comes_to_what_pytorch_comes_to_or_says_why_not(name: str) -> None:
    situation = SITUATIONS[name]
    theirs, ours = (outcome(situation.program, kind, situation.ranks) for kind in (situation.theirs, situation.ours))
    for found, expected in ((theirs, situation.they), (ours, situation.we)):
        if isinstance(expected, str):
            assert isinstance(found, str) and re.search(expected, found), found
        else:
            assert found == (situation.both if expected is None else expected)
