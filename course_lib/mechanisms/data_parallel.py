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
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.timeline import reach

NamedParameters = list[tuple[str, nn.Parameter]]


def average_gradients(model: nn.Module, group: dist.ProcessGroup | None = None, samples: int | None = None) -> None:
    """Replace each parameter's gradient by its mean over the group, in place.

    samples: the size of this rank's share, where shares differ; its gradient, a mean over the share, then counts
        in proportion. All ranks give it or none does.
    Frozen parameters are left alone, and so are those for which no rank has a gradient.

    Raises ValueError, on all ranks, if they disagree on which parameters have a gradient or if samples is wrong.
    """
    with_gradient = [(name, parameter) for name, parameter in trainable(model) if parameter.grad is not None]
    _require_same(with_gradient, "have a gradient", group)
    weight = 1.0 if samples is None else _weight(samples, group)
    world_size = dist.get_world_size(group)
    for _, parameter in with_gradient:
        parameter.grad *= weight
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= world_size


def trainable(model: nn.Module) -> NamedParameters:
    """The parameters that are not frozen, with their names; one that is used twice (tied) is listed once."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


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

    A rank's share is the length of the first tensor given to `forward`. Its gradient, a mean over the share, is
    weighted by it, so shares may differ. A parameter that a rank has not used counts as a gradient of zeros there,
    and after `finish()` every trainable parameter has a gradient, if only of zeros.

    bucket_mb: gradients travel in buckets of up to this many MiB, filled from the last parameter to the first; a
        larger parameter gets a bucket of its own, and a bucket holds one dtype.
    overlap: send each bucket from within the backward pass; otherwise send all of them in `finish()`.

    Raises ValueError if bucket_mb is not positive or the ranks' models have different parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        bucket_mb: float = 25,
        overlap: bool = True,
    ) -> None:
        super().__init__()
        if not bucket_mb > 0:
            raise ValueError(f"bucket_mb={bucket_mb} holds nothing; give a positive number of MiB, for instance 25")
        self.module = model
        self.group = group
        self.overlap = overlap
        parameters = trainable(model)
        _require_same(parameters, "are there to train", group)
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            dist.broadcast(tensor.detach(), group=group, group_src=0)
        self._buckets = _fill_buckets((parameter for _, parameter in reversed(parameters)), bucket_mb * 2**20)
        self._total_bytes = sum(bucket.flat.nbytes for bucket in self._buckets)
        self._is_syncing = True
        self._begin_step()
        self._watch_gradients()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns. Raises RuntimeError if the gradients of the last step were not finished."""
        if torch.is_grad_enabled():
            if self._phase == "backward":
                raise RuntimeError(
                    "finish() was not called after the last backward(); "
                    "call it before optimizer.step(), or accumulate gradients inside no_sync()"
                )
            self._phase = "forward"
            self._count_samples((*args, *kwargs.values()))
        return self.module(*args, **kwargs)

    def finish(self) -> None:
        """Wait until all gradients have arrived; from here on every `.grad` is the mean over the group.

        Raises RuntimeError if no forward pass came before it.
        """
        if self._phase == "idle":
            raise RuntimeError(
                "finish() has nothing to finish: there was no forward pass since the last one; "
                "call it once per step, after backward()"
            )
        for bucket in self._buckets:
            if bucket.work is None:
                self._send(bucket)
        for bucket in self._buckets:
            bucket.receive(dist.get_world_size(self.group))
        self._begin_step()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: forward and backward passes inside send nothing, the next `finish()` sends the sum."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def _begin_step(self) -> None:
        self._phase = "idle"
        self._accumulated_samples = 0
        self._latest_samples = 0
        self._weighing: _Weighing | None = None
        self._bytes_computed = 0
        for bucket in self._buckets:
            bucket.missing = set(range(len(bucket.parameters)))

    def _count_samples(self, inputs: Iterable[Any]) -> None:
        samples = next((len(value) for value in inputs if isinstance(value, Tensor) and value.dim()), 1)
        if self._is_syncing:
            self._latest_samples = samples
        else:
            self._accumulated_samples += samples

    def _watch_gradients(self) -> None:
        # Hooks live as long as their parameter. Held weakly, a replica goes when another is made of the same model.
        this = weakref.ref(self)

        def hook_of(bucket: _Bucket, index: int) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                replica = this()
                if replica is not None and replica._is_syncing and replica._phase != "idle":
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
        self._phase = "backward"
        bucket.missing.remove(index)
        self._bytes_computed += bucket.parameters[index].nbytes
        if self.overlap:
            self._send_full_buckets()

    def _send_full_buckets(self) -> None:
        for bucket in self._buckets:  # in this order on all ranks, whatever the order in which they fill
            if bucket.missing:
                return
            if bucket.work is None:
                reach(self._bytes_computed / self._total_bytes)
                self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        if self._weight is None:
            self._weight = _weight(self._accumulated_samples + self._latest_samples, self.group)
        bucket.send(self._weight, self.group)
