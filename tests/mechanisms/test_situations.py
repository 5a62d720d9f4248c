"""Situations in which a wrong number would look like a right one: what PyTorch's own classes do there, and what ours.

Each is a short piece of training. It runs on two ranks with what PyTorch ships and with ours, and in one process with
plain AdamW and whole minibatches, which is what is right. A way ends "right", "wrong", or refuses in a sentence.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW

from course_lib import RunError, launch
from course_lib.mechanisms.data_parallel import DataParallel
from course_lib.mechanisms.sharding import FullySharded, ShardedOptimizer
from tests.mechanisms.training import State, differ_by_at_most

ROUNDINGS = 200  # six steps of Adam, in which shares are added up in another order
OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.5, "eps": 1e-3}
BUCKET_MB = 5e-5  # 13 numbers: some parameters share a bucket, also those of two layers

DDP, ZERO, FSDP = "DistributedDataParallel", "ZeroRedundancyOptimizer", "fully_shard"
LOCAL, SHARDED = "ShardedOptimizer, local gradients", "ShardedOptimizer, sharded gradients"
WAYS = (DDP, "DataParallel", ZERO, LOCAL, SHARDED, FSDP, "FullySharded")
OURS = ("DataParallel", LOCAL, SHARDED, "FullySharded")


class Net(nn.Module):
    """Three layers, of which the first or the second one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)])

    def forward(self, x: Tensor, without: int | None = None) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == without else layer(x).tanh()
        return x


class Twice(Net):
    """Uses its middle layer twice."""

    def forward(self, x: Tensor, without: int | None = None) -> Tensor:
        first, middle, last = self.layers
        return last(middle(middle(first(x)).tanh()).tanh())


class Training:
    """A model and an optimizer in one of the ways, and what one does with them."""

    def __init__(self, way: str, net: nn.Module | None = None) -> None:
        synchronizes = way not in ("plain", FSDP)
        self.way, self.net = way, net or seeded(Net, dist.get_rank() if synchronizes else 0)
        self.model = wrapped(way, self.net)
        parameters: Any = self.model.parameters()
        if way == ZERO:
            self.optimizer: Any = ZeroRedundancyOptimizer(parameters, AdamW, **OPTIONS)
        elif way in (LOCAL, SHARDED):
            gradients: Any = "local" if way == LOCAL else "sharded"
            self.optimizer = ShardedOptimizer(parameters, AdamW, gradients=gradients, bucket_mb=BUCKET_MB, **OPTIONS)
        else:
            self.optimizer = AdamW(parameters, **OPTIONS)

    def loss(self, step: int, sizes: tuple[int, int] = (4, 4), **kwargs: Any) -> Tensor:
        x, y = (torch.randn(8, width, generator=torch.Generator().manual_seed(step + 1)) for width in (3, 1))
        if self.way != "plain":
            x, y = x.split(sizes)[dist.get_rank()], y.split(sizes)[dist.get_rank()]
        return (self.model(x, **kwargs) - y).square().mean()

    def finish(self) -> None:
        """The others have finished when backward() returns."""
        if isinstance(self.model, DataParallel):
            self.model.finish()
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.finish()

    def update(self) -> None:
        self.finish()
        self.optimizer.step()

    def step(self, step: int, **kwargs: Any) -> None:
        self.optimizer.zero_grad()
        self.loss(step, **kwargs).backward()
        self.update()

    def weights(self) -> State:
        model = self.model if self.way == "FullySharded" else self.net
        return {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}


Start = Callable[..., Training]


def wrapped(way: str, net: nn.Module) -> nn.Module:
    if way in (DDP, ZERO):
        return nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    if way == FSDP:
        for layer in net.get_submodule("layers").children():
            fully_shard(layer)
        fully_shard(net)
    if way == "DataParallel":
        return DataParallel(net, bucket_mb=BUCKET_MB)
    return FullySharded(net) if way == "FullySharded" else net


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor().detach() if hasattr(tensor, "full_tensor") else tensor.detach()


def seeded(net: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return net()


# What is right


def tied_and_frozen(start: Start) -> State:
    net = seeded(Net)
    net.get_submodule("layers.1").weight = net.get_parameter("layers.0.weight")
    net.get_parameter("layers.0.bias").requires_grad_(False)
    training = start(net=net)
    for step in range(3):
        training.step(step)
    return training.weights()


def a_layer_used_twice(start: Start) -> State:
    training = start(net=seeded(Twice))
    training.step(0)
    training.step(1)
    return training.weights()


def a_learning_rate_is_changed(start: Start) -> State:
    training = start()
    for step in range(2):
        training.step(step)
        training.optimizer.param_groups[0]["lr"] = 0.5
    return training.weights()


def gradients_of_zero(start: Start) -> State:
    """Which are gradients, so weights decay; of either sign, and with the sign that says for us that there is none."""
    training = start()
    for zero in (0.0, -0.0, 0.0):
        training.optimizer.zero_grad()
        for parameter in training.net.parameters():
            parameter.grad = zero * torch.ones_like(parameter)
        training.optimizer.step()
    return training.weights()


def zero_grad_of_the_model(start: Start) -> State:
    training = start()
    for step in range(3):
        training.net.zero_grad()
        training.loss(step).backward()
        training.update()
    return training.weights()


def forgotten_zero_grad(start: Start) -> State:
    training = start()
    for step in range(3):
        training.loss(step).backward()
        training.update()
    return training.weights()


# What has no gradient is left alone


def frozen_later(start: Start) -> State:
    training = start()
    training.step(0)
    training.net.get_parameter("layers.1.weight").requires_grad_(False)
    training.step(1)
    training.step(2)
    return training.weights()


def never_used(start: Start) -> State:
    training = start()
    training.step(0, without=1)
    training.step(1, without=1)
    return training.weights()


def used_now_and_then(start: Start) -> State:
    training = start()
    for step, without in enumerate((None, 0, 1, None, 1, None)):
        training.step(step, without=without)
    return training.weights()


# The order of calls


def several_backward_passes_of_different_layers(start: Start) -> State:
    training = start()
    for step in range(2):
        training.optimizer.zero_grad()
        for micro_batch, without in enumerate((None, 0, 1, None, 1)):
            training.loss(5 * step + micro_batch, without=without).backward()
        training.update()
    return training.weights()


def forgotten_finish(start: Start) -> State:
    training = start()
    for step in range(2):
        training.optimizer.zero_grad()
        training.loss(step).backward()
        training.optimizer.step()
    return training.weights()


def finish_before_backward(start: Start) -> State:
    training = start()
    for step in range(2):
        training.optimizer.zero_grad()
        loss = training.loss(step)
        training.finish()
        loss.backward()
        training.optimizer.step()
    return training.weights()


# Shares of different size


def shares_of_different_size(start: Start) -> State:
    training = start()
    for step, sizes in enumerate(((3, 5), (7, 1), (8, 0))):
        training.step(step, sizes=sizes)
    return training.weights()


def two_unequal_passes_before_one_backward(start: Start) -> State:
    training = start()
    (training.loss(0, sizes=(3, 5)) + training.loss(1, sizes=(5, 3))).backward()
    training.update()
    return training.weights()


def two_equal_passes_before_one_backward(start: Start) -> State:
    training = start()
    (training.loss(0) + training.loss(1)).backward()
    training.update()
    return training.weights()


def is_right(rank: int, situation: Callable[[Start], State], way: str) -> bool:
    warnings.simplefilter("ignore")
    state = situation(functools.partial(Training, way))
    expected = situation(functools.partial(Training, "plain"))
    try:
        differ_by_at_most(state, expected, ROUNDINGS)
    except AssertionError:
        return False
    return True


def outcome(situation: Callable[[Start], State], way: str) -> str:
    """ "right", "wrong", or how the run ended."""
    try:
        return "right" if all(launch(is_right, 2, (situation, way), timeout=20).results) else "wrong"
    except RunError as error:
        return f"{type(error).__name__}: {error}"


# How a way ends where it is not "right"; None where it does not apply.
TABLE: dict[Callable[[Start], State], dict[str, str | None]] = {
    tied_and_frozen: {FSDP: None},
    a_layer_used_twice: {},
    a_learning_rate_is_changed: {},
    gradients_of_zero: {},
    zero_grad_of_the_model: {},
    forgotten_zero_grad: {SHARDED: None},  # step() has used them up
    frozen_later: {},
    never_used: {},
    used_now_and_then: {},
    several_backward_passes_of_different_layers: {
        "DataParallel": "finish() was not called after the last backward()",
        SHARDED: "a second backward() before finish() or step()",
    },
    forgotten_finish: {"DataParallel": "finish() was not called after the last backward()"},
    finish_before_backward: {
        "DataParallel": "finish() was called before backward()",
        **dict.fromkeys((LOCAL, SHARDED), "backward() came after finish()"),
    },
    shares_of_different_size: {
        DDP: "wrong",
        **dict.fromkeys((ZERO, LOCAL, SHARDED)),
        FSDP: "wrong",
        "FullySharded": "samples and the mean share",
    },
    two_unequal_passes_before_one_backward: {
        DDP: "wrong",
        "DataParallel": "came before one backward",
        **dict.fromkeys((ZERO, LOCAL, SHARDED)),
        FSDP: "wrong",
        "FullySharded": "samples and the mean share",
    },
    two_equal_passes_before_one_backward: {},
}


@pytest.mark.parametrize("situation", TABLE, ids=lambda situation: situation.__name__)
def test_ours_comes_to_what_is_right_or_says_why_not(situation: Callable[[Start], State]) -> None:
    ends: dict[str, str | None] = {**dict.fromkeys(WAYS, "right"), **TABLE[situation]}
    assert "wrong" not in [ends[way] for way in OURS]
    for way, expected in ends.items():
        if expected:
            end = outcome(situation, way)
            assert end == expected if expected in ("right", "wrong") else expected in end, f"{way}: {end}"
