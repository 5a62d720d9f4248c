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

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from course_lib.mechanisms import guards
from course_lib.mechanisms.buckets import Reducer, fill_buckets, watch_gradients
from course_lib.mechanisms.fully_sharded import FullySharded as FullySharded
from course_lib.mechanisms.groups import Group
from course_lib.mechanisms.replicas import make_equal
from course_lib.mechanisms.shards import Shards
from course_lib.mechanisms.shards import clip_grad_norm as clip_grad_norm
from course_lib.timeline import compute


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of which every rank holds one Nth: ZeRO-1, and with gradients="sharded" ZeRO-2.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
        for inputs, targets in shares:
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    The model is a plain one. Construction gives every rank the parameters of the group's first. If ranks hold different
    parts of a model, group= names those that hold the same.

    gradients: "local", each rank's `.grad` is its own until `step()` averages them with a reduce-scatter; "sharded",
        each bucket is reduce-scattered within backward() as soon as it is complete, and its `.grad`s are None again.
        Then one backward() comes before each `step()`, which uses its gradients up.
        Every rank's gradient counts the same. With shares of different size say "local", and call
        `average_gradients` before `step()`: the mean of what is the same on all ranks is the same again.
    bucket_mb: parameters are laid end to end in buckets of up to this many MiB, from last to first.
    kwargs: for `optimizer_cls`, which sees this rank's part of each parameter, flat. `param_groups` hold the whole
        parameters, and what a scheduler changes there takes effect. A parameter that has no gradient on any rank is
        left alone; one that only some ranks have used counts as zeros on the others. Gradients are dense.

    Parameters in 16 bits get a float32 master, sharded with the rest: 12 bytes / N each for Adam.

    inner: the optimizer of this rank's shards.

    Parameter groups come at construction, and parameters that are frozen then are left out for good. Optimizers that
    need whole matrices (LBFGS, Adafactor, Muon) are not for shards. Move or convert a model first. A state fits the
    number of ranks that it comes from, and not another number, or a plain optimizer.

    Raises ValueError, on all ranks, if their parameters differ.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        group: Group = None,
        *,
        gradients: Literal["local", "sharded"] = "local",
        bucket_mb: float = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, optimizer_cls([torch.zeros(1)], **kwargs).defaults)
        self.group, self.gradients, self._is_finished = group, gradients, False
        self._buckets: list[Shards] = []
        self.inner = optimizer_cls([self._shard_out(whole, bucket_mb) for whole in self.param_groups], **kwargs)
        self._reducer = Reducer([bucket.parameters for bucket in self._buckets], self._reduce_scatter)
        for number, bucket in enumerate(self._buckets):
            watch_gradients(bucket.parameters, self._gradient_is_computed, number)

    def _shard_out(self, whole: dict[str, Any], bucket_mb: float) -> dict[str, Any]:
        """The same parameter group with shards in place of parameters."""
        make_equal({f"params[{number}]": parameter for number, parameter in enumerate(whole["params"])}, self.group)
        parameters = [parameter for parameter in whole["params"] if parameter.requires_grad]
        buckets = [Shards(held, self.group) for held in fill_buckets(reversed(parameters), bucket_mb)]
        for bucket in buckets:
            bucket.pieces = tuple(nn.Parameter(piece) for piece in bucket.pieces)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.data = view
        self._buckets += buckets
        return {**_settings(whole), "params": [piece for bucket in buckets for piece in bucket.pieces]}

    # A step: reduce-scatter, update, all-gather

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the parameters on all ranks."""
        self.finish()
        for bucket in self._buckets:
            bucket.take_over_changes()
        for whole, sharded in zip(self.param_groups, self.inner.param_groups, strict=True):
            sharded.update(_settings(whole))
        with compute("optimizer"):
            self.inner.step()
        for work in [bucket.all_gather() for bucket in self._buckets]:
            work.wait()
        self._begin_step()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until the gradients have arrived: from here on the shards' `.grad` is the mean over the group.

        `step()` calls it, unless it was called before, for instance to clip gradients. After it, backward() raises
        RuntimeError until `step()` or `zero_grad()`.
        """
        if not self._is_finished:
            self._reducer.reduce_rest()
            self._receive(len(self._buckets) - 1)
            self._is_finished = True

    def _reduce_scatter(self, number: int) -> None:
        if number:  # one on its way at a time, or their copies would fill the memory
            self._receive(number - 1)
        bucket = self._buckets[number]
        bucket.reduce_scatter([parameter.grad for parameter in bucket.parameters])
        if self.gradients == "sharded":
            for parameter in bucket.parameters:
                parameter.grad = None

    def _receive(self, number: int) -> None:
        bucket = self._buckets[number]
        for piece, mean in zip(bucket.pieces, bucket.receive(), strict=True):
            piece.grad = mean

    @torch.no_grad()
    def _gradient_is_computed(self, number: int, parameter: nn.Parameter) -> None:
        guards.not_finished_yet(self._is_finished)
        if self.gradients == "sharded":
            self._reducer.gradient_is_computed(number, parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for bucket in self._buckets:
            bucket.receive()
        self._begin_step()

    def _begin_step(self) -> None:
        self.inner.zero_grad()
        self._reducer.begin_step()
        self._is_finished = False

    @property
    def shards(self) -> list[Tensor]:
        """This rank's part of each parameter, flat, with the mean gradient. Raises RuntimeError before `finish()`."""
        guards.finish_came_first(self._is_finished)
        return [piece for bucket in self._buckets for piece in bucket.pieces]

    # State: each rank has its own

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, with its shards of the parameters, for the same rank of as many ranks."""
        return {"inner": self.inner.state_dict(), "shards": [bucket.shard for bucket in self._buckets]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a `state_dict` of this rank, the model's parameters included. All ranks call it."""
        self.inner.load_state_dict(state_dict["inner"])
        for whole, sharded in zip(self.param_groups, self.inner.param_groups, strict=True):
            whole.update(_settings(sharded))
        for bucket, shard in zip(self._buckets, state_dict["shards"], strict=True):
            bucket.shard.copy_(shard)
            bucket.all_gather().wait()


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
