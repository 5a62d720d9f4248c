"""Situations in which sharding could go wrong without a word, with PyTorch's own classes beside ours.

Each is a short piece of training. It runs on two ranks with what PyTorch ships and with ours, and in one process with
plain AdamW and whole minibatches, which is what is right. A way ends "right", "wrong", or refuses in a sentence.
Where PyTorch is silently wrong, ours has to refuse or to be right.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW

from course_lib import RunError, launch
from course_lib.mechanisms.sharding import FullySharded, ShardedOptimizer
from tests.mechanisms.training import State, differ_by_at_most

ROUNDINGS = 200  # six steps of Adam, in which shares are added up in another order
OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.5, "eps": 1e-3}


class Net(nn.Module):
    """Three layers, of which the first or the second one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)])

    def forward(self, x: Tensor, without: int | None = None) -> Any:
        for number, layer in enumerate(self.layers):
            x = x if number == without else layer(x).tanh()
        return x


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class WithScalar(Net):
    """Its last parameter has the shape of Adam's count of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(Scale())


@dataclass
class Answer:
    value: Tensor


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Wrapping(nn.Linear):
    """A layer that does not return a tensor."""

    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__(3, 1)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(super().forward(x))


class NetThatReturns(Net):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers[2] = Wrapping(kind)

    def forward(self, x: Tensor, without: int | None = None) -> Any:
        first, middle, last = self.layers
        return last(middle(first(x).tanh()).tanh())


class Twice(Net):
    """Uses its middle layer twice."""

    def forward(self, x: Tensor, without: int | None = None) -> Tensor:
        first, middle, last = self.layers
        return last(middle(middle(first(x)).tanh()).tanh())


class HalvesItsRate(AdamW):
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            group["lr"] *= 0.5


class Training:
    """A model and an optimizer in one of the ways, and what one does with them."""

    def __init__(self, way: str, net: nn.Module | None = None, optimizer_cls: Any = AdamW, **options: Any) -> None:
        synchronizes = way not in ("plain", "fully_shard")
        self.way, self.net = way, net or seeded(Net, dist.get_rank() if synchronizes else 0)
        self.model: nn.Module = self.net
        if way == "FullySharded":
            self.model = FullySharded(self.net)
        elif way == "fully_shard":
            for layer in self.net.layers:
                fully_shard(layer)
            fully_shard(self.net)
        elif way == "ZeroRedundancyOptimizer":
            self.model = nn.parallel.DistributedDataParallel(self.net, find_unused_parameters=True)
        self.optimizer = self.optimizer_of(self.model.parameters(), optimizer_cls, **options)

    def optimizer_of(self, parameters: Any, optimizer_cls: Any = AdamW, **options: Any) -> Any:
        if self.way == "ZeroRedundancyOptimizer":
            return ZeroRedundancyOptimizer(parameters, optimizer_cls, **OPTIONS)
        if self.way in ("local", "sharded"):
            return ShardedOptimizer(parameters, optimizer_cls, gradients=self.way, **options, **OPTIONS)  # type: ignore
        return optimizer_cls(parameters, **OPTIONS)

    def loss(self, step: int, model: nn.Module | None = None, sizes: tuple[int, int] = (4, 4), **kwargs: Any) -> Tensor:
        x, y = (torch.randn(8, width, generator=torch.Generator().manual_seed(step + 1)) for width in (3, 1))
        if self.way != "plain":
            x, y = x.split(sizes)[dist.get_rank()], y.split(sizes)[dist.get_rank()]
        outputs = (model or self.model)(x, **kwargs)
        return (getattr(outputs, "value", outputs) - y).square().mean()

    def step(self, step: int, model: nn.Module | None = None, **kwargs: Any) -> None:
        self.optimizer.zero_grad()
        self.loss(step, model, **kwargs).backward()
        self.optimizer.step()

    def weights(self) -> State:
        model = self.model if self.way == "FullySharded" else self.net
        return {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}


Start = Callable[..., Training]


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor().detach() if hasattr(tensor, "full_tensor") else tensor.detach()


def seeded(net: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return net()


# What has to be right in any case


def small_buckets(start: Start) -> State:
    training = start(bucket_mb=2e-5)
    for step in range(3):
        training.step(step)
    return training.weights()


def tied_and_frozen(start: Start) -> State:
    net = seeded(Net)
    net.get_submodule("layers.1").weight = net.get_parameter("layers.0.weight")
    net.get_parameter("layers.0.bias").requires_grad_(False)
    training = start(net=net)
    for step in range(3):
        training.step(step)
    return training.weights()


def shares_of_different_size(start: Start) -> State:
    training = start()
    for step, sizes in enumerate(((3, 5), (7, 1), (8, 0))):
        training.step(step, sizes=sizes)
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


# 5. Parameters that somebody replaced


def averaged_weights_are_swapped_in(start: Start) -> State:
    training = start()
    training.step(0)
    for parameter in training.net.parameters():
        parameter.data = 0.5 * parameter.data
    training.step(1)
    training.step(2)
    return training.weights()


def converted_and_back(start: Start) -> State:
    training = start()
    training.net.double().float()
    training.step(0)
    training.step(1)
    return training.weights()


def replaced_by_one_vector(start: Start) -> State:
    training = start()
    training.step(0)
    parameters = list(training.net.parameters())
    nn.utils.vector_to_parameters(0.5 * nn.utils.parameters_to_vector(parameters), parameters)
    training.step(1)
    return training.weights()


def converted_to_double(start: Start) -> State:
    training = start()
    training.step(0)
    training.net.double()
    model = training.model
    training.optimizer.zero_grad()
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    training.optimizer.step()
    return training.weights()


# 6. A sharded model inside another module, or an optimizer of the model itself


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def inside_another_module(start: Start) -> State:
    training = start()
    outer = Outer(training.model)
    training.optimizer = training.optimizer_of(outer.parameters())
    training.step(0, outer)
    training.step(1, outer)
    return {name: whole(tensor) for name, tensor in outer.state_dict().items()}


def an_optimizer_of_the_wrapped_model(start: Start) -> State:
    training = start()
    training.optimizer = training.optimizer_of(training.net.parameters())
    training.step(0)
    training.step(1)
    return training.weights()


# 7. Gradients that somebody else sets to zero


def zero_grad_of_the_model(start: Start) -> State:
    training = start()
    for step in range(3):
        training.net.zero_grad()
        training.loss(step).backward()
        training.optimizer.step()
    return training.weights()


def a_minibatch_is_dropped_by_zero_grad_of_the_model(start: Start) -> State:
    training = start()
    for step in range(3):
        training.loss(step).backward()
        training.net.zero_grad()
        training.loss(step + 3, without=1).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    return training.weights()


def forgotten_zero_grad(start: Start) -> State:
    training = start()
    for step in range(3):
        training.loss(step).backward()
        training.optimizer.step()
    return training.weights()


def several_backward_passes_of_different_layers(start: Start) -> State:
    training = start()
    for step in range(2):
        training.optimizer.zero_grad()
        for micro_batch, without in enumerate((None, 0, 1, None, 1)):
            training.loss(5 * step + micro_batch, without=without).backward()
        training.optimizer.step()
    return training.weights()


# 8. What has no gradient is left alone


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


def thawed_later(start: Start) -> State:
    net = seeded(Net)
    net.get_parameter("layers.1.weight").requires_grad_(False)
    training = start(net=net)
    training.step(0)
    net.get_parameter("layers.1.weight").requires_grad_(True)
    training.step(1)
    return training.weights()


# 2. and 1. States


def state_with_a_hole(start: Start, without: int) -> State:
    net = seeded(Net)
    plain = Training("plain", net)
    for step in range(2):
        plain.step(step, without=without)
    state = copy.deepcopy(plain.optimizer.state_dict())
    training = start(net=net)
    training.optimizer.load_state_dict(state)
    training.step(2)
    training.step(3, without=without)
    return training.weights()


def state_without_the_first(start: Start) -> State:
    return state_with_a_hole(start, 0)


def state_without_a_middle_one(start: Start) -> State:
    return state_with_a_hole(start, 1)


def scalar_in_the_state(start: Start) -> State:
    training = start(net=seeded(WithScalar))
    training.step(0)
    optimizer = training.optimizer
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        for rank in range(2):
            optimizer.consolidate_state_dict(to=rank)
            if rank == dist.get_rank():
                state = optimizer.state_dict()
        optimizer.load_state_dict(state)
    else:
        optimizer.load_state_dict(optimizer.state_dict())
    training.step(1)
    return training.weights()


def weights_are_loaded(start: Start) -> State:
    training = start()
    outer = Outer(training.model)
    outer.load_state_dict({name: 0.5 * tensor for name, tensor in outer.state_dict().items()})
    training.step(0)
    return training.weights()


# 3. and 4. Parameter groups


def an_optimizer_that_sets_its_learning_rate(start: Start) -> State:
    training = start(optimizer_cls=HalvesItsRate)
    for step in range(3):
        training.step(step)
    assert training.optimizer.param_groups[0]["lr"] == OPTIONS["lr"] / 8
    return training.weights()


def a_group_that_is_refused(start: Start) -> State:
    training = start()
    another = nn.Parameter(torch.ones(2))
    try:
        training.optimizer.add_param_group({"params": [another]})
    except ValueError as refusal:
        assert "make a new one with this group, too" in str(refusal)
    training.step(0)
    training.step(1)
    return training.weights()


# 9. finish() at the wrong moment


def finish(training: Training) -> None:
    if isinstance(training.optimizer, ShardedOptimizer):
        training.optimizer.finish()


def backward_after_finish(start: Start) -> State:
    training = start()
    training.loss(0).backward()
    finish(training)
    training.loss(1).backward()
    training.optimizer.step()
    return training.weights()


def finish_before_backward(start: Start) -> State:
    training = start()
    for step in range(2):
        training.optimizer.zero_grad()
        finish(training)
        training.loss(step).backward()
        training.optimizer.step()
    return training.weights()


# 11. Shares of different size


def two_forward_passes_before_one_backward(start: Start) -> State:
    training = start()
    (training.loss(0, sizes=(3, 5)) + training.loss(1, sizes=(5, 3))).backward()
    training.optimizer.step()
    return training.weights()


def two_forward_passes_before_two_backward_passes(start: Start) -> State:
    training = start()
    first, second = training.loss(0, sizes=(3, 5)), training.loss(1, sizes=(5, 3))
    first.backward()
    second.backward()
    training.optimizer.step()
    return training.weights()


def two_equal_shares_before_one_backward(start: Start) -> State:
    training = start()
    (training.loss(0) + training.loss(1)).backward()
    training.optimizer.step()
    return training.weights()


# 14. What is refused, or was hard to understand


def outputs_in_a_dataclass(start: Start) -> State:
    training = start(net=seeded(lambda: NetThatReturns(Answer)))
    training.step(0)
    training.step(1)
    return training.weights()


def outputs_in_an_object(start: Start) -> State:
    training = start(net=seeded(lambda: NetThatReturns(Box)))
    training.step(0)
    training.step(1)
    return training.weights()


def a_layer_used_twice(start: Start) -> State:
    training = start(net=seeded(Twice))
    training.step(0)
    training.step(1)
    return training.weights()


def backward_is_interrupted(start: Start) -> State:
    training = start()

    def interrupt(_: Tensor) -> None:
        raise KeyboardInterrupt

    handle = training.net.get_submodule("layers.1").register_forward_hook(
        lambda module, inputs, output: output.register_hook(interrupt) and None
    )
    with pytest.raises(KeyboardInterrupt):
        training.loss(0).backward()
    handle.remove()
    training.step(1)
    training.step(2)
    return training.weights()


def dtypes_differ(start: Start) -> State:
    net = seeded(Net)
    return start(net=net.double() if dist.get_rank() else net).weights()


def buffers_differ(start: Start) -> State:
    net = seeded(Net)
    net.register_buffer("mean", torch.zeros(3 + dist.get_rank()))
    return start(net=net).weights()


def sparse_gradients(start: Start) -> State:
    training = start(net=nn.ModuleDict({"layers": nn.ModuleList([nn.Embedding(4, 3, sparse=True)])}))
    training.net.get_submodule("layers.0")(torch.tensor([1, 2])).sum().backward()
    training.optimizer.step()
    return training.weights()


def one_tensor_for_a_list(start: Start) -> State:
    training = start()
    training.optimizer = training.optimizer_of(nn.Parameter(torch.ones(3)))
    return training.weights()


def one_bucket_for_all(start: Start) -> State:
    training = start(bucket_mb=None)
    training.step(0)
    training.step(1)
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
        return "right" if all(launch(is_right, 2, (situation, way), device="cpu", timeout=20).results) else "wrong"
    except RunError as error:
        return f"{type(error).__name__}: {error}"


LATE = "backward() came after finish()"
UNEQUAL = "samples and the mean share"
RIGHT = ("right",) * 4
OPTIMIZER = ("right", "right", None, None)
NO = None  # does not apply

# What ZeroRedundancyOptimizer and ShardedOptimizer do, then what fully_shard and FullySharded do.
TABLE: list[tuple[Callable[[Start], State], tuple[str | None, str | None, str | None, str | None]]] = [
    (small_buckets, RIGHT),
    (tied_and_frozen, ("right", "right", NO, "right")),
    (shares_of_different_size, (NO, NO, "wrong", UNEQUAL)),
    (a_learning_rate_is_changed, RIGHT),
    (gradients_of_zero, RIGHT),
    (averaged_weights_are_swapped_in, ("right", "right", "wrong", "right")),
    (converted_and_back, ("wrong", "right", "right", "right")),
    (replaced_by_one_vector, ("right", "right", "Cannot flatten unevenly sharded tensor", "right")),
    (converted_to_double, ("expected dtype", "convert the model first", "dtype double", "convert the model first")),
    (inside_another_module, (NO, NO, "right", "right")),
    (an_optimizer_of_the_wrapped_model, (NO, NO, "right", "right")),
    (zero_grad_of_the_model, RIGHT),
    (a_minibatch_is_dropped_by_zero_grad_of_the_model, RIGHT),
    (forgotten_zero_grad, RIGHT),
    (several_backward_passes_of_different_layers, RIGHT),
    (frozen_later, RIGHT),
    (never_used, RIGHT),
    (used_now_and_then, RIGHT),
    (thawed_later, ("wrong", "was frozen when ShardedOptimizer", "right", "was frozen when FullySharded")),
    (state_without_the_first, OPTIMIZER),
    (state_without_a_middle_one, OPTIMIZER),
    (scalar_in_the_state, ("right", "right", "doesn't support scalar parameters", "right")),
    (weights_are_loaded, ("right", "right", "right", "load the state into the plain model, and shard it then")),
    (an_optimizer_that_sets_its_learning_rate, RIGHT),
    (a_group_that_is_refused, OPTIMIZER),
    (backward_after_finish, ("right", LATE, NO, NO)),
    (finish_before_backward, ("right", LATE, NO, NO)),
    (two_forward_passes_before_one_backward, (NO, NO, "wrong", UNEQUAL)),
    (two_forward_passes_before_two_backward_passes, (NO, NO, "wrong", UNEQUAL)),
    (two_equal_shares_before_one_backward, RIGHT),
    (outputs_in_a_dataclass, RIGHT),
    (
        outputs_in_an_object,
        ("ready only once", "right", "storage of size 0", "a block returned Box, in which no tensor is found"),
    ),
    (a_layer_used_twice, RIGHT),
    (backward_is_interrupted, ("finished reduction", "right", "wrong", "the last backward() was interrupted")),
    (
        dtypes_differ,
        (
            "different tensors",
            "listed only on rank 0 of 2",
            "different tensors",
            "as torch.float32; all ranks need the same ones",
        ),
    ),
    (buffers_differ, (NO, NO, "right", "mean (a buffer) [3] is listed only on rank 0 of 2")),
    (sparse_gradients, ("sparse", "a gradient is sparse", NO, NO)),
    (one_tensor_for_a_list, ("should be an iterable", "should be an iterable of Tensors", NO, NO)),
    (one_bucket_for_all, OPTIMIZER),
]
WAYS = [("ZeroRedundancyOptimizer",), ("local", "sharded"), ("fully_shard",), ("FullySharded",)]


@pytest.mark.parametrize(("situation", "expected"), TABLE, ids=lambda part: getattr(part, "__name__", ""))
def test_what_pytorch_does_and_what_ours_does(situation: Callable[[Start], State], expected: tuple) -> None:
    for words, ways in zip(expected, WAYS, strict=True):
        for way in ways if words else ():
            end = outcome(situation, way)
            assert end == words if words in ("right", "wrong") else words in end, f"{way}: {end}"


def test_nothing_of_ours_is_silently_wrong() -> None:
    assert all("wrong" not in (ours, ours_sharded) for _, (_, ours, _, ours_sharded) in TABLE)
