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
and the all-gather brings the new parameters instead of the gradients. ZeRO-3, in `fully_sharded`, gathers parameters
twice, once forward and once backward, and so sends three halves instead of two.

Updates have to be element by element (SGD, Adam and most others), since a shard ends anywhere within a matrix.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms.buckets import InOrder, fill_buckets, watch_gradients, weakly
from course_lib.mechanisms.fully_sharded import FullySharded as FullySharded
from course_lib.mechanisms.groups import Group
from course_lib.mechanisms.replicas import check_same_parameters, from_first_rank
from course_lib.mechanisms.shards import Bucket, Layout, check_frozen, cut_state, gather_state, master_dtype, take_back
from course_lib.timeline import compute

GRADIENTS = ("local", "sharded")
_NEEDS_WHOLE_TENSORS = ("LBFGS", "Adafactor", "Muon", "SparseAdam")


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of which every rank holds one Nth: ZeRO-1, and with gradients="sharded" ZeRO-2.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
        for inputs, targets in shares:
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    The model is a plain one. Construction gives every rank the parameters of the group's first. `step()` averages the
    gradients over the group, updates this rank's shard, and gathers the parameters.

    gradients: "local", each rank's `.grad` is its own until `step()` averages them with a reduce-scatter; "sharded",
        each bucket is reduce-scattered within backward() as soon as it is complete, and NaNs without memory take the
        place of its `.grad`s, so that nobody reads the gradient where it no longer is. (If several backward passes
        add up, all ranks have to use the same parameters in each.)
        Every rank's gradient counts the same. With shares of different size say "local", and call
        `average_gradients` before `step()`: the mean of what is the same on all ranks is the same again.
    bucket_mb: parameters are laid end to end in buckets of up to this many MiB (None: in one), from last to first.
    kwargs: for `optimizer_cls`, which sees this rank's part of each parameter, flat. `param_groups` hold the whole
        parameters, and what a scheduler changes there is used. As usual, a parameter without gradient, on all ranks
        now, is left alone; one that only some ranks have used counts as zeros on the others.

    Parameters in 16 bits get a float32 master, sharded with the rest: 12 bytes / N each for Adam.

    inner: the optimizer of this rank's shards. Parameter groups come at construction; none can be added later.

    Raises ValueError for an argument that cannot work, and on all ranks if their parameters differ; TypeError for one
    tensor in place of a list.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        group: Group = None,
        *,
        gradients: Literal["local", "sharded"] = "local",
        bucket_mb: float | None = 10,
        **kwargs: Any,
    ) -> None:
        _check_arguments(optimizer_cls, gradients)
        self.group, self.gradients = group, gradients
        self._buckets: list[Bucket] = []
        self._elsewhere: dict[nn.Parameter, Tensor] = {}  # what a `.grad` is while the gradient is in the shards
        self._is_sent = self._is_finished = False
        super().__init__(params, kwargs)
        self.inner = optimizer_cls([self._shard_out(whole, bucket_mb) for whole in self.param_groups], **kwargs)
        for whole, sharded in zip(self.param_groups, self.inner.param_groups, strict=True):
            whole.update(_hyperparameters(sharded))
        self.defaults = self.inner.defaults
        self._in_order = InOrder([bucket.parameters for bucket in self._buckets], self._send)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # closures are for optimizers that need whole tensors
        """Update the parameters on all ranks.

        Raises RuntimeError if a parameter has another dtype than before, or is no longer frozen, and for gradients
        that a `DataParallel` has yet to average.
        """
        self.finish()
        wholes = (parameter for group in self.param_groups for parameter in group["params"])
        check_frozen(wholes, self._elsewhere, "ShardedOptimizer")
        for bucket in self._buckets:
            _use_values_of_now(bucket)
        self._update_shards()
        for work in [bucket.gather() for bucket in self._buckets]:
            work.wait()
        self._begin_step()
        if self.gradients != "sharded":  # shards of gradients that are still there as a whole
            self.inner.zero_grad()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until the gradients have arrived: from here on the shards' `.grad` is the mean over the group.

        `step()` calls it, unless it was called before, for instance to clip gradients. After it, backward() raises
        RuntimeError until `step()` or `zero_grad()`.
        """
        if self._is_finished:
            return
        for bucket in self._buckets:
            _forget_zeroed(bucket)
        while self._in_order.next or not self._is_sent or self._has_more():
            self._in_order.send(rest=True)
            self._in_order.begin()
        for bucket in self._buckets:
            bucket.receive()
        self._is_finished = True

    def _update_shards(self) -> None:
        for whole, sharded in zip(self.param_groups, self.inner.param_groups, strict=True):
            sharded.update(_hyperparameters(whole))
        with compute("optimizer"):
            self.inner.step()
        for whole, sharded in zip(self.param_groups, self.inner.param_groups, strict=True):
            whole.update(_hyperparameters(sharded))  # some optimizers choose a learning rate themselves

    @torch.no_grad()
    def _gradient_is_computed(self, parameter: nn.Parameter) -> None:
        if self._in_order.note(parameter):
            self._in_order.send()
            if self._in_order.next == len(self._buckets):
                self._in_order.begin()

    def _send(self, number: int) -> None:
        self._buckets[number - 1].receive()  # one on its way at a time, or their copies would fill the memory
        bucket = self._buckets[number]
        bucket.send(self._gradients_in(bucket))
        if self.gradients == "sharded":
            for parameter in bucket.parameters:
                parameter.grad = self._elsewhere[parameter]
        self._is_sent = self._is_sent or bucket is self._buckets[-1]

    def _gradients_in(self, bucket: Bucket) -> list[Tensor | None]:
        """Those that are not in the shards yet."""
        pairs = [(parameter.grad, self._elsewhere[parameter]) for parameter in bucket.parameters]
        return [None if gradient is elsewhere else gradient for gradient, elsewhere in pairs]

    def _has_more(self) -> bool:
        """Whether a later backward pass has left gradients in a bucket that is not full."""
        gradients = (gradient for bucket in self._buckets for gradient in self._gradients_in(bucket))
        return self.gradients == "sharded" and any(gradient is not None for gradient in gradients)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for bucket in self._buckets:
            bucket.receive()
        self.inner.zero_grad()
        self._begin_step()

    def _begin_step(self) -> None:
        self._in_order.begin()
        self._is_sent = self._is_finished = False

    @torch.no_grad()
    def _gradient_is_coming(self, number: int, index: int, _: Tensor) -> None:
        """Make room for a gradient that autograd is about to add to what `.grad` is."""
        if self._is_finished:
            raise RuntimeError(
                "backward() came after finish(), so its gradients would be lost; "
                "call finish() after the last backward(), and then step() or zero_grad()"
            )
        bucket = self._buckets[number]
        parameter = bucket.parameters[index]
        if parameter.grad is self._elsewhere[parameter]:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad is None:  # somebody has thrown away the last one
            bucket.receive()
            bucket.updated[index].grad = None

    # What is sharded

    @property
    def shards(self) -> list[nn.Parameter]:
        """This rank's part of each parameter, flat; after `finish()` their `.grad` is that of the mean gradient."""
        return [piece for bucket in self._buckets for piece in bucket.updated]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._buckets:
            raise ValueError(
                "parameters were sharded when ShardedOptimizer was made; make a new one with this group, too"
            )
        super().add_param_group(param_group)

    def _shard_out(self, whole: dict[str, Any], bucket_mb: float | None) -> dict[str, Any]:
        """The same parameter group with shards in place of parameters."""
        parameters = [parameter for parameter in whole["params"] if parameter.requires_grad]
        frozen = [parameter for parameter in whole["params"] if not parameter.requires_grad]
        if not parameters:
            raise ValueError("params holds only frozen parameters; give some that require a gradient")
        full = fill_buckets(reversed(parameters), bucket_mb)
        named = {f"params[{number}]": parameter for number, parameter in enumerate((*parameters, *frozen))}
        check_same_parameters(named, "are to be updated", parameters[0].device, self.group)
        from_first_rank(named.values(), self.group)
        buckets = [_bucket(held, self.group) for held in full]
        self._watch(buckets)
        return {**_hyperparameters(whole), "params": [piece for bucket in buckets for piece in bucket.updated]}

    def _watch(self, buckets: list[Bucket]) -> None:
        hook = weakly(self._gradient_is_coming)
        for number, bucket in enumerate(buckets, start=len(self._buckets)):
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_hook(functools.partial(hook, number, index))
                self._elsewhere[parameter] = bucket.flat.new_full((), math.nan).expand(parameter.shape)
            if self.gradients == "sharded":
                watch_gradients(bucket.parameters, self._gradient_is_computed)
        self._buckets += buckets

    # State, as if there were one process

    def state_dict(self) -> dict[str, Any]:
        """The state of `optimizer_cls` on one process, with whole tensors, on every rank. All ranks call it."""
        packed = super().state_dict()
        numbers = self._numbers()
        for bucket in self._buckets:
            states = {piece: dict(self.inner.state.get(piece, {})) for piece in bucket.updated}
            if _has_master(bucket):
                for piece, state in states.items():
                    state["master"] = piece.detach()
            whole = gather_state(bucket, states)
            packed["state"].update((numbers[parameter], state) for parameter, state in whole.items() if state)
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state as `state_dict()` makes it, at this or another world size, or that of a plain optimizer.

        All ranks call it. Load the model first: masters that the state does not hold are made from the parameters.
        """
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        numbers = self._numbers()
        for bucket in self._buckets:
            states = {parameter: state_dict["state"].get(numbers[parameter], {}) for parameter in bucket.parameters}
            own = bucket.layout.pieces(bucket.layout.shard(bucket.flat))
            for value, (piece, state) in zip(own, cut_state(bucket, states).items(), strict=True):
                if _has_master(bucket):
                    piece.copy_(state.pop("master", value))
                self.inner.state[piece] = state
            bucket.gather().wait()  # a master decides what the parameter is

    def _numbers(self) -> dict[nn.Parameter, int]:
        """The number under which a parameter stands in a state_dict."""
        return {p: number for number, p in enumerate(p for group in self.param_groups for p in group["params"])}


def _bucket(parameters: list[nn.Parameter], group: Group) -> Bucket:
    """Lay parameters end to end; the shard is part of that, or a master if they have 16 bits."""
    layout = Layout(parameters, group)
    flat = layout.join([parameter.detach() for parameter in parameters], like=parameters[0])
    bucket = Bucket(parameters, layout, flat, layout.shard(flat).to(master_dtype(flat.dtype)))
    bucket.updated = [nn.Parameter(piece) for piece in bucket.pieces]
    for parameter, view in zip(parameters, bucket.views, strict=True):
        parameter.data = view
    return bucket


def _has_master(bucket: Bucket) -> bool:
    return bucket.shard.dtype != bucket.flat.dtype


def _use_values_of_now(bucket: Bucket) -> None:
    """Parameters may have been replaced or, where there is a master, changed."""
    take_back(bucket.parameters, bucket.views)
    if _has_master(bucket):
        own = bucket.layout.shard(bucket.flat)
        bucket.shard.copy_(torch.where(own == bucket.shard.to(own.dtype), bucket.shard, own))


def _forget_zeroed(bucket: Bucket) -> None:
    """Throw away what shards have of gradients that somebody has thrown away, for instance by model.zero_grad()."""
    bucket.receive()
    for parameter, piece in zip(bucket.parameters, bucket.updated, strict=True):
        if parameter.grad is None:
            piece.grad = None


@torch.no_grad()
def clip_grad_norm(
    shards: Iterable[Tensor], max_norm: float, group: Group = None, counted: Iterable[Tensor] | None = None
) -> float:
    """Scale the shards' gradients so that the norm over all parameters is at most `max_norm`; returns it from before.

    shards: `FullySharded.parameters()`, or `ShardedOptimizer.shards` after `finish()`. Every element is on one
        rank only, so the squares of all ranks add up to the square of the norm.
    counted: those of them that this rank counts, where others hold copies of the rest. None: all.

    Raises ValueError if max_norm is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} would erase or flip all gradients; give a positive number such as 1.0")
    shards = list(shards)
    squares = torch.zeros((), dtype=torch.float64, device=shards[0].device)
    for shard in shards if counted is None else counted:
        if shard.grad is not None:
            squares += shard.grad.square().sum()
    dist.all_reduce(squares, group=group)
    norm = float(squares.sqrt())
    for shard in shards:
        if shard.grad is not None:
            shard.grad *= min(1.0, max_norm / (norm + 1e-6))  # as in torch.nn.utils.clip_grad_norm_
    return norm


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _check_arguments(optimizer_cls: Any, gradients: str) -> None:
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, torch.optim.Optimizer)):
        raise ValueError(f"optimizer_cls={optimizer_cls!r} is no optimizer class; give one such as torch.optim.Adam")
    if optimizer_cls.__name__ in _NEEDS_WHOLE_TENSORS:
        raise ValueError(
            f"optimizer_cls={optimizer_cls.__name__} needs whole tensors, and a rank has a flat shard; "
            f"give one that works element by element, such as torch.optim.AdamW"
        )
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients={gradients!r} is unknown; choose one of {', '.join(GRADIENTS)}")
