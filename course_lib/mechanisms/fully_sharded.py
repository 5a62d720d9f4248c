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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from course_lib.mechanisms.data_parallel import agree, trainable
from course_lib.mechanisms.shards import (
    Layout,
    accumulate,
    cut_state,
    gather_state,
    master_dtype,
    reduce_scatter,
    weakly,
)
from course_lib.timeline import reach


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

    Construction gives every rank a shard of the first rank's parameters, and its buffers. The model's own parameters
    are empty from then on, outside of their block's computation. `parameters()` are this rank's shards, flat, one for
    each block (and dtype; frozen ones apart). After backward() their `.grad` is that of the mean gradient: a rank's
    share is the length of the first tensor given to `forward`, and counts in proportion. A parameter
    that was not used counts as one with a gradient of zeros, and gradients of several backward passes add up.

    compute_dtype: the floating-point type to gather, compute and send gradients in; floating-point inputs are
        converted. The shards, and with them gradients and optimizer, stay in float32 (or float64).

    Raises ValueError for an argument that cannot work, and on all ranks if their models differ.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_model(model, compute_dtype)
        self.module, self.group, self.compute_dtype = model, group, compute_dtype
        agree(dict(model.named_parameters()), "the model has", next(model.parameters()).device, group)
        agree(trainable(model), "are to be trained", next(model.parameters()).device, group)
        for buffer in model.buffers():
            dist.broadcast(buffer, group=group, group_src=0)
        owned = _parameters_by_block(model)
        self._blocks = [_Block(block, owned[block], group, compute_dtype) for block in owned]
        self._total = sum(block.size for block in self._blocks)
        self._done = 0
        self._weight = 1.0
        self._is_in_backward = False
        self._sending: _Block | None = None
        for number, block in enumerate(self._blocks):
            self._watch(number, block)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        self._done = 0
        counting = self._count_samples((*args, *kwargs.values())) if torch.is_grad_enabled() else None
        kwargs = {name: self._cast(value) for name, value in kwargs.items()}
        outputs = self.module(*map(self._cast, args), **kwargs)
        for block in self._blocks:
            block.free()  # one that was prefetched, and then left out
        if counting is not None:
            self._weight = counting()
        return outputs

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards, each under the name of its block."""
        names = {module: name for name, module in self.module.named_modules()}
        for block in self._blocks:
            for number, shard in enumerate(block.shards):
                yield f"{names[block.module]}.shards.{number}".lstrip("."), shard.own

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The whole model's, with the plain model's names, on every rank. All ranks call it."""
        wholes: dict[Tensor, Tensor] = {}
        for shard in self._shards():
            gathered = shard.layout.gather(shard.own.detach(), self.group)
            wholes.update(zip(shard.parameters, gathered, strict=True))
        return {name: wholes.get(tensor, tensor).clone() for name, tensor in self._tensors().items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> None:
        """Take this rank's shards from whole tensors with the plain model's names, the same on all ranks.

        Raises ValueError if names or shapes are not those of the model.
        """
        tensors = self._tensors()
        if tensors.keys() != state_dict.keys():
            raise ValueError(
                f"state_dict holds other tensors than the model: {sorted(tensors.keys() ^ state_dict.keys())} are in "
                f"only one of the two; give what state_dict() of this model returned"
            )
        values = {tensor: state_dict[name] for name, tensor in tensors.items()}
        for shard in self._shards():
            shard.load([values.pop(parameter) for parameter in shard.parameters])
        for buffer, value in values.items():
            buffer.copy_(value)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """The state that an optimizer of `parameters()` has for whole parameters, by name. All ranks call it."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        whole: dict[str, dict[str, Any]] = {}
        for shard in self._shards():
            states = gather_state(optimizer.state.get(shard.own, {}), shard.own, shard.layout, self.group)
            whole.update(zip((names[parameter] for parameter in shard.parameters), states, strict=True))
        return whole

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, dict[str, Any]]) -> None:
        """Take over what `optimizer_state_dict()` returned, at this or another world size."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        for shard in self._shards():
            states = [state[names[parameter]] for parameter in shard.parameters]
            if states[0]:
                optimizer.state[shard.own] = cut_state(states, shard.layout, dist.get_rank(self.group))

    def _tensors(self) -> dict[str, Tensor]:
        return self.module.state_dict(keep_vars=True)

    def _shards(self) -> Iterator[_Shard]:
        for block in self._blocks:
            yield from block.shards

    def _cast(self, value: Any) -> Any:
        if self.compute_dtype and isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self.compute_dtype)
        return value

    def _count_samples(self, inputs: Iterable[Any]) -> Callable[[], float]:
        """Begin to add up the ranks' samples. Returns a function that gives this rank's weight: 1 for a mean share."""
        samples = next((len(value) for value in inputs if isinstance(value, Tensor) and value.dim()), 1)
        total = torch.tensor([samples], device=next(self.parameters()).device)
        work = dist.all_reduce(total, group=self.group, async_op=True)

        def weight() -> float:
            work.wait()
            return samples * dist.get_world_size(self.group) / max(1, int(total))

        return weight

    def _watch(self, number: int, block: _Block) -> None:
        before, after = weakly(self._before_forward), weakly(self._after_forward)
        block.module.register_forward_pre_hook(lambda module, inputs: before(number, inputs))
        block.module.register_forward_hook(lambda module, inputs, outputs: after(number, outputs))
        hook = weakly(self._gradient_is_computed)
        for parameter in block.trained:
            parameter.register_post_accumulate_grad_hook(functools.partial(hook, number))

    def _before_forward(self, number: int, inputs: Any) -> None:
        block = self._blocks[number]
        block.gather()
        if self._is_in_backward:  # activations are being recomputed
            return
        self._prefetch(number + 1)
        differentiable = [tensor for tensor in _tensors_in(inputs) if tensor.requires_grad]
        if not block.trained and len(differentiable) == 1:  # no gradient of its own says when it is done
            differentiable[0].register_hook(lambda _: block.free())

    def _after_forward(self, number: int, outputs: Any) -> None:
        if self._is_in_backward:
            return
        self._blocks[number].free()
        self._has_computed(self._blocks[number])
        if torch.is_grad_enabled():
            for tensor in _tensors_in(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self._before_backward(number))

    def _before_backward(self, number: int) -> None:
        if not self._is_in_backward:
            self._is_in_backward, self._done = True, 0
            Variable._execution_engine.queue_callback(self._end_backward)
        self._blocks[number].gather()
        self._prefetch(number - 1)  # before block 0, the model as a whole, comes the last one

    def _prefetch(self, number: int) -> None:
        if number < len(self._blocks) and not self._blocks[number].is_reduced:
            self._blocks[number].start_gather()

    def _gradient_is_computed(self, number: int, parameter: Tensor) -> None:
        block = self._blocks[number]
        block.missing.discard(parameter)
        if not block.missing:
            self._reduce(block)

    @torch.no_grad()
    def _reduce(self, block: _Block) -> None:
        self._has_computed(block)
        if self._sending is not None:
            self._sending.receive()  # one on its way at a time, or their copies would fill the memory
        block.free()
        block.send(self._weight)
        self._sending = block

    def _has_computed(self, block: _Block) -> None:
        self._done += block.size
        reach(self._done / self._total)

    @torch.no_grad()
    def _end_backward(self) -> None:
        for block in reversed(self._blocks):
            if block.missing:  # of parameters that were not used; other ranks may have used them
                self._reduce(block)
            block.receive()
            block.free()
            block.missing, block.is_reduced = set(block.trained), False
        self._is_in_backward, self._sending = False, None


class _Block:
    """A module whose parameters come and go together."""

    def __init__(
        self,
        module: nn.Module,
        parameters: list[nn.Parameter],
        group: dist.ProcessGroup | None,
        compute_dtype: torch.dtype | None,
    ) -> None:
        self.module = module
        self.size = sum(parameter.numel() for parameter in parameters)
        self.trained = {parameter for parameter in parameters if parameter.requires_grad}
        self.missing = set(self.trained)  # whose gradient is not computed yet
        self.is_reduced = False
        alike: dict[Any, list[nn.Parameter]] = {}
        for parameter in parameters:
            alike.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
        self.shards = [_Shard(held, group, compute_dtype) for held in alike.values()]

    def start_gather(self) -> None:
        for shard in self.shards:
            shard.start_gather()

    def gather(self) -> None:
        self.start_gather()
        for shard in self.shards:
            shard.finish_gather()

    def free(self) -> None:
        for shard in self.shards:
            shard.free()

    def send(self, weight: float) -> None:
        for shard in self.shards:
            if shard.own.requires_grad:
                shard.send(weight)
        self.missing.clear()
        self.is_reduced = True

    def receive(self) -> None:
        for shard in self.shards:
            shard.receive()


class _Shard:
    """This rank's part of some parameters, and the memory for the whole of them, most of the time without any."""

    def __init__(
        self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None, compute_dtype: torch.dtype | None
    ) -> None:
        self.parameters, self.group = parameters, group
        self.layout = Layout.of(parameters, group)
        flat = self.layout.join([parameter.detach() for parameter in parameters], like=parameters[0])
        dist.broadcast(flat, group=group, group_src=0)
        own = self.layout.shard(flat, dist.get_rank(group)).clone()
        dtype = own.dtype if compute_dtype is None else master_dtype(own.dtype)
        self.own = nn.Parameter(own.to(dtype), requires_grad=parameters[0].requires_grad)
        self.whole = flat.to(compute_dtype or flat.dtype)
        self.views = self.layout.split(self.whole)
        self.nothing = self.whole.new_empty(0)
        self.gathering: dist.Work | None = None
        self.arriving: Callable[[], Tensor] | None = None
        self.is_whole = True
        self.free()

    def start_gather(self) -> None:
        if self.is_whole or self.gathering is not None:
            return
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        own = self.own.detach().to(self.whole.dtype)
        self.gathering = dist.all_gather_single(self.whole, own, group=self.group, async_op=True)

    def finish_gather(self) -> None:
        if self.gathering is None:
            return
        self.gathering.wait()
        self.gathering, self.is_whole = None, True
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view

    def free(self) -> None:
        self.finish_gather()
        if not self.is_whole:
            return
        for parameter in self.parameters:
            parameter.data = self.nothing
        # What autograd has saved, a transposed weight for instance, shares this memory, and finds it filled again.
        self.whole.untyped_storage().resize_(0)
        self.is_whole = False

    def send(self, weight: float) -> None:
        """Begin to average the gradients, and free them."""
        self.receive()
        flat = self.layout.join([parameter.grad for parameter in self.parameters], like=self.whole)
        for parameter in self.parameters:
            parameter.grad = None
        if weight == 0:  # an empty share has a loss of 0 / 0, and 0 x nan is nan
            flat.zero_()
        elif weight != 1:
            flat *= weight
        self.arriving = reduce_scatter(flat, self.group)

    def receive(self) -> None:
        if self.arriving is not None:
            accumulate(self.own, self.arriving().div_(self.layout.n))
            self.arriving = None

    def load(self, values: list[Tensor]) -> None:
        for value, shape in zip(values, self.layout.shapes, strict=True):
            if value.shape != shape:
                raise ValueError(
                    f"state_dict holds a tensor of shape {list(value.shape)} where the model has {list(shape)}; "
                    f"build the model with the same configuration"
                )
        flat = self.layout.join(values, like=self.own)
        self.own.copy_(self.layout.shard(flat, dist.get_rank(self.group)))


def _parameters_by_block(model: nn.Module) -> dict[nn.Module, list[nn.Parameter]]:
    """The parameters that each block alone uses; the model as a whole comes first and has the rest."""
    blocks = list(_blocks(model))
    inside = {module for block in blocks for module in block.modules()}
    users: dict[nn.Parameter, set[nn.Module]] = {parameter: set() for parameter in model.parameters()}
    for module in (*blocks, *(module for module in model.modules() if module not in inside)):
        for parameter in module.parameters(recurse=module in inside):
            users[parameter].add(module if module in inside else model)
    owned: dict[nn.Module, list[nn.Parameter]] = {model: []}
    owned.update((block, []) for block in blocks if any(users[p] == {block} for p in block.parameters()))
    for parameter, modules in users.items():
        owned[next(iter(modules)) if len(modules) == 1 else model].append(parameter)
    return owned


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of modules."""
    for child in module.children():
        is_element = isinstance(module, (nn.Sequential, nn.ModuleList))
        if is_element and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # those are never called
            yield child
        else:
            yield from _blocks(child)


def _tensors_in(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, (tuple, list, dict)):
        for part in outputs.values() if isinstance(outputs, dict) else outputs:
            yield from _tensors_in(part)


def _check_model(model: nn.Module, compute_dtype: torch.dtype | None) -> None:
    parameters = list(model.parameters())
    if not parameters:
        raise ValueError(f"model={type(model).__name__} has no parameters, so there is nothing to shard")
    if not all(parameter.numel() for parameter in parameters):
        raise ValueError(f"model={type(model).__name__} has empty parameters: it is sharded already; build it anew")
    if compute_dtype is not None and not compute_dtype.is_floating_point:
        raise ValueError(f"compute_dtype={compute_dtype} cannot hold gradients; give torch.bfloat16, for instance")
