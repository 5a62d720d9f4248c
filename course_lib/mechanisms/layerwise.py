"""Layer-wise model parallelism: consecutive layers on consecutive ranks, and the hidden states travel.

Each rank holds one stage, a few layers in a row, with their gradients and optimizer state. A model that is n times
too large for one device fits on n of them, but a stage has nothing to do until its neighbor is done, so that only
one rank is ever busy:

    rank 0   | F |                               | B |
    rank 1       | F |                       | B |          F  receive, compute, send the output to the right
    rank 2           | F |               | B |              B  the gradient of the output comes back, that of the
    rank 3               | F |  loss | B |                     input goes on to the left
             0                                        time

n ranks are as fast as one. Every number is computed by the same operations in the same order as in one process, so the
gradients have its bits.

Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (figure 2b).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms import guards, tied_weights
from course_lib.mechanisms.groups import Group, rank_in
from course_lib.mechanisms.replicas import from_first_rank, named_tensors
from course_lib.timeline import compute


class LayerWise(nn.Module):
    """This rank's stage of a model that is cut between its blocks.

        chain = LayerWise(model.blocks)
        for inputs, targets in minibatches:               # the same on all ranks
            output = chain(inputs)                        # on the last rank; None on the others
            chain.backward(None if output is None else loss_fn(output, targets))
            optimizer.step()
            optimizer.zero_grad()

    blocks: the whole model, as a list of blocks that each take what the one before outputs, a single tensor. They have
        to run on the device "meta", too, where only shapes are computed.
        Parameters and buffers of the group's first rank go to all; then each rank keeps its own blocks, under their
        own names. (Delete the model to free the others.)
    costs: as for `split_layers`, the same on all ranks. (Measured ones differ; let one rank tell the others.)

    A parameter that several stages use (a head tied to the token embedding) lives on each of them. `backward` gives
    all of them the sum of their gradients, so equal optimizers keep the copies equal.

    Raises ValueError if there are fewer blocks than ranks, for wrong costs, and on a rank outside of the group.
    """

    def __init__(self, blocks: nn.Sequential, group: Group = None, costs: Sequence[float] | None = None) -> None:
        super().__init__()
        self.group, self.stage, self.n_stages = group, rank_in(group), dist.get_world_size(group)
        self.is_first, self.is_last = self.stage == 0, self.stage == self.n_stages - 1
        self.stages = split_layers(len(blocks), self.n_stages, costs)
        from_first_rank(named_tensors(blocks).values(), group)
        of_rank = [blocks[layers.start : layers.stop] for layers in self.stages]
        self.blocks = of_rank[self.stage]
        self._tied = {p: ranks for p, ranks in tied_weights.holders(of_rank).items() if self.stage in ranks}
        self._forward_passes: list[tuple[Tensor, Tensor]] = []  # input and output of each since the last backward()
        # The stages before this one, without numbers: they tell shape and dtype of what arrives, and no rank has to.
        self._before = copy.deepcopy(blocks[: self.stages[self.stage].start]).to("meta").forward

    def forward(self, inputs: Tensor) -> Tensor | None:
        """The model's output on the last rank, None on the others.

        inputs: the same on all ranks; only the first looks at more than shape and dtype.
        """
        x = inputs if self.is_first else self._receive_input(inputs)
        with self._mark("forward"):
            output = self.blocks(x)
        if not self.is_last:
            dist.send(output.detach().contiguous(), group=self.group, group_dst=self.stage + 1)
        if torch.is_grad_enabled():
            self._forward_passes.append((x, output))
        return output if self.is_last else None

    def backward(self, loss: Tensor | None = None) -> None:
        """Add each parameter's gradient to its `.grad`, as `loss.backward()` does in one process.

        It goes back through all forward passes since the last `backward`. So two losses are added up and go back at
        once; an output that the loss does not use, a validation's, adds zeros (in `torch.no_grad()` it costs nothing).

        loss: on the last rank, made of its outputs; None on the others.

        Raises ValueError for a loss on the wrong rank, or none on the last.
        """
        guards.loss_is_on_the_last_rank(loss, self.stage, self.n_stages)
        with tied_weights.summed(self._tied, self.group):
            if loss is not None:
                with self._mark("backward"):
                    loss.backward()
            while self._forward_passes:
                self._go_back(*self._forward_passes.pop())

    def _go_back(self, x: Tensor, output: Tensor) -> None:
        if not self.is_last:
            gradient = output.new_empty(output.shape)
            dist.recv(gradient, group=self.group, group_src=self.stage + 1)
            with self._mark("backward"):
                if output.requires_grad:  # not if all layers so far are frozen
                    output.backward(gradient)
        if not self.is_first:
            gradient = torch.zeros_like(x) if x.grad is None else x.grad
            dist.send(gradient, group=self.group, group_dst=self.stage - 1)

    def _receive_input(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            sent = self._before(inputs.to("meta"))
        x = torch.empty(sent.shape, dtype=sent.dtype, device=inputs.device)
        dist.recv(x, group=self.group, group_src=self.stage - 1)
        return x.requires_grad_(torch.is_grad_enabled())

    def _mark(self, kind: str) -> AbstractContextManager[None]:
        return compute(kind, stage=self.stage, work=len(self.stages[self.stage]))


# Where to cut


def split_layers(n_layers: int, n_stages: int, costs: Sequence[float] | None = None) -> list[range]:
    """The layers of each stage: every layer in exactly one, in order, no stage empty.

    costs: what each layer costs, in any unit. The most expensive stage, for which all others wait, is then as cheap
        as it can be, then the second most expensive one, and so on; among equals the earlier stages have more layers.
        None: all layers cost the same.

    Raises ValueError for fewer layers than stages and for costs that are not one for each layer.
    """
    costs = [1] * n_layers if costs is None else list(costs)
    guards.layers_can_be_cut(n_layers, n_stages, costs)

    @functools.cache
    def best(first: int, n: int) -> tuple[list[float], list[range]]:
        """The stages of the layers from `first` on in n stages, after their costs, the highest first."""
        if n == 1:
            return begin_with(range(first, n_layers), [], [])
        ends = range(n_layers - (n - 1), first, -1)
        return min((begin_with(range(first, end), *best(end, n - 1)) for end in ends), key=lambda split: split[0])

    def begin_with(stage: range, others: list[float], stages: list[range]) -> tuple[list[float], list[range]]:
        return sorted([sum(costs[stage.start : stage.stop]), *others], reverse=True), [stage, *stages]

    return best(0, n_stages)[1]


def stage_bytes(blocks: nn.Sequential, stages: Sequence[range]) -> list[int]:
    """Bytes of parameters that each stage holds; one that several stages share counts in each of them.

    Gradients take as much again, and Adam twice as much.
    """
    return [sum(p.nbytes for p in blocks[layers.start : layers.stop].parameters()) for layers in stages]
