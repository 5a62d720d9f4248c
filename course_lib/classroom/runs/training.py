"""The training loop of lessons and questions, and the bytes that a training holds.

    share of a minibatch  ->  forward, loss, backward  ->  combine over the ranks  ->  step  ->  clear  ->  next

Trainings differ in their arguments: the model, in one process or as a replica; how the ranks' gradients are combined;
the optimizer, which may keep other weights than the model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import data
from course_lib.instruments.watch import Watch
from course_lib.mechanisms import batches
from course_lib.mechanisms.mixed_precision import LossScaler
from course_lib.model import GPTConfig, TinyGPT
from course_lib.ranks import Pace, launch
from course_lib.timeline import compute

TINY = GPTConfig(layers=1, hidden=8, heads=2)
SMALL = GPTConfig(layers=1, hidden=32, heads=2)  # small enough for eight replicas to train in a blink


def train(
    model: nn.Module,
    minibatches: Iterable[Sequence[Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    optimizer: Any,
    scaler: LossScaler | None = None,
    combine: Callable[[], object] | None = None,
    clear: Callable[[], object] | None = None,
) -> list[float]:
    """The loss on each minibatch, unscaled, up to the first one that is not finite.

    loss_fn: called with the model's output, in 32 bits where the model computes in 16, and the targets.
    optimizer: one of torch's, or `MasterWeights`, made with the same scaler as is given here.
    combine: called before the optimizer's step, to combine the ranks' gradients.  clear: replaces optimizer.zero_grad.
    """
    losses: list[float] = []
    for inputs, targets in minibatches:
        with compute("forward", work=len(inputs)):
            loss = loss_fn(_in_32_bits(model(inputs)), targets)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):  # in the same step on all ranks, if their weights are equal
            break
        with compute("backward", work=len(inputs)):
            (loss if scaler is None else scaler.scale(loss)).backward()
        del loss
        if combine:
            combine()
        with compute("optimizer"):
            optimizer.step()
            (clear or optimizer.zero_grad)()
    return losses


def _in_32_bits(output: Tensor) -> Tensor:
    return output.float() if output.dtype.itemsize == 2 else output


def shares(rank: int, samples: int, steps: int, seed: int = 0) -> Iterator[Sequence[Tensor]]:
    """This rank's share of each of `steps` minibatches. A single rank gets all of each."""
    problems, _ = data.train_test_split()
    for minibatch in islice(data.minibatches(problems, samples, seed), steps):
        yield batches.split(minibatch, dist.get_world_size())[rank]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """A copy of all numbers as one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def moments_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Adam's two moments of every weight."""
    return [value for state in optimizer.state.values() for value in state.values() if value.dim()]


def size_of(tensors: Iterable[Tensor]) -> int:
    """The size of these tensors in bytes."""
    return sum(tensor.nbytes for tensor in tensors)


# Layers on one device, or spread over several


class TrainingBytes(NamedTuple):
    """Bytes of weights, gradients and optimizer state on one rank; and the peak, activations included."""

    states: int
    peak: int


def train_layers(
    devices: int,
    layers: int,
    samples: int,
    is_split: bool,
    dtype: torch.dtype = torch.float32,
    pace: Pace | None = None,
) -> list[TrainingBytes]:
    """The bytes of each device during two training steps of a model with so many layers, or of its share of them."""
    return launch(_train_layers, devices, (layers, samples, is_split, dtype), pace=pace).results


def _train_layers(rank: int, layers: int, samples: int, is_split: bool, dtype: torch.dtype) -> TrainingBytes:
    config = GPTConfig(layers=layers, hidden=64)
    own = layers // dist.get_world_size()
    first, last = (rank * own, (rank + 1) * own) if is_split else (0, layers)
    blocks = TinyGPT(config, dtype=dtype).blocks[1 + first : 1 + last]
    inputs = torch.randn(samples, config.sequence, config.hidden, dtype=dtype)
    optimizer = torch.optim.AdamW(blocks.parameters())
    clear = partial(optimizer.zero_grad, set_to_none=False)  # keeps the gradients, to be counted
    with Watch() as watch:  # the mean square stands for all later layers
        train(blocks, 2 * [(inputs, inputs)], lambda output, _: output.square().mean(), optimizer, clear=clear)
    weights = list(blocks.parameters())
    states = size_of([*weights, *gradients_of(blocks), *moments_of(optimizer)])
    return TrainingBytes(states, size_of(weights) + watch.peak)
