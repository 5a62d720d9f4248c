"""Layer-wise model parallelism: consecutive layers on consecutive ranks, and the hidden states travel.

Each rank holds one stage, a few layers in a row, with their gradients and optimizer state. A model that is n times
too large for one device fits on n of them, but a stage has nothing to do until its neighbor is done, so that only
one rank is ever busy:

    rank 0   | F |                               | B |
    rank 1       | F |                       | B |          F  forward, the output goes right by send and recv
    rank 2           | F |               | B |              B  backward, the gradient of the input goes left
    rank 3               | F |  loss | B |
             0                                        time

n ranks are as fast as one. `pipeline` fills the gaps with micro-batches; the cut into stages stays the same.

Every number is computed by the same operations in the same order as in one process, so the gradients have its bits.

Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (figure 2b).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms.replicas import from_first_rank
from course_lib.timeline import compute


def split_layers(n_layers: int, n_stages: int, costs: Sequence[float] | None = None) -> list[range]:
    """The layers of each stage: every layer in exactly one, in order, no stage empty.

    costs: what each layer costs, in any unit. The most expensive stage, for which all others wait, is then as cheap
        as it can be; among such splits the stages are as equal as possible (least sum of squares), and among
        equals the earlier stages are the larger. None: all layers cost the same.

    Raises ValueError for fewer layers than stages and for costs that are not one number of at least 0 per layer.
    """
    if not 1 <= n_stages <= n_layers:
        raise ValueError(
            f"n_stages={n_stages} stages cannot be made of n_layers={n_layers} layers, "
            f"as each needs at least one; choose n_stages from 1 to {n_layers}"
        )
    costs = [1] * n_layers if costs is None else list(costs)
    if len(costs) != n_layers:
        raise ValueError(f"costs has {len(costs)} numbers for n_layers={n_layers} layers; give one for each layer")
    for layer, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise ValueError(f"costs[{layer}]={cost} is not a cost; give a finite number of at least 0")
    return _most_equal(costs, n_stages, limit=_least_limit(costs, n_stages))


def _least_limit(costs: Sequence[float], n_stages: int) -> float:
    """What the most expensive stage costs in the best split: the least sum of neighbors that no stage need exceed."""
    sums = sorted({sum(costs[first:last]) for first, last in itertools.combinations(range(len(costs) + 1), 2)})
    return sums[bisect.bisect_left(sums, True, key=lambda limit: _stages_needed(costs, limit) <= n_stages)]


def _stages_needed(costs: Sequence[float], limit: float) -> float:
    """The number of stages when each is filled until the next layer would exceed the limit."""
    if max(costs) > limit:
        return math.inf
    stages, first = 1, 0
    for layer in range(len(costs)):
        if sum(costs[first : layer + 1]) > limit:
            stages, first = stages + 1, layer
    return stages


def _most_equal(costs: Sequence[float], n_stages: int, limit: float) -> list[range]:
    """The split with the least sum of squares and no stage above the limit."""

    @functools.cache
    def best(first: int, n: int) -> tuple[float, tuple[range, ...]]:
        """Sum of squares and stages, for the layers from `first` on in n stages."""
        if n == 0:
            return (0.0 if first == len(costs) else math.inf), ()
        ends = range(len(costs) - (n - 1), first, -1)
        return min((joined(range(first, last), n) for last in ends), key=lambda split: split[0])

    def joined(stage: range, n: int) -> tuple[float, tuple[range, ...]]:
        cost = sum(costs[stage.start : stage.stop])
        squares, stages = best(stage.stop, n - 1)
        return (squares + cost**2 if cost <= limit else math.inf), (stage, *stages)

    return list(best(0, n_stages)[1])


def measure_costs(blocks: nn.Sequential, inputs: Tensor, repeats: int = 5) -> list[float]:
    """Seconds of forward and backward for each block, median of `repeats`, on this process alone.

    inputs: what the first block takes; every other block gets what the one before it puts out. Gradients that
        the parameters hold are left alone.
    Times differ from rank to rank: `LayerWise` takes those of the group's first rank.

    Raises ValueError if repeats is not at least 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} measures nothing; give at least 1")
    costs, x = [], inputs
    for block in blocks:
        x = x.detach().requires_grad_(x.is_floating_point())
        _, *seconds = (_seconds(block, x) for _ in range(1 + repeats))  # the first time warms up
        costs.append(statistics.median(seconds))
        with torch.no_grad():
            x = block(x)
    return costs


def _seconds(block: nn.Module, x: Tensor) -> float:
    _wait_for_device(x)
    started = time.perf_counter()
    output = block(x)
    wanted = [tensor for tensor in (x, *block.parameters()) if tensor.requires_grad]
    if output.requires_grad:
        torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
    _wait_for_device(x)
    return time.perf_counter() - started


def _wait_for_device(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def stage_bytes(blocks: nn.Sequential, stages: Sequence[range]) -> list[int]:
    """Bytes of parameters that each stage holds; one that several stages share counts in each of them.

    Gradients take as much again, and Adam twice as much.
    """
    return [sum(p.nbytes for p in blocks[layers.start : layers.stop].parameters()) for layers in stages]


class LayerWise(nn.Module):
    """This rank's stage of a model, and the chain that it is a link of.

        chain = LayerWise(model.blocks)
        for inputs, targets in minibatches:               # the same on all ranks
            output = chain(inputs)                        # on the last rank; None on the others
            chain.backward(None if output is None else loss_fn(output, targets))
            optimizer.step()
            optimizer.zero_grad()

    blocks: the whole model, as a list of blocks that each take what the one before puts out, a single tensor.
        Parameters and buffers of the group's first rank go to all; then each rank keeps its own blocks, under their
        own names. (Let go of the model, and their memory is free.)
    costs: as for `split_layers`; those of the group's first rank count.

    A parameter that several stages use (a head tied to the token embedding) lives on each of them. `backward` gives
    all of them the sum of their gradients, so equal optimizers keep the copies equal.

    Raises ValueError if there are fewer blocks than ranks, for wrong costs, and on a rank outside of the group.
    """

    def __init__(
        self, blocks: nn.Sequential, group: dist.ProcessGroup | None = None, costs: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        self.group = group
        self.stage, self.n_stages = dist.get_rank(group), dist.get_world_size(group)
        if self.stage < 0:
            raise ValueError(f"group does not contain rank {dist.get_rank()}; only its members may call this")
        self.stages = self._agreed(split_layers(len(blocks), self.n_stages, costs), next(blocks.parameters()).device)
        from_first_rank(blocks, group)
        self._shared = [
            (parameter, stages) for parameter, stages in _shared(blocks, self.stages) if self.stage in stages
        ]
        layers = self.stages[self.stage]
        self.blocks = blocks[layers.start : layers.stop]
        self._n_layers = len(layers)
        self._announced: dict[torch.Size, tuple[torch.Size, torch.dtype]] = {}
        self._has_announced: set[torch.Size] = set()
        self._passed: tuple[Tensor, Tensor] | None = None

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.n_stages - 1

    def forward(self, inputs: Tensor) -> Tensor | None:
        """The model's output on the last rank, None on the others.

        inputs: the same on all ranks; only the first looks at more than the shape.
        """
        x = inputs if self.is_first else self._receive_from_left(inputs)
        with compute("forward", stage=self.stage, work=self._n_layers):
            output = self.blocks(x)
        if not self.is_last and not isinstance(output, Tensor):
            raise ValueError(
                f"rank {self.stage}'s last block returned {type(output).__name__}, and only a single tensor can be "
                "passed on to the next rank; let each block return one, or use pipeline.run_schedule for tuples"
            )
        if torch.is_grad_enabled():
            self._passed = x, output
        if self.is_last:
            return output
        self._send_right(output.detach(), inputs)
        return None

    def backward(self, loss: Tensor | None = None) -> None:
        """Add each parameter's gradient to its `.grad`, as `loss.backward()` does in one process.

        loss: on the last rank, made of its output; None on the others.

        Raises RuntimeError if no forward pass came before, ValueError for a loss on the wrong rank or none on the last.
        """
        if self._passed is None:
            raise RuntimeError("backward() has nothing to go back through; call it once after each forward pass")
        if (loss is not None) != self.is_last:
            raise ValueError(
                f"loss={'None' if loss is None else 'a tensor'} on rank {self.stage} of {self.n_stages}; "
                f"the last rank, {self.n_stages - 1}, gives the loss and all others None"
            )
        (x, output), self._passed = self._passed, None
        accumulated = [parameter.grad for parameter, _ in self._shared]
        for parameter, _ in self._shared:
            parameter.grad = None  # only what is new may be sent
        self._go_back(output if loss is None else loss)
        if not self.is_first:
            gradient = torch.zeros_like(x) if x.grad is None else x.grad
            dist.send(gradient, group=self.group, group_dst=self.stage - 1)
        self._sum_shared_gradients()
        for (parameter, _), before in zip(self._shared, accumulated, strict=True):
            if before is not None and parameter.grad is not None:
                parameter.grad = before + parameter.grad

    def _go_back(self, output: Tensor) -> None:
        gradient = None
        if not self.is_last:
            gradient = self._receive_like(output.detach(), self.stage + 1)
        with compute("backward", stage=self.stage, work=self._n_layers):
            if output.requires_grad:  # else everything up to here is frozen
                output.backward(gradient)

    # A receiver has to know the shape of what comes. It is told once for each shape of the inputs, which all ranks see.

    def _send_right(self, output: Tensor, inputs: Tensor) -> None:
        if inputs.shape not in self._has_announced:
            dist.send_object_list([(output.shape, output.dtype)], group=self.group, group_dst=self.stage + 1)
            self._has_announced.add(inputs.shape)
        dist.send(output.contiguous(), group=self.group, group_dst=self.stage + 1)

    def _receive_from_left(self, inputs: Tensor) -> Tensor:
        if inputs.shape not in self._announced:
            announcement: list = [None]
            dist.recv_object_list(announcement, group=self.group, group_src=self.stage - 1)
            self._announced[inputs.shape] = announcement[0]
        shape, dtype = self._announced[inputs.shape]
        x = torch.empty(shape, dtype=dtype, device=inputs.device)
        dist.recv(x, group=self.group, group_src=self.stage - 1)
        return x.requires_grad_(torch.is_grad_enabled())

    def _sum_shared_gradients(self) -> None:
        for parameter, (first, *others) in self._shared:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if self.stage == first:
                # Later stages first: the order in which one process adds up the uses of a parameter.
                arrived = [self._receive_like(gradient, stage) for stage in reversed(others)]
                parameter.grad = functools.reduce(torch.add, [*arrived, gradient])
                for stage in others:
                    dist.send(parameter.grad, group=self.group, group_dst=stage)
            else:
                dist.send(gradient, group=self.group, group_dst=first)
                parameter.grad = self._receive_like(gradient, first)

    def _receive_like(self, tensor: Tensor, stage: int) -> Tensor:
        arriving = torch.empty_like(tensor)
        dist.recv(arriving, group=self.group, group_src=stage)
        return arriving

    def _agreed(self, stages: list[range], device: torch.device) -> list[range]:
        """The first rank's stages: measured costs differ from rank to rank, and all have to cut alike."""
        ends = torch.tensor([layers.stop for layers in stages], device=device)
        dist.broadcast(ends, group=self.group, group_src=0)
        return [range(first, last) for first, last in itertools.pairwise([0, *ends.tolist()])]


def _shared(blocks: nn.Sequential, stages: Sequence[range]) -> list[tuple[nn.Parameter, list[int]]]:
    """The parameters to be trained that more than one stage uses, each with its stages."""
    held = [set(blocks[layers.start : layers.stop].parameters()) for layers in stages]
    users = [(p, [stage for stage, its in enumerate(held) if p in its]) for p in blocks.parameters() if p.requires_grad]
    return [(parameter, stages) for parameter, stages in users if len(stages) > 1]
