"""Data parallelism: every rank holds the whole model and a share of the minibatch.

The mean of the ranks' gradients is the gradient of the whole minibatch, provided that every share has the same
size; with unequal shares each gradient is weighted by its share.

    minibatch  ->  [share 0 | share 1 | share 2 | share 3]
                      |         |         |         |      forward and backward on every rank
                     g_0       g_1       g_2       g_3
                       \\________ all_reduce ________/      the only communication
                                   |
                    same mean gradient, same update, on every rank

`average_gradients` is this picture and nothing more: one message for each parameter, which ends in the sum of the
weights and the number of ranks with a gradient. `DataParallel` does the same, but collects gradients in buckets and
sends each as soon as it is full, while the backward pass, which begins at the last layer, is still computing:

    compute      | forward | backward:  head   layer 2   layer 1   embedding |           | optimizer step
    network                             | bucket 0 |  | bucket 1 |   | bucket 2 | finish()

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 13(12).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms import guards
from course_lib.mechanisms.buckets import Bucket, Reducer, fill_buckets, watch_gradients
from course_lib.mechanisms.groups import Group
from course_lib.mechanisms.replicas import make_equal, named_tensors, samples_in, total_over_ranks
from course_lib.mechanisms.shards import master_dtype


@torch.no_grad()
def average_gradients(model: nn.Module, group: Group = None, samples: int | None = None) -> None:
    """Replace each parameter's gradient by its mean over the group, in place.

    samples: the size of this rank's share, 1 or more, where shares differ; its gradient, a mean over the share, then
        counts in proportion. All ranks give it or none does.
    Frozen parameters are left alone, and so are those for which no rank has a gradient. Gradients are dense.

    Raises ValueError, on all ranks, if they disagree on which parameters have a gradient.
    """
    guards.right_group(group, model.parameters())
    weight, holders = (1 if samples is None else samples), {}
    for name, parameter in trainable(model).items():
        message = _weighted(parameter, weight)
        dist.all_reduce(message, group=group)
        gradient, total_weight, holders[name] = message[:-2], message[-2], int(message[-1])
        if parameter.grad is not None:
            parameter.grad.copy_((gradient / total_weight).view_as(parameter))
    guards.same_gradients(holders, dist.get_world_size(group))


def _weighted(parameter: nn.Parameter, weight: float) -> Tensor:
    """The gradient times its weight, then the weight, and 1 for a rank that has one; zeros for a rank without.

    In float32 if the gradient has 16 bits, where a sum may overflow and its mean does not.
    """
    if parameter.grad is None:
        return torch.zeros(parameter.numel() + 2, dtype=master_dtype(parameter.dtype), device=parameter.device)
    gradient = parameter.grad.flatten().to(master_dtype(parameter.dtype))
    return torch.cat([weight * gradient, gradient.new_tensor([weight, 1])])


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
    are not synchronized again later.) If ranks hold different parts of a model, group= names those that hold the same.

    A rank's share is the length of the first tensor given to `forward`, also within tuples, lists and dicts. Its
    gradient, a mean over the share, is weighted by it, so shares may differ. A parameter that only some ranks have
    used counts as zeros on the others; one that no rank has used, or that was frozen, has no gradient after `finish()`
    either, and so is left alone. Gradients are dense.

    An optimizer cannot know whether `finish()` was called; if it was forgotten, the next forward pass raises an error.

    bucket_mb: gradients travel in buckets of up to this many MiB, filled from the last parameter to the first; a
        larger parameter gets a bucket of its own, and a bucket holds one dtype.
    overlap: send each bucket from within the backward pass; otherwise send all of them in `finish()`.

    Raises ValueError if the ranks' models have different parameters or buffers.
    """

    def __init__(self, model: nn.Module, group: Group = None, bucket_mb: float = 25, overlap: bool = True) -> None:
        super().__init__()
        self.module, self.group = model, group
        parameters = list(trainable(model).values())
        buckets = fill_buckets(reversed(parameters), bucket_mb)
        make_equal(named_tensors(model), group)
        self._buckets = [_bucket_of(held) for held in buckets]
        self._reducer = Reducer(buckets, self._all_reduce, overlap)
        self._works: list[Any] = []
        self._samples: int | None = None  # in forward passes since the last `finish()`
        self._first_total: int | None = None
        watch_gradients(parameters, self._gradient_is_computed)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output.

        Raises RuntimeError if the gradients of the last step were not finished, and for a second forward pass with
        another number of samples before `backward()`: the gradient of both has only one weight.
        """
        if torch.is_grad_enabled():
            samples = samples_in((args, kwargs))
            guards.forward_may_begin(self._reducer.has_begun, self._samples, samples)
            self._samples = samples
        return self.module(*args, **kwargs)

    def _gradient_is_computed(self, parameter: Tensor) -> None:
        if self._samples is not None:  # else another replica of the same model is at work
            self._reducer.gradient_is_computed(parameter)

    def _all_reduce(self, number: int) -> None:
        bucket, samples = self._buckets[number], self._samples or 0
        # Weights need a common measure. This step's total would do, but asking for it in every step costs as much as
        # a bucket; that of the first step does as well, as `finish` divides by the sum of the weights.
        if self._first_total is None:
            self._first_total = max(1, total_over_ranks(samples, bucket.flat.device, self.group))
        _pack(bucket, samples / self._first_total)
        self._works.append(dist.all_reduce(bucket.flat, group=self.group, async_op=True))

    def finish(self) -> None:
        """Wait until all gradients have arrived; from here on every `.grad` is the mean over the group.

        Raises RuntimeError if no forward pass came before it, or no backward pass after that.
        """
        guards.backward_is_done(self._samples, self._reducer.has_begun)
        self._reducer.reduce_rest()
        for bucket, work in zip(self._buckets, self._works, strict=True):
            work.wait()
            _unpack(bucket)
        self._works, self._samples = [], None
        self._reducer.begin_step()


# A message: | gradients x weight | for each parameter, how many ranks had a gradient | the weight |


def _bucket_of(parameters: list[nn.Parameter]) -> Bucket:
    numbers = sum(parameter.numel() for parameter in parameters) + len(parameters) + 1
    return Bucket(parameters, parameters[0].new_zeros(numbers))


@torch.no_grad()
def _pack(bucket: Bucket, weight: float) -> None:
    had_one = [parameter.grad is not None for parameter in bucket.parameters]
    bucket.rest.copy_(torch.tensor([*had_one, weight], dtype=bucket.flat.dtype))
    for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
        if parameter.grad is None or weight == 0:  # an empty share has a loss of 0 / 0, and 0 x nan is nan
            view.zero_()
        else:
            torch.mul(parameter.grad, bucket.rest[-1], out=view)


def _unpack(bucket: Bucket) -> None:
    bucket.flat /= bucket.rest[-1].clone()
    for parameter, view, count in zip(bucket.parameters, bucket.views, bucket.rest.tolist()[:-1], strict=True):
        if count:
            parameter.grad = view
