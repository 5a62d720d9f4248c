"""Replicas and shards, against one process that has the whole minibatch and against what PyTorch ships.

Every rank builds its model from a seed of its own, so nothing here passes without the first synchronization.

Where the arithmetic is the same in the same order, bits have to be equal: with two ranks the only sum between them
is a + b = b + a. Optimizers on flat tensors may group elements into vector instructions differently, with a
multiply-add fused here and not there: one rounding more or less in each of a handful of operations per step, which
`nearly_equal` allows. Elsewhere sums run in another order. A gradient is a sum over samples x positions, of products
that are themselves sums as long as the widest layer, and n numbers of rounding error eps make an error of at most n eps
relative to the sum of magnitudes. `close` allows that relative to the largest number in the tensor.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from course_lib import data, launch
from course_lib.mechanisms import batches
from course_lib.mechanisms.data_parallel import DataParallel, average_gradients
from course_lib.mechanisms.sharding import FullySharded, ShardedOptimizer
from tests.mechanisms.training import (
    CONFIG,
    F32,
    F64,
    OPTIMIZERS,
    State,
    build,
    differ_by_at_most,
    equal,
    make_optimizer,
    minibatch,
    train_alone,
)

STEPS = 3
SAMPLES = 12
SUM_LENGTH = SAMPLES * CONFIG.sequence + CONFIG.ffn_width
ROUNDINGS = 16  # in one element's update with Adam, generously
EVERYTHING = "tied frozen uneven"
REPLICAS = ("average_gradients", "DataParallel")
WAYS = (*REPLICAS, "ZeRO-1", "ZeRO-1, averaged", "ZeRO-2", "FullySharded")
AVERAGED = ("average_gradients", "ZeRO-1, averaged")
TAKE_SHARES_TO_BE_EQUAL = ("ZeRO-1", "ZeRO-2", "DistributedDataParallel", "ZeroRedundancyOptimizer", "fully_shard")
THEIRS = {
    "DistributedDataParallel": REPLICAS,
    "ZeroRedundancyOptimizer": ("ZeRO-1", "ZeRO-2"),
    "fully_shard": ("FullySharded",),
}
PAIRS = [(F32, 2, "SGD"), (F64, 2, "Adam"), (F32, 4, "Adam"), (F64, 4, "SGD")]  # every two settings meet
every_way = pytest.mark.parametrize("way", WAYS)


def samples_of(case: str, step: int) -> tuple[Tensor, Tensor]:
    return minibatch(step, SAMPLES - 1 if "uneven" in case else SAMPLES)


def close(state: State, reference: State) -> None:
    differ_by_at_most(state, reference, STEPS * SUM_LENGTH)


def nearly_equal(state: State, reference: State) -> None:
    differ_by_at_most(state, reference, STEPS * ROUNDINGS)


def alone(case: str, dtype: torch.dtype, optimizer_name: str) -> State:
    model = build(case, dtype)
    train_alone(model, optimizer_name, [samples_of(case, step) for step in range(STEPS)])
    return model.state_dict()


def train_on_shares_in_turn(case: str, dtype: torch.dtype, optimizer_name: str, n: int) -> State:
    """The reference for bits: one process that computes the ranks' gradients one after the other and adds them up."""
    model = build(case, dtype)
    optimizer = make_optimizer(optimizer_name, model)
    for step in range(STEPS):
        total: State = {}
        for inputs, targets in batches.split(samples_of(case, step), n):
            optimizer.zero_grad()
            data.answer_loss(model(inputs), targets).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    total[name] = total.get(name, 0) + parameter.grad
        for name, gradient in total.items():
            model.get_parameter(name).grad = gradient / n
        optimizer.step()
    return model.state_dict()


def wrapped(way: str, net: nn.Module, bucket_mb: float, overlap: bool) -> nn.Module:
    if way == "average_gradients":
        for parameter in net.parameters():
            dist.broadcast(parameter.detach(), src=0)
    if way == "fully_shard":
        for block in list(net.get_submodule("blocks").children())[1:-1]:  # the ends may be tied
            fully_shard(block)
        fully_shard(net)
    if way in ("DistributedDataParallel", "ZeroRedundancyOptimizer"):
        return nn.parallel.DistributedDataParallel(net)
    if way == "DataParallel":
        return DataParallel(net, bucket_mb=bucket_mb, overlap=overlap)
    return FullySharded(net) if way == "FullySharded" else net


def optimizer_of(way: str, model: nn.Module, name: str, bucket_mb: float) -> Any:
    kind, options = OPTIMIZERS[name]
    if way.startswith("ZeRO-"):
        gradients: Any = "sharded" if way == "ZeRO-2" else "local"
        return ShardedOptimizer(model.parameters(), kind, gradients=gradients, bucket_mb=bucket_mb, **options)
    if way == "ZeroRedundancyOptimizer":
        return ZeroRedundancyOptimizer([p for p in model.parameters() if p.requires_grad], kind, **options)
    return make_optimizer(name, model)


def train(
    rank: int,
    way: str,
    case: str,
    dtype: torch.dtype,
    optimizer_name: str,
    bucket_mb: float = 0.004,
    overlap: bool = True,
) -> State:
    warnings.simplefilter("ignore")
    net = build(case, dtype, seed=0 if way == "fully_shard" else rank)  # which does not synchronize
    model = wrapped(way, net, bucket_mb, overlap)
    optimizer, n = optimizer_of(way, model, optimizer_name, bucket_mb), dist.get_world_size()
    for step in range(STEPS):
        batch = samples_of(case, step)
        inputs, targets = batches.split(batch, n)[rank]
        optimizer.zero_grad()
        loss = data.answer_loss(model(inputs), targets)
        if way in TAKE_SHARES_TO_BE_EQUAL:  # so the loss has to carry the weight of this one
            loss = loss * (len(inputs) * n / len(batch[0]))
        loss.backward()
        if way in AVERAGED:
            average_gradients(net, samples=len(inputs) if "uneven" in case else None)
        if isinstance(model, DataParallel):
            model.finish()
        optimizer.step()
    state = model.state_dict() if way == "FullySharded" else net.state_dict()
    return {name: whole(tensor).detach().clone() for name, tensor in state.items()}


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@functools.cache
def on_ranks(n: int, way: str, case: str, *args: Any) -> list[State]:
    """Run once, however many tests look at it. FullySharded wants equal shares, and so does who is compared with it."""
    return launch(train, n, (way, possible(way, case), *args)).results


def possible(way: str, case: str) -> str:
    return case.replace(" uneven", "") if way in ("FullySharded", "fully_shard") else case


@every_way
@pytest.mark.parametrize(("dtype", "n", "optimizer_name"), PAIRS, ids=str)
def test_training_is_that_of_one_process_with_the_whole_minibatch(
    way: str, dtype: torch.dtype, n: int, optimizer_name: str
) -> None:
    reference = alone(possible(way, EVERYTHING), dtype, optimizer_name)
    for state in on_ranks(n, way, EVERYTHING, dtype, optimizer_name):
        close(state, reference)


@every_way
@pytest.mark.parametrize(
    ("case", "dtype", "optimizer_name"), [("plain", F64, "SGD"), ("tied frozen", F32, "Adam")], ids=str
)
def test_two_ranks_get_the_bits_of_one_process_that_does_their_shares_in_turn(
    way: str, case: str, dtype: torch.dtype, optimizer_name: str
) -> None:
    reference = train_on_shares_in_turn(case, dtype, optimizer_name, 2)
    for state in on_ranks(2, way, case, dtype, optimizer_name):
        (equal if way in REPLICAS else nearly_equal)(state, reference)


@pytest.mark.parametrize("theirs", THEIRS)
def test_training_is_that_of_what_pytorch_ships(theirs: str) -> None:
    for n, optimizer_name in ((2, "Adam"), (4, "SGD")):
        reference = on_ranks(n, theirs, EVERYTHING, F64, optimizer_name)[0]
        for way in THEIRS[theirs]:
            close(on_ranks(n, way, EVERYTHING, F64, optimizer_name)[0], reference)


def test_two_replicas_have_the_bits_of_distributed_data_parallel() -> None:
    reference = on_ranks(2, "DistributedDataParallel", "plain", F64, "SGD")[0]
    for way in REPLICAS:
        equal(on_ranks(2, way, "plain", F64, "SGD")[0], reference)


@every_way
def test_ranks_hold_the_same_bits_after_training(way: str) -> None:
    first, *others = on_ranks(4, way, EVERYTHING, F32, "Adam")
    for state in others:
        equal(state, first)


def test_overlap_changes_when_gradients_travel_and_not_a_bit_of_them() -> None:
    with_overlap = on_ranks(4, "DataParallel", EVERYTHING, F32, "Adam")[0]
    equal(on_ranks(4, "DataParallel", EVERYTHING, F32, "Adam", 0.004, False)[0], with_overlap)


@pytest.mark.parametrize("bucket_mb", [1e-9, 25])
@pytest.mark.parametrize("way", ["DataParallel", "ZeRO-1", "ZeRO-2"])
def test_the_size_of_buckets_does_not_change_what_is_learned(way: str, bucket_mb: float) -> None:
    reference = alone(EVERYTHING, F64, "SGD")
    for state in on_ranks(3, way, EVERYTHING, F64, "SGD", bucket_mb):
        close(state, reference)
