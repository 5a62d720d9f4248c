"""Layer-wise model parallelism: consecutive layers on consecutive ranks, and the hidden states travel.

Each rank holds one stage, a few layers in a row, with their gradients and optimizer state. A model that is n times
too large for one device fits on n of them, but a stage has nothing to do until its neighbor is done, so that only
one rank is ever busy:

    rank 0   | F |                               | B |
    rank 1       | F |                       | B |          F  forward, the output goes right by send and recv
    rank 2           | F |               | B |              B  backward, the gradient of the input goes left
    rank 3               | F |  loss | B |
             0                                        time

n ranks are as fast as one. This is a pipeline with the schedule "naive" and one micro-batch, and so it runs on the
pipeline's runner. `pipeline` fills the gaps with more micro-batches; the cut into stages stays the same.

Every number is computed by the same operations in the same order as in one process, so the gradients have its bits.

Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (figure 2b).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms import tied_weights
from course_lib.mechanisms.between_stages import Formats, StageMessages
from course_lib.mechanisms.groups import Group, rank_in
from course_lib.mechanisms.pipeline import StageRunner
from course_lib.mechanisms.replicas import from_first_rank
from course_lib.schedules import SCHEDULES, rank_schedule
from course_lib.timeline import compute


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

    def __init__(self, blocks: nn.Sequential, group: Group = None, costs: Sequence[float] | None = None) -> None:
        super().__init__()
        self.group = group
        self.stage, self.n_stages = rank_in(group), dist.get_world_size(group)
        agreed = [split_layers(len(blocks), self.n_stages, costs)]
        dist.broadcast_object_list(agreed, group=group, group_src=0)  # measured costs differ from rank to rank
        (self.stages,) = agreed
        from_first_rank(blocks, group)
        of_rank = [blocks[layers.start : layers.stop] for layers in self.stages]
        self.blocks = of_rank[self.stage]
        self._tied = {p: ranks for p, ranks in tied_weights.holders(of_rank).items() if self.stage in ranks}
        naive = rank_schedule(SCHEDULES["naive"](self.n_stages, 1), self.stage)
        # Nothing is asked for ahead of time: whether a backward pass follows is up to the caller.
        self._schedule = naive._replace(fetching=[message for message in naive.fetching if message.op == "F"])
        self._formats: dict[Any, Formats] = {}  # of what travels, for each shape of the inputs
        self._runner: StageRunner | None = None
        self._output: Any = None

    @property
    def is_last(self) -> bool:
        return self.stage == self.n_stages - 1

    def forward(self, inputs: Tensor) -> Tensor | None:
        """The model's output on the last rank, None on the others.

        inputs: the same on all ranks; only the first looks at more than the shape.
        """
        formats = self._formats.setdefault((inputs.shape, torch.is_grad_enabled()), {})
        messages = StageMessages(self._schedule, self.group, inputs.device, formats)
        messages.samples = len(inputs)
        runner = StageRunner({self.stage: self._compute}, messages, [inputs], self._keep_output, self._mark)
        runner.forward(self.stage, 0)
        messages.finish()
        if torch.is_grad_enabled():
            self._runner = runner
        output, self._output = self._output, None
        return output

    def backward(self, loss: Tensor | None = None) -> None:
        """Add each parameter's gradient to its `.grad`, as `loss.backward()` does in one process.

        loss: on the last rank, made of its output; None on the others.

        Raises RuntimeError if no forward pass came before, ValueError for a loss on the wrong rank or none on the last.
        """
        if self._runner is None:
            raise RuntimeError("backward() has nothing to go back through; call it once after each forward pass")
        if (loss is not None) != self.is_last:
            raise ValueError(
                f"loss={'None' if loss is None else 'a tensor'} on rank {self.stage} of {self.n_stages}; "
                f"the last rank, {self.n_stages - 1}, gives the loss and all others None"
            )
        runner, self._runner = self._runner, None
        if loss is not None:
            runner.set_loss(0, loss)
        with tied_weights.summed(self._tied, self.group):
            runner.backward(self.stage, 0)
            runner.messages.finish()

    def _compute(self, x: Tensor) -> Any:
        output = self.blocks(x)
        if self.is_last:
            return output
        if not isinstance(output, Tensor):
            raise ValueError(
                f"rank {self.stage}'s last block returned {type(output).__name__}, and only a single tensor can be "
                "passed on to the next rank; let each block return one, or use pipeline.run_schedule for tuples"
            )
        return output.requires_grad_(torch.is_grad_enabled())  # frozen layers may be trained in the next step

    def _keep_output(self, output: Any, k: int) -> Tensor:
        self._output = output
        return torch.zeros(())  # stands for the loss, which the caller makes of the output and gives to `backward`

    def _mark(self, kind: str, stage: int, k: int, includes: str) -> AbstractContextManager[None]:
        return compute(kind, stage=stage, work=len(self.stages[stage]))


# Where to cut


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
    limit, _ = _best_split(costs, n_stages, price=lambda cost: cost, add=max)
    return _best_split(costs, n_stages, lambda cost: cost**2 if cost <= limit else math.inf, operator.add)[1]


def _best_split(
    costs: Sequence[float], n_stages: int, price: Callable[[float], float], add: Callable[[float, float], float]
) -> tuple[float, list[range]]:
    """The split whose stages' prices add up to the least, and that total. price: of a stage, by its cost.

    add: + or max. Among equal splits it is the one with the larger stages first.
    """

    @functools.cache
    def best(first: int, n: int) -> tuple[float, tuple[range, ...]]:
        """Total and stages, for the layers from `first` on in n stages."""
        if n == 0:
            return (0.0 if first == len(costs) else math.inf), ()
        ends = range(len(costs) - (n - 1), first, -1)
        return min((begin_with(range(first, last), n) for last in ends), key=lambda split: split[0])

    def begin_with(stage: range, n: int) -> tuple[float, tuple[range, ...]]:
        total, others = best(stage.stop, n - 1)
        return add(total, price(sum(costs[stage.start : stage.stop]))), (stage, *others)

    total, stages = best(0, n_stages)
    return total, list(stages)


def measure_costs(blocks: nn.Sequential, inputs: Tensor) -> list[float]:
    """Seconds of forward and backward for each block, the median of as many as a blink allows, on this process alone.

    inputs: what the first block takes; every other block gets what the one before it puts out. Gradients that
        the parameters hold are left alone.
    Times differ from rank to rank: `LayerWise` takes those of the group's first rank.
    """
    from torch.utils.benchmark import Timer  # half a second to import

    costs, x = [], inputs
    for block in blocks:
        x = x.detach().requires_grad_(x.is_floating_point())
        timer = Timer("compute(block, x)", globals={"compute": _forward_and_backward, "block": block, "x": x})
        costs.append(timer.blocked_autorange(min_run_time=0.02).median)
        with torch.no_grad():
            x = block(x)
    return costs


def _forward_and_backward(block: nn.Module, x: Tensor) -> None:
    output = block(x)
    wanted = [tensor for tensor in (x, *block.parameters()) if tensor.requires_grad]
    if output.requires_grad:
        torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)


def stage_bytes(blocks: nn.Sequential, stages: Sequence[range]) -> list[int]:
    """Bytes of parameters that each stage holds; one that several stages share counts in each of them.

    Gradients take as much again, and Adam twice as much.
    """
    return [sum(p.nbytes for p in blocks[layers.start : layers.stop].parameters()) for layers in stages]
