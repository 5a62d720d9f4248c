"""Fully sharded data parallelism (ZeRO-3, FSDP): every rank holds one Nth of everything, parameters too.

A block's parameters are gathered for as long as the block computes, once forward and once backward, and while it
computes, the next one's are on their way. Gradients are averaged shard by shard as soon as a block's are complete:

    compute      |  block 0  |  block 1  |  block 2  || block 2' | block 1'   | block 0'   |
    network      | gather 1  | gather 2  |            | gather 1  | gather 0   |            |
                                                      |           | scatter 2' | scatter 1' | scatter 0'

Three halves of an all-reduce instead of two: 1.5 times the bytes of plain data parallelism.

Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 16(12).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from course_lib.mechanisms.buckets import watch_gradients, weakly
from course_lib.mechanisms.groups import Group
from course_lib.mechanisms.replicas import device_of, make_equal, mean_share, samples_in, tensors_in
from course_lib.mechanisms.shards import Bucket, Layout, check_frozen, master_dtype, take_back
from course_lib.timeline import progress


class _Block:
    """A module whose parameters come and go together: gather them, use them, free them, and scatter their gradients.

    While a block is not whole, its parameters are this rank's pieces.
    """

    def __init__(self, module: nn.Module, buckets: Sequence[Bucket]) -> None:
        self.module, self.buckets = module, buckets
        parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        self.size = sum(parameter.numel() for parameter in parameters)
        self.trained = {parameter for parameter in parameters if parameter.requires_grad}
        self.expect_gradients()
        # Gradients of the pieces while the parameters are whole, and of whole parameters until they are sent.
        self._aside: dict[Tensor, Tensor | None] = {}
        self._gathering: list[dist.Work] = []
        self.is_whole = True
        self.free()

    def start_gather(self) -> None:
        if self.is_whole or self._gathering:
            return
        for bucket in self.buckets:
            bucket.receive()
            bucket.flat.untyped_storage().resize_(bucket.flat.nbytes)
            take_back(bucket.parameters, bucket.pieces)
            self._gathering.append(bucket.gather())

    def gather(self) -> None:
        self.start_gather()
        self._finish_gather()

    def _finish_gather(self) -> None:
        if not self._gathering:
            return
        for bucket, work in zip(self.buckets, self._gathering, strict=True):
            work.wait()
            self._become(bucket.parameters, bucket.views)
        self._gathering, self.is_whole = [], True

    def free(self) -> None:
        self._finish_gather()
        if not self.is_whole:
            return
        for bucket in self.buckets:
            self._become(bucket.parameters, bucket.pieces)
            # What autograd has saved, a transposed weight for instance, shares this memory, and finds it filled again.
            bucket.flat.untyped_storage().resize_(0)
        self.is_whole = False

    def _become(self, parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
        """Let the parameters be these, and exchange their gradients for those that were put aside."""
        for parameter, value in zip(parameters, values, strict=True):
            gradient, parameter.grad = parameter.grad, None  # it has another shape
            parameter.data = value
            self._aside[parameter], parameter.grad = gradient, self._aside.get(parameter)

    def scatter(self) -> None:
        """Begin to average the gradients, and free them."""
        self.free()
        for bucket in self.buckets:
            if self.trained.issuperset(bucket.parameters):
                bucket.send(self._aside.pop(parameter, None) for parameter in bucket.parameters)
        self.is_reduced = True

    def receive(self) -> None:
        for bucket in self.buckets:
            bucket.receive()

    def expect_gradients(self) -> None:
        self.missing = set(self.trained)  # whose gradient is not computed yet
        self.is_reduced = False


class FullySharded(nn.Module):
    """A model of which every rank holds one Nth, and the whole of a block only while it computes: ZeRO-3 (FSDP).

        sharded = FullySharded(model)
        optimizer = torch.optim.Adam(sharded.parameters(), lr=1e-3)
        for inputs, targets in shares:
            loss_fn(sharded(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    A block is an element of an outermost `nn.Sequential` or `nn.ModuleList`; parameters outside of them or shared by
    several belong to the model as a whole, and are there for the whole forward and the whole backward pass.
    While one block computes, the next one's parameters are on their way: in the order in which the model lists them,
    and in the reverse order backward. All ranks have to use the same parameters.

    Construction gives every rank a shard of the first rank's parameters, and its buffers. Outside of its block's
    computation, a parameter of the model is this rank's part of it from then on, flat and maybe empty: optimizers
    can have the model's parameters, made before or after. After backward() their `.grad` is that of the mean gradient,
    for which all ranks need shares of the same size: the length of the first tensor given to `forward`. A parameter
    that no rank has used has no gradient, and gradients of several backward passes add up.
    `torch.nn.utils.clip_grad_norm_` would take the norm of this rank's part for that of the whole gradient: use
    `sharding.clip_grad_norm`. To go on from a state, load it into the plain model; what an optimizer remembers of
    shards is not made whole (`ShardedOptimizer` can do that).

    prefetch: whether the next block's parameters travel while one computes; else each block waits for its own.
    compute_dtype: the floating-point type to gather, compute and send gradients in; floating-point inputs are
        converted. The shards, and with them gradients and optimizer, stay in float32 (or float64).

    Raises ValueError for an argument that cannot work, and on all ranks if their models differ. `forward` and
    backward() raise RuntimeError for what would end in a wrong gradient.
    """

    def __init__(
        self, model: nn.Module, group: Group = None, compute_dtype: torch.dtype | None = None, prefetch: bool = True
    ) -> None:
        super().__init__()
        _check_model(model, compute_dtype)
        self.module, self.group, self.compute_dtype, self.prefetch = model, group, compute_dtype, prefetch
        make_equal(model, group)
        self._blocks = [
            _Block(module, _buckets(parameters, group, compute_dtype))
            for module, parameters in _parameters_by_block(model).items()
        ]
        self._buckets = [bucket for block in self._blocks for bucket in block.buckets]
        self._block_of = {parameter: block for block in self._blocks for parameter in block.trained}
        self._total = sum(block.size for block in self._blocks)
        self._done = 0
        self._backward: int | None = None  # autograd's number for the backward pass that is going on
        self._sending: _Block | None = None
        watch_gradients(self._block_of, self._gradient_is_computed)
        before, after = weakly(self._before_forward), weakly(self._after_forward)
        for number, block in enumerate(self._blocks):
            block.module.register_forward_pre_hook(functools.partial(before, number))
            block.module.register_forward_hook(functools.partial(after, number))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns.

        Raises RuntimeError if this rank's share of the minibatch is not as large as the mean share.
        """
        self._check_backward()
        check_frozen(self.module.parameters(), self._block_of, "FullySharded")
        self._done = 0
        samples = samples_in((args, kwargs))
        mean = mean_share(samples, device_of(self), self.group) if torch.is_grad_enabled() else None
        kwargs = {name: self._cast(value) for name, value in kwargs.items()}
        outputs = self.module(*map(self._cast, args), **kwargs)
        for block in self._blocks:
            block.free()  # one that was prefetched, and then left out
        if mean is not None and samples != mean():
            raise RuntimeError(
                f"this rank's share has {samples} samples and the mean share {mean():g}, and their gradients would "
                f"count the same; give all ranks shares of the same size"
            )
        return outputs

    def _before_forward(self, number: int, _: nn.Module, inputs: Any) -> None:
        block = self._blocks[number]
        block.gather()
        if self._backward is not None:  # activations are being recomputed
            return
        self._prefetch(number + 1)
        differentiable = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        if not block.trained and len(differentiable) == 1:  # no gradient of its own says when it is done
            differentiable[0].register_hook(lambda _: block.free())

    def _after_forward(self, number: int, _: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._backward is not None:
            return
        block = self._blocks[number]
        block.free()
        self._has_computed(block)
        if torch.is_grad_enabled():
            tensors = list(tensors_in(outputs))
            if block.trained and not tensors:
                raise TypeError(
                    f"a block returned {type(outputs).__name__}, in which no tensor is found, so nothing tells when "
                    f"its backward pass begins; return a tensor, or a tuple, list, dict or dataclass of some"
                )
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self._before_backward(number))

    def _before_backward(self, number: int) -> None:
        self._check_backward()
        if self._backward is None:
            self._backward, self._done = torch._C._current_graph_task_id(), 0
            Variable._execution_engine.queue_callback(self._end_backward)
        block = self._blocks[number]
        if block.is_reduced:  # it is used twice, and may get its gradients one after the other
            block.expect_gradients()
        block.gather()
        self._prefetch(number - 1)  # before block 0, the model as a whole, comes the last one

    def _prefetch(self, number: int) -> None:
        if self.prefetch and number < len(self._blocks) and not self._blocks[number].is_reduced:
            self._blocks[number].start_gather()

    def _gradient_is_computed(self, parameter: nn.Parameter) -> None:
        block = self._block_of[parameter]
        block.missing.discard(parameter)
        if not block.missing:
            self._scatter(block)

    @torch.no_grad()
    def _scatter(self, block: _Block) -> None:
        self._has_computed(block)
        if self._sending is not None:
            self._sending.receive()  # one on its way at a time, or their copies would fill the memory
        block.scatter()
        self._sending = block

    @torch.no_grad()
    def _end_backward(self) -> None:
        for block in reversed(self._blocks):
            if block.missing:  # of parameters that were not used; other ranks may have used them
                self._scatter(block)
            block.receive()
            block.free()
            block.expect_gradients()
        self._backward, self._sending = None, None

    def _has_computed(self, block: _Block) -> None:
        self._done += block.size
        progress(min(1.0, self._done / self._total))  # a block may be used twice

    def _cast(self, value: Any) -> Any:
        if self.compute_dtype and isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self.compute_dtype)
        return value

    # State

    def state_dict(  # type: ignore[override]
        self, *args: Any, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The whole model's, with the plain model's names, on every rank. All ranks call it."""
        wholes: dict[Tensor, Tensor] = {}
        for bucket in self._buckets:
            take_back(bucket.parameters, bucket.pieces)
            wholes.update(zip(bucket.parameters, bucket.layout.gather(bucket.shard), strict=True))
        destination = {} if destination is None else destination
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            destination[prefix + name] = wholes.get(tensor, tensor).clone()
        return destination

    def _load_from_state_dict(self, *_: Any) -> None:
        raise RuntimeError("parameters are in shards already; load the state into the plain model, and shard it then")

    # What would end in a wrong gradient

    def _check_backward(self) -> None:
        if self._backward not in (None, torch._C._current_graph_task_id()):
            raise RuntimeError(
                "the last backward() was interrupted by an error, and what the ranks have sent each other since no "
                "longer fits together; start the ranks again, and look at that first error"
            )


def _buckets(parameters: Iterable[nn.Parameter], group: Group, compute_dtype: torch.dtype | None) -> list[Bucket]:
    """Parameters of one dtype together, frozen ones apart; the whole is made when it is needed."""
    alike: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        alike.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
        parameter.is_sharded = True  # type: ignore[attr-defined]
    buckets = []
    for held in alike.values():
        layout = Layout(held, group)
        flat = layout.join([parameter.detach() for parameter in held], like=held[0])
        own = layout.shard(flat).clone()
        if compute_dtype is not None:
            flat, own = flat.to(compute_dtype), own.to(master_dtype(own.dtype))
        buckets.append(Bucket(held, layout, flat, own))
    return buckets


def _parameters_by_block(model: nn.Module) -> dict[nn.Module, list[nn.Parameter]]:
    """The parameters that each block alone uses; the model as a whole comes first and has the rest."""
    blocks = dict.fromkeys(_blocks(model))
    inside = {module for block in blocks for module in block.modules()}
    outside = (module for module in model.modules() if module not in inside)
    shared = {parameter for module in outside for parameter in module.parameters(recurse=False)}
    users = Counter(parameter for block in blocks for parameter in block.parameters())
    shared |= {parameter for parameter, count in users.items() if count > 1}
    owned = {block: [parameter for parameter in block.parameters() if parameter not in shared] for block in blocks}
    return {
        model: [parameter for parameter in model.parameters() if parameter in shared],
        **{block: parameters for block, parameters in owned.items() if parameters},
    }


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of modules."""
    for child in module.children():
        is_element = isinstance(module, (nn.Sequential, nn.ModuleList))
        if is_element and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # those are never called
            yield child
        else:
            yield from _blocks(child)


def _check_model(model: nn.Module, compute_dtype: torch.dtype | None) -> None:
    parameters = list(model.parameters())
    if not parameters:
        raise ValueError(f"model={type(model).__name__} has no parameters, so there is nothing to shard")
    if any(hasattr(parameter, "is_sharded") for parameter in parameters):
        raise ValueError(f"model={type(model).__name__} is sharded already; build it anew")
    if compute_dtype is not None and not compute_dtype.is_floating_point:
        raise ValueError(f"compute_dtype={compute_dtype} cannot hold gradients; give torch.bfloat16, for instance")
