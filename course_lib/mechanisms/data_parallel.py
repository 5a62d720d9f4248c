"""Data parallelism: every rank holds the whole model and a share of the minibatch.

The mean of the ranks' gradients is the gradient of the whole minibatch, provided that every share has the same
size; with unequal shares each gradient is weighted by its share.

    minibatch  ->  [share 0 | share 1 | share 2 | share 3]
                      |         |         |         |      forward and backward on every rank
                     g_0       g_1       g_2       g_3
                       \\________ all_reduce ________/      the only communication
                                   |
                    same mean gradient, same update, on every rank

`average_gradients` is this picture and nothing more. `DataParallel` does the same, but gathers gradients in buckets
and sends each as soon as it is full, while the backward pass, which begins at the last layer, is still computing:

    compute      | forward | backward:  head   layer 2   layer 1   embedding |           | optimizer step
    network                             | bucket 0 |  | bucket 1 |   | bucket 2 | finish()

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 13(12).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from course_lib.mechanisms.shards import from_first_rank
from course_lib.timeline import reach

_UNKNOWN = -1  # the share of a rank that did not say


def average_gradients(model: nn.Module, group: dist.ProcessGroup | None = None, samples: int | None = None) -> None:
    """Replace each parameter's gradient by its mean over the group, in place.

    samples: the size of this rank's share, where shares differ; its gradient, a mean over the share, then counts
        in proportion. All ranks give it or none does.
    Frozen parameters are left alone, and so are those for which no rank has a gradient.

    Raises ValueError, on all ranks, if they disagree on which parameters have a gradient or if samples is wrong.
    """
    gradients = {name: tensor.grad for name, tensor in trainable(model).items() if tensor.grad is not None}
    shares = agree(gradients, "have a gradient", _device(model), group, samples)
    weight = _weight(samples, shares)
    for gradient in gradients.values():
        before, after = (len(shares), 1) if _is_narrow(gradient) else (1, len(shares))
        gradient *= weight / before
        dist.all_reduce(gradient, group=group)
        gradient /= after


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen, by name and in the model's order; a tied one, used twice, is there once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class DataParallel(nn.Module):
    """A replica of the model that averages gradients over the group while they are being computed.

        replica = DataParallel(model)
        for inputs, targets in shares:
            loss_fn(replica(inputs), targets).backward()
            replica.finish()
            optimizer.step()
            optimizer.zero_grad()

    Construction makes the replicas equal: parameters and buffers of the group's first rank go to all. (Buffers
    are not synchronized again later.)

    A rank's share is the length of the first tensor given to `forward`, also within tuples, lists and dicts. Its
    gradient, a mean over the share, is weighted by it, so shares may differ. A parameter that a rank has not used
    counts as a gradient of zeros there, and after `finish()` every trainable parameter has a gradient, if only of
    zeros, and a dense one.

    A forgotten `finish()` is told in the `step()` of an optimizer that has the model's parameters (`MasterWeights`
    is one), and else in the next forward pass.

    bucket_mb: gradients travel in buckets of up to this many MiB, filled from the last parameter to the first; a
        larger parameter gets a bucket of its own, and a bucket holds one dtype. None: one bucket for all.
    overlap: send each bucket from within the backward pass; otherwise send all of them in `finish()`.

    Raises ValueError if bucket_mb is not positive or the ranks' models have different parameters or buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        bucket_mb: float | None = 25,
        overlap: bool = True,
    ) -> None:
        super().__init__()
        limit = math.inf if bucket_mb is None else bucket_mb * 2**20
        if not limit > 0:
            raise ValueError(f"bucket_mb={bucket_mb} holds nothing; give a positive number of MiB, for instance 25")
        self.module = model
        self.group = group
        self.overlap = overlap
        parameters = trainable(model)
        frozen = {f"{name} (frozen)": tensor for name, tensor in model.named_parameters() if name not in parameters}
        buffers = {f"{name} (a buffer)": tensor for name, tensor in model.named_buffers()}
        agree(parameters | frozen | buffers, "the model has", _device(model), group)
        from_first_rank(model, group)
        buckets = fill_buckets(reversed(parameters.values()), limit)
        self._buckets = [_Bucket(bucket) for bucket in buckets]
        self._total_bytes = sum(parameter.nbytes for parameter in parameters.values())
        self._is_syncing = True
        self._usual_share: float | None = None
        self._step = _Step()
        self._watch_gradients()
        _replicas.add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns.

        Raises RuntimeError if the gradients of the last step were not finished, and for a second forward pass with
        another number of samples before `backward()`: the gradient of both has only one weight.
        """
        if torch.is_grad_enabled():
            if self._step.phase == "backward":
                raise RuntimeError(
                    "finish() was not called after the last backward(); "
                    "call it before optimizer.step(), or accumulate gradients inside no_sync()"
                )
            self._step.phase = "forward"
            self._count_samples(tree_leaves((args, kwargs)))
        return self.module(*args, **kwargs)

    def finish(self) -> None:
        """Wait until all gradients have arrived; from here on every `.grad` is the mean over the group.

        Raises RuntimeError if no forward pass came before it, or no backward pass after that.
        """
        if self._step.phase == "idle":
            raise RuntimeError(
                "finish() has nothing to finish: there was no forward pass since the last one; "
                "call it once per step, after backward()"
            )
        if self._step.phase == "forward" and self._step.samples:  # without samples there may be no loss to go back from
            raise RuntimeError(
                "finish() was called before backward(), so there is no gradient to average yet; call it after "
                "backward() and before optimizer.step() (and evaluate inside torch.no_grad())"
            )
        for bucket in self._buckets:
            if bucket.work is None:
                self._send(bucket)
        for bucket in self._buckets:
            bucket.receive()
            if bucket.flat.dtype == torch.float16:  # no room for the weights of shares that have grown: ask again
                self._usual_share = None
        self._step = _Step()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: forward and backward passes inside send nothing, the next `finish()` sends the sum."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def _count_samples(self, inputs: Iterable[Any]) -> None:
        samples = next((len(value) for value in inputs if isinstance(value, Tensor) and value.dim()), 1)
        if not self._is_syncing:
            self._step.accumulated_samples += samples
            return
        latest, self._step.latest_samples = self._step.latest_samples, samples
        if latest not in (None, samples):
            raise RuntimeError(
                f"a forward pass with {latest} samples and one with {samples} came before one backward(), whose "
                "gradient can count for only one number of them; give both passes as many, or call backward() and "
                "finish() after each (and evaluate inside torch.no_grad())"
            )

    def _watch_gradients(self) -> None:
        # Hooks live as long as their parameter. Held weakly, a replica goes when another is made of the same model.
        this = weakref.ref(self)

        def hook_of(bucket: _Bucket, index: int) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                replica = this()
                if replica is not None and replica._step.phase != "idle":
                    replica._gradient_is_computed(bucket, index)

            return hook

        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(hook_of(bucket, index))

    def _gradient_is_computed(self, bucket: _Bucket, index: int) -> None:
        if index not in bucket.missing:
            raise RuntimeError(
                "a second backward() before finish() would change gradients that are already on their way; "
                "call finish() first, or accumulate gradients inside no_sync()"
            )
        self._step.phase = "backward" if self._is_syncing else "accumulated"
        if not self._is_syncing:
            return
        bucket.missing.remove(index)
        if self.overlap and not bucket.missing:
            self._send_full_buckets()

    def _send_full_buckets(self) -> None:
        for bucket in self._buckets:  # in this order on all ranks, whatever the order in which they fill
            if bucket.missing:
                return
            if bucket.work is None:
                missing_bytes = sum(other.missing_bytes() for other in self._buckets)
                reach(1 - missing_bytes / self._total_bytes)
                self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        samples = self._step.samples
        # Weights need a common measure. This step's total would do, but asking for it in every step costs as much as
        # a bucket; the mean share of the first step does as well, as `receive` divides by the sum of the weights. (Not
        # so in float16, see `finish`.)
        if self._usual_share is None:
            self._usual_share = _mean(samples, bucket.flat.device, self.group)
        weight = samples / self._usual_share
        bucket.send(weight / dist.get_world_size(self.group) if _is_narrow(bucket.flat) else weight, self.group)


@dataclass
class _Step:
    """What has happened since the last `finish()`. (No part of the module: setting an attribute there is slow.)"""

    phase: Literal["idle", "forward", "accumulated", "backward"] = "idle"
    accumulated_samples: int = 0  # of forward passes within no_sync()
    latest_samples: int | None = None  # of the latest one outside

    @property
    def samples(self) -> int:
        return self.accumulated_samples + (self.latest_samples or 0)


_replicas: weakref.WeakSet[DataParallel] = weakref.WeakSet()


def check_finished(parameters: Iterable[Tensor]) -> None:
    """Raise RuntimeError if a replica has yet to average the gradients of one of the parameters."""
    unfinished = [replica for replica in _replicas if replica._step.phase in ("accumulated", "backward")]
    waiting = {parameter for replica in unfinished for bucket in replica._buckets for parameter in bucket.parameters}
    if not waiting.isdisjoint(parameters):
        raise RuntimeError(
            "step() came before finish(), with gradients that are not averaged yet, so the ranks' models would drift "
            "apart; call finish() after backward() and before step()"
        )


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    check_finished(parameter for group in optimizer.param_groups for parameter in group["params"])


register_optimizer_step_pre_hook(_before_step)  # of all optimizers: a replica does not know which one it trains with


class _Bucket:
    """Gradients that travel together in one flat tensor, followed by the weight that they were multiplied by.

    `views` are the parts of the flat tensor in the shapes of the parameters.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = set(range(len(parameters)))  # those whose gradient is not computed yet
        self.work: dist.Work | None = None
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes) + 1, dtype=parameters[0].dtype, device=parameters[0].device)
        self.gradients, self.weight = self.flat[:-1], self.flat[-1]
        parts = self.gradients.split(sizes)
        self.views = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]

    def missing_bytes(self) -> int:
        return sum(self.parameters[index].nbytes for index in self.missing)

    def send(self, weight: float, group: dist.ProcessGroup | None) -> None:
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad.to_dense())
        self.weight.fill_(weight)
        if weight == 0:  # an empty share has a loss of 0 / 0, and 0 x nan is nan
            self.gradients.zero_()
        elif weight != 1:
            self.gradients *= self.weight
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def receive(self) -> None:
        assert self.work is not None
        self.work.wait()
        self.work = None
        self.missing = set(range(len(self.parameters)))
        self.gradients /= self.weight
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view


def fill_buckets(parameters: Iterable[nn.Parameter], limit: float) -> list[list[nn.Parameter]]:
    """Parameters in the given order, in buckets of one dtype and device; none above `limit` bytes if it holds two."""
    full: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        bucket = filling.setdefault((parameter.dtype, parameter.device), [])
        if bucket and sum(held.nbytes for held in bucket) + parameter.nbytes > limit:
            full.append(filling.pop((parameter.dtype, parameter.device)))
            bucket = filling.setdefault((parameter.dtype, parameter.device), [])
        bucket.append(parameter)
    return [*full, *filling.values()]


def _is_narrow(tensor: Tensor) -> bool:
    """Whether it has 16 bits. A sum may overflow there where the mean does not, so ranks divide before they add."""
    return tensor.itemsize == 2


def _mean(samples: int, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """The mean of `samples` over the group."""
    total = torch.tensor([samples], device=device)
    dist.all_reduce(total, group=group)
    return max(1, int(total)) / dist.get_world_size(group)


def _weight(samples: int | None, shares: list[int]) -> float:
    """How much this rank's mean counts in the mean over the ranks: 1 for an average share."""
    if samples is None and set(shares) == {_UNKNOWN}:
        return 1.0
    if samples is None or min(shares) < 1:
        given = ["None" if share == _UNKNOWN else str(share) for share in shares]
        raise ValueError(f"samples is {', '.join(given)} on the ranks of the group; give 1 or more on all, or on none")
    return samples * len(shares) / sum(shares)


def agree(
    tensors: Mapping[str, Tensor],
    what: str,
    device: torch.device,
    group: dist.ProcessGroup | None,
    samples: int | None = None,
) -> list[int]:
    """Make sure that all ranks name the same tensors, and return everyone's `samples` (or _UNKNOWN), by rank.

    Only a checksum goes around. It has the same size whatever a rank holds, so the comparison itself cannot hang.
    Raises ValueError on every rank if names, shapes or dtypes differ, and on a rank that is not in the group.
    """
    if dist.get_rank(group) < 0:
        raise ValueError(f"group does not contain rank {dist.get_rank()}; only its members may call this")
    listed = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]
    checksum = zlib.crc32("\n".join(listed).encode())
    share = _UNKNOWN if samples is None else max(int(samples), 0)
    mine = torch.tensor([checksum, share], device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    checksums, shares = torch.stack(everyone).T.tolist()
    if len(set(checksums)) > 1:
        raise ValueError(_difference(listed, what, group))
    return shares


def _difference(listed: list[str], what: str, group: dist.ProcessGroup | None) -> str:
    """The first parameter that only some ranks list, in words."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, listed, group=group)
    for parameter in itertools.chain.from_iterable(everyone):
        holders = [rank for rank, theirs in enumerate(everyone) if parameter in theirs]
        if len(holders) < len(everyone):
            shape, _, dtype = parameter.rpartition(" ")
            return (
                f"ranks disagree on which parameters {what}: {shape} is listed only on rank "
                f"{', '.join(map(str, holders))} of {len(everyone)} as {dtype}; all ranks need the same ones"
            )
    return f"ranks disagree on the order of the parameters that {what}; build the model the same way on all ranks"


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters(), torch.empty(0)).device
