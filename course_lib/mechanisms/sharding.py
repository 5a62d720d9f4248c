"""Sharding (ZeRO): data parallelism in which no rank keeps what another rank already keeps.

With Adam, a float32 parameter costs 16 bytes: 4 for itself, 4 for its gradient, 8 for the optimizer's two averages.
Data parallelism keeps all of them N times. ZeRO lays the parameters end to end, pads them to a multiple of N, cuts
that into N shards, and makes each rank responsible for one:

    parameters      | a a a a a a a | b b b | c c c c c - - |       7 + 3 + 5 numbers and 2 of padding, on 4 ranks
    shards          | rank 0  | rank 1  | rank 2  | rank 3  |

    bytes per rank, psi parameters         parameters   gradients   optimizer   sent per step
    data parallelism                       4 psi        4 psi       8 psi       2 (N - 1) / N x 4 psi
    ZeRO-1  ShardedOptimizer               4 psi        4 psi       8 psi / N   the same
    ZeRO-2  ... gradients="sharded"        4 psi        4 psi / N   8 psi / N   the same
    ZeRO-3  FullySharded                   4 psi / N    4 psi / N   8 psi / N   1.5 x as much

The bytes sent do not change at first because an all-reduce is a reduce-scatter followed by an all-gather. ZeRO-1 and 2
put the optimizer step between these two halves: the gradients are summed shard by shard, each rank updates its shard,
and the all-gather brings the new parameters instead of the gradients. ZeRO-3 gathers a block's parameters
for as long as the block computes, once forward and once backward, and so sends three halves instead of two:

    compute      |  block 0  |  block 1  |  block 2  || block 2' | block 1'   | block 0'   |
    network      | gather 1  | gather 2  |            | gather 1  | gather 0   |            |
                                                      |           | scatter 2' | scatter 1' | scatter 0'

Updates have to be element by element (SGD, Adam and most others), since a shard ends anywhere within a matrix.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20;
Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 16(12).
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from course_lib.mechanisms.data_parallel import agree, fill_buckets, trainable
from course_lib.timeline import compute, reach

GRADIENTS = ("local", "averaged", "sharded")
_HALF = (torch.float16, torch.bfloat16)
_NEEDS_WHOLE_TENSORS = ("LBFGS", "Adafactor", "Muon", "SparseAdam")


@dataclass(frozen=True)
class Layout:
    """Where tensors of these shapes lie when they are put end to end and cut into `n` shards of equal length."""

    shapes: tuple[torch.Size, ...]
    n: int

    @classmethod
    def of(cls, tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> Layout:
        return cls(tuple(tensor.shape for tensor in tensors), dist.get_world_size(group))

    @functools.cached_property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    @functools.cached_property
    def shard_size(self) -> int:
        return -(-sum(self.sizes) // self.n)

    @functools.cached_property
    def padding(self) -> int:
        return self.n * self.shard_size - sum(self.sizes)

    def join(self, tensors: Iterable[Tensor | None], like: Tensor) -> Tensor:
        """Copy tensors of these shapes into one flat tensor [n x shard_size] of the dtype of `like`.

        None stands for zeros, and so does the padding.
        """
        pairs = zip(tensors, self.sizes, strict=True)
        pieces = [like.new_zeros(size) if tensor is None else tensor.reshape(-1) for tensor, size in pairs]
        return torch.cat([*pieces, like.new_zeros(self.padding)])

    def split(self, flat: Tensor) -> list[Tensor]:
        """The tensors again, as views of the flat one."""
        *pieces, _ = flat.split([*self.sizes, self.padding])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def shard(self, flat: Tensor, rank: int) -> Tensor:
        """The part of the flat tensor that belongs to a rank [shard_size], a view."""
        return flat[rank * self.shard_size : (rank + 1) * self.shard_size]

    def gather(self, shard: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
        """The whole tensors, from every rank's shard of them. All ranks call it."""
        flat = shard.new_empty(self.n * self.shard_size)
        dist.all_gather_single(flat, shard.contiguous(), group=group)
        return self.split(flat)


def reduce_scatter(flat: Tensor, group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
    """Begin to sum a flat tensor [n x shard_size] over the group.

    Returns a function that waits for it and returns this rank's shard of the sum, in float32 if `flat` has 16 bits.
    """
    # Every rank sends each shard to its owner, who adds up: the bytes of a ring's reduce-scatter, and a sum in 32 bits,
    # in the order of the ranks. gloo's own reduce-scatter is an all-reduce that drops the rest: twice the bytes.
    arrived, dtype = torch.empty_like(flat), _master_dtype(flat.dtype)
    work = dist.all_to_all_single(arrived, flat, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        first, *others = arrived.chunk(dist.get_world_size(group))
        total = first.to(dtype, copy=True)
        for other in others:
            total += other
        return total

    return finish


def gather_state(
    state: Mapping[str, Any], shard: Tensor, layout: Layout, group: dist.ProcessGroup | None
) -> list[dict[str, Any]]:
    """An optimizer's state for a shard -> its state for each of the tensors in the layout. All ranks call it."""
    states: list[dict[str, Any]] = [{} for _ in layout.shapes]
    for name, value in state.items():
        is_cut = isinstance(value, Tensor) and value.shape == shard.shape  # a count of steps, for instance, is not
        wholes = layout.gather(value.detach(), group) if is_cut else [value] * len(states)
        for state_of_one, whole in zip(states, wholes, strict=True):
            state_of_one[name] = whole.clone() if isinstance(whole, Tensor) else whole
    return states


def cut_state(states: list[dict[str, Any]], layout: Layout, rank: int) -> dict[str, Any]:
    """The reverse of `gather_state`."""
    cut = {}
    for name, value in states[0].items():
        if isinstance(value, Tensor) and value.shape == layout.shapes[0]:
            flat = layout.join([state[name] for state in states], like=value)
            cut[name] = layout.shard(flat, rank).clone()
        else:
            cut[name] = copy.deepcopy(value)
    return cut


def clip_grad_norm(shards: Iterable[Tensor], max_norm: float, group: dist.ProcessGroup | None = None) -> Tensor:
    """Scale the shards' gradients so that the norm over all parameters is at most `max_norm`; returns it from before.

    shards: `FullySharded.parameters()`, or `ShardedOptimizer.shards` after `finish()`. Every element is on one
        rank only, so the squares of all ranks add up to the square of the norm.

    Raises ValueError if max_norm is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} would erase or flip all gradients; give a positive number such as 1.0")
    gradients = [shard.grad for shard in shards if shard.grad is not None]
    squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    for gradient in gradients:
        gradient *= (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as in torch.nn.utils.clip_grad_norm_
    return norm


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of which every rank holds one Nth: ZeRO-1, and with gradients="sharded" ZeRO-2.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
        for inputs, targets in shares:
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    The model is a plain one. Construction gives every rank the parameters of the group's first. `step()` averages the
    gradients over the group, updates this rank's shard, and gathers the parameters.

    gradients: "local", each rank's `.grad` is its own until `step()` averages them with a reduce-scatter; "averaged",
        they are the mean already (`average_gradients`, `DataParallel`) and do not travel again; "sharded", each bucket
        is reduce-scattered within backward() as soon as it is complete, and its `.grad`s are freed.
        Every rank's gradient counts the same: average shares of different size yourself, and say "averaged".
    bucket_mb: parameters are laid end to end in buckets of up to this many MiB, from the last to the first.
    kwargs: for `optimizer_cls`, which sees flat shards. `param_groups` hold the whole parameters, and what a scheduler
        changes there is used. A parameter without gradient counts as one with a gradient of zeros.

    Parameters in 16 bits get a float32 master, sharded with the rest: 12 bytes / N each for Adam.

    Raises ValueError for an argument that cannot work, and on all ranks if their parameters differ.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        *,
        gradients: Literal["local", "averaged", "sharded"] = "local",
        bucket_mb: float = 10,
        **kwargs: Any,
    ) -> None:
        params = list(params)
        _check_arguments(params, optimizer_cls, gradients, bucket_mb)
        self.group, self.gradients, self.bucket_mb = group, gradients, bucket_mb
        self._make_inner: Callable[..., torch.optim.Optimizer] = functools.partial(optimizer_cls, **kwargs)
        self._inner: torch.optim.Optimizer | None = None
        self._buckets: list[_Bucket] = []
        self._next = 0  # the bucket to be sent next: their order has to be the same on all ranks
        self._is_sent = self._is_finished = False
        super().__init__(params, kwargs)
        self.defaults = self.inner.defaults

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's shards."""
        assert self._inner is not None
        return self._inner

    @property
    def shards(self) -> list[nn.Parameter]:
        """This rank's part of the parameters, flat; after `finish()` their `.grad` is that of the mean gradient."""
        return [bucket.shard for bucket in self._buckets]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        whole = self.param_groups[-1]
        parameters = [parameter for parameter in whole["params"] if parameter.requires_grad]
        frozen = [parameter for parameter in whole["params"] if not parameter.requires_grad]
        if not parameters:
            raise ValueError("params holds only frozen parameters; give some that require a gradient")
        named = {f"params[{number}]": parameter for number, parameter in enumerate((*parameters, *frozen))}
        agree(named, "are to be updated", parameters[0].device, self.group)
        for parameter in frozen:
            dist.broadcast(parameter.detach(), group=self.group, group_src=0)
        full = fill_buckets(reversed(parameters), self.bucket_mb * 2**20)
        buckets = [_Bucket(bucket, self.group) for bucket in full]
        sharded = {**_hyperparameters(whole), "params": [bucket.shard for bucket in buckets]}
        if self._inner is None:
            self._inner = self._make_inner([sharded])
        else:
            self._inner.add_param_group(sharded)
        whole.update(_hyperparameters(self._inner.param_groups[-1]))
        if self.gradients == "sharded":
            self._watch_gradients(buckets)
        self._buckets += buckets

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until the gradients have arrived: from here on the shards' `.grad` is the mean over the group.

        `step()` calls it, unless it was called before, for instance to clip gradients.
        """
        if self._is_finished:
            return
        if self.gradients == "averaged":
            for bucket in self._buckets:
                bucket.cut_gradients()
        else:
            while self._next or not self._is_sent:
                self._send_next()
        for bucket in self._buckets:
            bucket.receive()
        self._is_finished = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters on all ranks; returns what the closure, if any, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.finish()
        for whole, sharded in zip(self.param_groups, self.inner.param_groups, strict=True):
            sharded.update(_hyperparameters(whole))
        with compute("optimizer"):
            self.inner.step()
        for work in [bucket.gather() for bucket in self._buckets]:
            work.wait()
        self._begin_step()
        if self.gradients != "sharded":  # shards of gradients that are still there as a whole
            self.inner.zero_grad()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for bucket in self._buckets:
            bucket.receive()
        self.inner.zero_grad()
        self._begin_step()

    def state_dict(self) -> dict[str, Any]:
        """The state of `optimizer_cls` on one process, with whole tensors, on every rank. All ranks call it."""
        packed = super().state_dict()
        numbers = self._numbers()
        for bucket in self._buckets:
            states = gather_state(self._state_of(bucket), bucket.shard, bucket.layout, self.group)
            packed["state"].update((numbers[p], state) for p, state in zip(bucket.parameters, states, strict=True))
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state as `state_dict()` makes it, at this or another world size, or that of a plain optimizer.

        Load the model first: masters that the state does not hold are made from the parameters.
        """
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        numbers = self._numbers()
        for bucket in self._buckets:
            states = [state_dict["state"].get(numbers[parameter], {}) for parameter in bucket.parameters]
            state = cut_state(states, bucket.layout, bucket.rank)
            if bucket.has_master:
                bucket.shard.copy_(state.pop("master", bucket.own))
            self.inner.state[bucket.shard] = state

    def _state_of(self, bucket: _Bucket) -> Mapping[str, Any]:
        state = self.inner.state.get(bucket.shard, {})
        return {**state, "master": bucket.shard} if bucket.has_master else state

    def _numbers(self) -> dict[nn.Parameter, int]:
        """The number under which a parameter stands in a state_dict."""
        return {p: number for number, p in enumerate(p for group in self.param_groups for p in group["params"])}

    def _begin_step(self) -> None:
        self._next = 0
        self._is_sent = self._is_finished = False
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)

    def _watch_gradients(self, buckets: list[_Bucket]) -> None:
        hook = _weakly(self._gradient_is_computed)
        for number, bucket in enumerate(buckets, start=len(self._buckets)):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(functools.partial(hook, number))

    @torch.no_grad()
    def _gradient_is_computed(self, number: int, parameter: Tensor) -> None:
        self._buckets[number].missing.discard(parameter)
        while not self._buckets[self._next].missing:
            self._send_next()

    def _send_next(self) -> None:
        self._buckets[self._next - 1].receive()  # one on its way at a time, or their copies would fill the memory
        self._buckets[self._next].send(is_last_use=self.gradients == "sharded")
        self._next = (self._next + 1) % len(self._buckets)
        self._is_sent = self._is_sent or self._next == 0


class _Bucket:
    """Parameters that travel together: views of one flat tensor, of which this rank updates its shard."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self.parameters, self.group = parameters, group
        self.rank = dist.get_rank(group)
        self.layout = Layout.of(parameters, group)
        self.flat = self.layout.join([parameter.detach() for parameter in parameters], like=parameters[0])
        dist.broadcast(self.flat, group=group, group_src=0)
        for parameter, view in zip(parameters, self.layout.split(self.flat), strict=True):
            parameter.data = view
        self.own = self.layout.shard(self.flat, self.rank)
        self.shard = nn.Parameter(self.own.to(_master_dtype(self.own.dtype)))  # the same memory, or a master
        self.missing: set[Tensor] = set(parameters)
        self.arriving: Callable[[], Tensor] | None = None

    @property
    def has_master(self) -> bool:
        return self.shard.dtype != self.own.dtype

    def joined_gradients(self) -> Tensor:
        return self.layout.join([parameter.grad for parameter in self.parameters], like=self.flat)

    def cut_gradients(self) -> None:
        gradient = self.layout.shard(self.joined_gradients(), self.rank)
        self.shard.grad = gradient.to(self.shard.dtype, copy=True)

    def send(self, is_last_use: bool) -> None:
        """Begin to average the gradients; free them if nobody needs them after that."""
        self.receive()
        flat = self.joined_gradients()
        if is_last_use:
            self.missing = set(self.parameters)
            for parameter in self.parameters:
                parameter.grad = None
        self.arriving = reduce_scatter(flat, self.group)

    def receive(self) -> None:
        if self.arriving is not None:
            _accumulate(self.shard, self.arriving().div_(self.layout.n))
            self.arriving = None

    def gather(self) -> dist.Work:
        if self.has_master:
            self.own.copy_(self.shard.detach())
        return dist.all_gather_single(self.flat, self.own, group=self.group, async_op=True)


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
        before, after = _weakly(self._before_forward), _weakly(self._after_forward)
        block.module.register_forward_pre_hook(lambda module, inputs: before(number, inputs))
        block.module.register_forward_hook(lambda module, inputs, outputs: after(number, outputs))
        hook = _weakly(self._gradient_is_computed)
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
        if self._sending is not None:
            self._sending.receive()  # one on its way at a time, or their copies would fill the memory
        block.free()
        block.send(self._weight)
        self._sending = block
        self._has_computed(block)

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
        dtype = own.dtype if compute_dtype is None else _master_dtype(own.dtype)
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
            _accumulate(self.own, self.arriving().div_(self.layout.n))
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


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The method as a hook. Hooks live as long as what they hang on, and should not keep the method's owner alive."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*args)

    return hook


def _tensors_in(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, (tuple, list, dict)):
        for part in outputs.values() if isinstance(outputs, dict) else outputs:
            yield from _tensors_in(part)


def _accumulate(shard: nn.Parameter, gradient: Tensor) -> None:
    if shard.grad is None:
        shard.grad = gradient.to(shard.dtype)
    else:
        shard.grad += gradient


def _master_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _check_arguments(params: list[Any], optimizer_cls: Any, gradients: str, bucket_mb: float) -> None:
    if not params:
        raise ValueError("params is empty; give parameters, for instance model.parameters()")
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, torch.optim.Optimizer)):
        raise ValueError(f"optimizer_cls={optimizer_cls!r} is no optimizer class; give one such as torch.optim.Adam")
    if optimizer_cls.__name__ in _NEEDS_WHOLE_TENSORS:
        raise ValueError(
            f"optimizer_cls={optimizer_cls.__name__} needs whole tensors, and a rank has a flat shard; "
            f"give one that works element by element, such as torch.optim.AdamW"
        )
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients={gradients!r} is unknown; choose one of {', '.join(GRADIENTS)}")
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb={bucket_mb} holds nothing; give a positive number of MiB, for instance 10")


def _check_model(model: nn.Module, compute_dtype: torch.dtype | None) -> None:
    parameters = list(model.parameters())
    if not parameters:
        raise ValueError(f"model={type(model).__name__} has no parameters, so there is nothing to shard")
    if not all(parameter.numel() for parameter in parameters):
        raise ValueError(f"model={type(model).__name__} has empty parameters: it is sharded already; build it anew")
    if compute_dtype is not None and not compute_dtype.is_floating_point:
        raise ValueError(f"compute_dtype={compute_dtype} cannot hold gradients; give torch.bfloat16, for instance")
