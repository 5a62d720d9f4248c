"""What the tests that train share: a model, data, optimizers, and how two states of a model are compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from course_lib import data
from course_lib.model import GPTConfig, TinyGPT

State = dict[str, Tensor]
DTYPES = F32, F64 = [torch.float32, torch.float64]
CONFIG = GPTConfig(layers=2, hidden=16, heads=2)
FROZEN = ("blocks.1.attention.query.weight", "blocks.0.token.weight")

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    # The gradient of a key's bias is zero but for rounding; with the usual eps of 1e-8, Adam would blow that up to a
    # whole step.
    "Adam": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-3}),
}


def build(case: str, dtype: torch.dtype = F32, seed: int = 0, config: GPTConfig = CONFIG) -> TinyGPT:
    """A model with what is special about this case: "tied", "frozen"."""
    model = TinyGPT(replace(config, tied_embeddings="tied" in case), seed, dtype)
    if "frozen" in case:
        for name in FROZEN:
            model.get_parameter(name).requires_grad_(False)
    return model


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    return kind(model.parameters(), **options)


def minibatch(step: int, samples: int) -> tuple[Tensor, Tensor]:
    """Other samples for every step."""
    return data.examples([(10 + 7 * sample, 99 - step - 5 * sample) for sample in range(samples)])


def train_alone(model: nn.Module, optimizer_name: str, minibatches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """The reference: one process, the whole model, whole minibatches."""
    optimizer = make_optimizer(optimizer_name, model)
    for inputs, targets in minibatches:
        optimizer.zero_grad()
        data.answer_loss(model(inputs), targets).backward()
        optimizer.step()


def snapshot(model: nn.Module) -> State:
    """Parameters, and gradients where there are some, by name."""
    state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return state | {f"{n} grad": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def equal(state: State, reference: State) -> None:
    """Bit by bit."""
    assert state.keys() == reference.keys()
    for name, tensor in state.items():
        assert tensor.dtype == reference[name].dtype, name
        assert torch.equal(tensor, reference[name]), name


def differ_by_at_most(state: State, reference: State, roundings: int) -> None:
    """So many rounding errors, of the size they have at the largest number of a tensor."""
    assert state.keys() == reference.keys()
    for name, tensor in state.items():
        expected = reference[name].detach()
        assert tensor.shape == expected.shape, name
        allowed = roundings * torch.finfo(expected.dtype).eps * max(1, float(expected.abs().max()))
        assert float((tensor - expected).detach().abs().max()) <= allowed, name
