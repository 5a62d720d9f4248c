"""Fully sharded data parallelism (ZeRO-3, FSDP): every rank holds one Nth of everything, parameters too.

A block's parameters are gathered (unshard) for as long as the block computes, and freed again (reshard), once forward
and once backward; while it computes, the next one's are on their way. Gradients are averaged shard by shard as soon as
a block's are complete (reduce-scatter):

    compute      |  block 0  |  block 1  |  block 2  || block 2' | block 1'   | block 0'   |
    network      | gather 1  | gather 2  |            | gather 1  | gather 0   |            |
                                                      |           | scatter 2' | scatter 1' | scatter 0'

For autograd a gather is an operation like others: its forward gathers shards, its backward reduce-scatters gradients.

Three halves of an all-reduce instead of two: 1.5 times the bytes of plain data parallelism.

Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 16(12).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from course_lib.mechanisms import guards
from course_lib.mechanisms.blocks import Block, parameters_by_block
from course_lib.mechanisms.buckets import weakly
from course_lib.mechanisms.groups import Group
from course_lib.mechanisms.replicas import make_equal, named_tensors, samples_in, tensors_in, total_over_ranks
from course_lib.timeline import progress


class FullySharded(nn.Module):
    """A model of which every rank holds one Nth, and the whole of a block only while it computes: ZeRO-3 (FSDP).

        sharded = FullySharded(model)
        optimizer = torch.optim.Adam(sharded.parameters(), lr=1e-3)
        for inputs, targets in shares:
            loss_fn(sharded(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    A block is an element of an outermost `nn.Sequential` or `nn.ModuleList`, and returns a tensor, or a tuple, list or
    dict of some. Parameters outside of blocks or shared by several belong to the model as a whole, and are
    there for the whole forward and the whole backward pass. While one block computes, the next one's parameters are on
    their way: in the order in which the model lists them, and in the reverse order backward. All ranks have to use the
    same blocks. If ranks hold different parts of a model, group= names those that hold the same.

    Construction gives every rank a shard of the first rank's parameters, and its buffers. From then on, the model's
    parameters are this rank's part of each, flat and maybe empty; while a block computes, its modules find whole ones
    in their place. A model in 16 bits is gathered and its gradients are sent in these, and shards are in float32.

    After backward() the `.grad` of a parameter is its part of the mean gradient, for which all ranks need shares of the
    same size: the length of the first tensor given to `forward`. A parameter that no rank has used has no gradient, and
    gradients of several backward passes add up; one that overflowed is nan on all ranks.
    `torch.nn.utils.clip_grad_norm_` would take the norm of this rank's part for that of the whole gradient: use
    `sharding.clip_grad_norm`. To go on from a state, load it into the plain model; what an optimizer remembers of
    shards is not made whole.

    To recompute activations, use `checkpoint(..., use_reentrant=False)`: a reentrant checkpoint ends a backward pass of
    its own in each block, and waits there for the block's gradients.

    prefetch: whether the next block's parameters travel while one computes; else each block waits for its own.
    compute_dtype: the floating-point type to gather, compute and send gradients in, for a model in 32 bits;
        floating-point inputs are converted.

    Raises ValueError for a model that is sharded already, and on all ranks if their models differ.
    """

    def __init__(
        self, model: nn.Module, group: Group = None, compute_dtype: torch.dtype | None = None, prefetch: bool = True
    ) -> None:
        super().__init__()
        guards.not_sharded_yet(model)
        make_equal(named_tensors(model), group)
        self.module, self.group, self.compute_dtype, self.prefetch = model, group, compute_dtype, prefetch
        self.blocks = [Block(model, *found, group=group, dtype=compute_dtype) for found in parameters_by_block(model)]
        self._latest: Block | None = None
        self._reducing: Block | None = None
        model.register_forward_pre_hook(self._begin)
        for number, block in enumerate(self.blocks):
            block.module.register_forward_pre_hook(partial(self._before_forward, number))
            block.module.register_forward_hook(partial(self._after_forward, block))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output.

        Raises RuntimeError if this rank's share of the minibatch is not as large as the mean share.
        """
        progress(0)  # the parameters of the first blocks can leave before anything is computed
        if torch.is_grad_enabled():
            samples, device = samples_in((args, kwargs)), self.blocks[0].shards.shard.device
            total = total_over_ranks(samples, device, self.group)
            guards.equal_shares(samples, total / dist.get_world_size(self.group))
        args, kwargs = tree_map(self._cast, (args, kwargs))
        return self.module(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        is_cast = self.compute_dtype and isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.compute_dtype) if is_cast else value

    # Forward: gather, compute, free

    def _begin(self, *_: Any) -> None:
        for block in self.blocks:
            block.reshard()
            block.wholes = {}
        self._left, self._is_backward, self._latest = set(self.blocks), False, None
        start = self.blocks[0].shards.shard.new_zeros(0, requires_grad=True)
        (self._start,) = _Given.apply([start], weakly(self._end_backward), start)  # first here, so last on the way back

    def _before_forward(self, number: int, *_: Any) -> None:
        block = self.blocks[number]
        if not block.wholes:
            inputs = [self._start] if block.is_trained else []
            wholes = _Given.apply(block.shards.views, weakly(self._reduce_scatter, number), *inputs)
            block.wholes = dict(zip(block.parameters, wholes, strict=True))
        block.unshard()
        if self.prefetch and not self._is_backward and number + 1 < len(self.blocks):
            self.blocks[number + 1].start_gather()

    def _after_forward(self, block: Block, _: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._is_backward:  # activations are being recomputed
            return
        block.reshard()
        self._has_computed(block)
        previous = self._latest
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._before_backward(block, previous))
                self._latest = block

    # Backward: gather, compute, free, scatter

    def _before_backward(self, block: Block, previous: Block | None) -> None:
        """previous: the block that computed before this one, so backward comes to it next."""
        if not self._is_backward:
            self._left, self._is_backward = {other for other in self.blocks if other.is_trained}, True
            progress(0)  # the graph of gathered parameters does not tell an emulated clock how far backward is
        for other in self.blocks:
            if self.module not in (block.module, other.module) and other.module is not block.module:
                other.reshard()
        block.unshard()
        if self.prefetch and previous:
            previous.start_gather()

    def _reduce_scatter(self, number: int, *gradients: Tensor | None) -> None:
        block = self.blocks[number]
        self._has_computed(block)
        block.reshard()  # autograd comes here after all of its operations, as they were recorded later
        self._receive()  # one on its way at a time, or their copies would fill the memory
        block.shards.reduce_scatter(gradients)
        self._reducing = block

    def _receive(self) -> None:
        block, self._reducing = self._reducing, None
        for parameter, mean in zip(block.parameters, block.shards.receive(), strict=True) if block else ():
            if parameter.requires_grad and mean is not None:
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean

    def _end_backward(self, *_: None) -> None:
        self._receive()
        if not self._left:  # else the backward pass of a reentrant checkpoint ends
            for block in self.blocks:
                block.reshard()

    def _has_computed(self, block: Block) -> None:
        self._left.discard(block)
        progress(1 - sum(block.size for block in self._left) / sum(block.size for block in self.blocks))

    # State

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The whole model's, with the plain model's names, on every rank. All ranks call it."""
        wholes: dict[Tensor, Tensor] = {}
        for block in self.blocks:
            wholes |= zip(block.parameters, block.shards.gather(), strict=True)
        state = self.module.state_dict(keep_vars=True)
        return {name: wholes.get(tensor, tensor).clone() for name, tensor in state.items()}

    def __deepcopy__(self, _: Any) -> None:
        raise RuntimeError("a sharded model cannot be copied; copy its state_dict(), or the plain model before")


class _Given(torch.autograd.Function):
    """Tensors that are there already, as if computed from the inputs; `backward` is called with their gradients."""

    @staticmethod
    def forward(ctx: Any, tensors: list[Tensor], backward: Callable[..., None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.on_the_way_back, ctx.n_inputs = backward, 2 + len(inputs)
        ctx.set_materialize_grads(False)
        return tuple(tensor.data for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.on_the_way_back(*gradients)
        return (None,) * ctx.n_inputs
