"""Fully sharded data parallelism (ZeRO-3, FSDP): every rank holds one Nth of everything, parameters too.

A block's parameters are gathered (unshard) for as long as the block computes, and freed again (reshard), once forward
and once backward; while it computes, the next one's are on their way. Gradients are averaged shard by shard as soon as
a block's are complete (reduce-scatter):

    compute      |  block 0  |  block 1  |  block 2  || block 2' | block 1'   | block 0'   |
    network      | gather 1  | gather 2  |            | gather 1  | gather 0   |            |
                                                      |           | scatter 2' | scatter 1' | scatter 0'

For autograd this is one operation: where forward gathers shards, backward reduce-scatters gradients.

    shards  --- _Shards --- _Unshard ---  whole parameters  ---  the block
                   <--          <--              <--                         backward

Three halves of an all-reduce instead of two: 1.5 times the bytes of plain data parallelism.

Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 16(12).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms import guards
from course_lib.mechanisms.buckets import own_parameters, parameters_by_block
from course_lib.mechanisms.groups import Group
from course_lib.mechanisms.replicas import make_equal, named_tensors, samples_in, tensors_in, total_over_ranks
from course_lib.mechanisms.shards import Shards
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
    shards is not made whole (`ShardedOptimizer` can do that).

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
        self.blocks = [_Block(self, *found) for found in enumerate(parameters_by_block(model))]
        self._size = sum(block.size for block in self.blocks)
        self._is_backward = False
        self._reducing: _Block | None = None
        self._means: dict[Tensor, Tensor | None] = {}
        model.register_forward_pre_hook(lambda *_: self._begin())
        for number, block in enumerate(self.blocks):
            block.module.forward = functools.partial(self._compute, number, block.module.forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output.

        Raises RuntimeError if this rank's share of the minibatch is not as large as the mean share.
        """
        progress(0)  # the parameters of the first blocks can leave before anything is computed
        if torch.is_grad_enabled():
            samples = samples_in((args, kwargs))
            total = total_over_ranks(samples, self.blocks[0].shards.shard.device, self.group)
            guards.equal_shares(samples, total / dist.get_world_size(self.group))
        kwargs = {name: self._cast(value) for name, value in kwargs.items()}
        return self.module(*map(self._cast, args), **kwargs)

    def _cast(self, value: Any) -> Any:
        if self.compute_dtype and isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self.compute_dtype)
        return value

    # Forward: unshard, compute, reshard

    def _begin(self) -> None:
        for block in self.blocks:
            block.begin()
        self._is_backward = False
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        entries = _Shards.apply(weakref.proxy(self), *trained)
        self.entries: dict[Tensor, Tensor] = dict(zip(trained, entries, strict=True))

    def _compute(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        block = self.blocks[number]
        block.unshard()
        if self._is_backward:  # activations are being computed again
            return forward(*args, **kwargs)
        self._prefetch(number + 1)
        outputs = forward(*args, **kwargs)
        block.reshard()
        self._has_computed(block)
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._before_backward(number))
        return outputs

    def _prefetch(self, number: int) -> None:
        if self.prefetch and number < len(self.blocks) and not self.blocks[number].is_done:
            self.blocks[number].start_gather()

    # Backward: unshard, compute, reshard, reduce-scatter

    def _before_backward(self, number: int) -> None:
        if not self._is_backward:
            self._is_backward = True
            for block in self.blocks:
                block.is_done = False
        block = self.blocks[number]
        if block.module is not self.module:
            for later in self.blocks[number + 1 :]:
                later.reshard()
        block.unshard()
        self._prefetch(number - 1)  # before block 0, the model as a whole, comes the last one

    def reduce_scatter(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        block = self.blocks[number]
        self._has_computed(block)
        block.reshard()  # autograd comes here after all of its operations, as they were recorded later
        self._receive()  # one on its way at a time, or their copies would fill the memory
        block.shards.reduce_scatter(gradients)
        self._reducing = block

    def _receive(self) -> None:
        if self._reducing is not None:
            self._means |= zip(self._reducing.parameters, self._reducing.shards.receive(), strict=True)
            self._reducing = None

    def end_backward(self) -> list[Tensor | None]:
        """The mean gradients of the shards, for autograd to add to `.grad`."""
        self._receive()
        if all(block.is_done or block.is_frozen for block in self.blocks):  # else a checkpoint's own backward pass ends
            for block in self.blocks:
                block.reshard()
        means, self._means = self._means, {}
        return [means.get(parameter) for parameter in self.entries]

    def _has_computed(self, block: _Block) -> None:
        block.is_done = True
        progress(sum(block.size for block in self.blocks if block.is_done) / self._size)

    # State

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The whole model's, with the plain model's names, on every rank. All ranks call it."""
        wholes: dict[Tensor, Tensor] = {}
        for block in self.blocks:
            wholes |= zip(block.parameters, block.shards.gather(), strict=True)
        state = self.module.state_dict(keep_vars=True)
        return {name: wholes.get(tensor, tensor).clone() for name, tensor in state.items()}

    def __deepcopy__(self, _: Any) -> NoReturn:
        raise RuntimeError("a sharded model cannot be copied; copy its state_dict(), or the plain model before")


class _Shards(torch.autograd.Function):
    """The shards as they are. Backward ends here, and hands out their mean gradients."""

    @staticmethod
    def forward(ctx: Any, model: FullySharded, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.model = model
        ctx.set_materialize_grads(False)
        return tuple(shard.data for shard in shards)

    @staticmethod
    def backward(ctx: Any, *_: None) -> Any:
        return None, *ctx.model.end_backward()


class _Unshard(torch.autograd.Function):
    """Whole parameters, which are there already. Backward begins to reduce-scatter their gradients."""

    @staticmethod
    def forward(ctx: Any, model: FullySharded, number: int, *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.model, ctx.number = model, number
        ctx.set_materialize_grads(False)
        return tuple(view.data for view in model.blocks[number].shards.whole.views)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.model.reduce_scatter(ctx.number, gradients)
        return None, None, *(None for _ in gradients)


class _Block:
    """Parameters of a module that come and go together.

    is_done: whether the module has computed in the pass that is going on, forward or backward.
    """

    def __init__(self, sharded: FullySharded, number: int, home: tuple[nn.Module, list[nn.Parameter]]) -> None:
        # The proxy, as Python's garbage collector cannot look into autograd's graph, which gets hold of it.
        self._sharded, self._number, (self.module, self.parameters) = weakref.proxy(sharded), number, home
        self.size = sum(parameter.numel() for parameter in self.parameters)
        self.shards = Shards(self.parameters, sharded.group, is_apart=True, dtype=sharded.compute_dtype)
        for parameter, piece in zip(self.parameters, self.shards.pieces, strict=True):
            parameter.data, parameter.grad, parameter.is_shard = piece, None, True  # type: ignore[attr-defined]
        found = [(user, name, own) for user in sharded.module.modules() for name, own in own_parameters(user)]
        self._places = [place for place in found if place[2] in set(self.parameters)]
        self._gathering: dist.Work | None = None
        self.begin()

    @property
    def is_frozen(self) -> bool:
        return not any(parameter.requires_grad for parameter in self.parameters)

    def begin(self) -> None:
        self.reshard()
        self._wholes: dict[Tensor, Tensor] = {}
        self.is_done = False

    def start_gather(self) -> None:
        flat = self.shards.whole.flat
        if not flat.untyped_storage().nbytes():
            flat.untyped_storage().resize_(flat.nbytes)
            self._gathering = self.shards.all_gather()

    def _finish_gather(self) -> None:
        if self._gathering:
            self._gathering.wait()
            self._gathering = None

    def unshard(self) -> None:
        """Let the modules find whole parameters."""
        self.start_gather()
        self._finish_gather()
        if not self._wholes:
            entries = [self._sharded.entries.get(parameter, parameter) for parameter in self.parameters]
            wholes = _Unshard.apply(self._sharded, self._number, *entries)
            self._wholes = dict(zip(self.parameters, wholes, strict=True))
        for module, name, parameter in self._places:
            vars(module)[name] = self._wholes[parameter]  # Python finds it before the module's own parameter
            vars(module)[name]._is_param = True  # for those who tell weights from activations

    def reshard(self) -> None:
        """Let the modules find this rank's pieces, and free the whole."""
        self._finish_gather()
        for module, name, _ in self._places:
            vars(module).pop(name, None)
        # What autograd has saved, a transposed weight for instance, shares this memory, and finds it filled again.
        self.shards.whole.flat.untyped_storage().resize_(0)
