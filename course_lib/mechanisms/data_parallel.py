"""Data parallelism: every rank holds the whole model and a share of the minibatch.

The mean of the ranks' gradients is the gradient of the whole minibatch, provided that every share has the same
size; with unequal shares each gradient is weighted by its share.

    minibatch  ->  [share 0 | share 1 | share 2 | share 3]
                      |         |         |         |      forward and backward on every rank
                     g_0       g_1       g_2       g_3
                       \\________ all_reduce ________/      the only communication
                                   |
                    same mean gradient, same update, on every rank

`average_gradients` is this picture and nothing more: one message for each parameter, which ends in the weights.
`DataParallel` does the same, but collects gradients in buckets and sends each as soon as it is full, while the backward
pass, which begins at the last layer, is still computing:

    compute      | forward | backward:  head   layer 2   layer 1   embedding |           | optimizer step
    network                             | bucket 0 |  | bucket 1 |   | bucket 2 | finish()

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 13(12).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms import guards
from course_lib.mechanisms.buckets import Reducer, fill_buckets, watch_gradients
from course_lib.mechanisms.groups import Group
from course_lib.mechanisms.replicas import make_equal, named_tensors, samples_in, total_over_ranks
from course_lib.mechanisms.shards import master_dtype


def average_gradients(model: nn.Module, group: Group = None, samples: int | None = None) -> None:
    """Replace each parameter's gradient by its mean over the group.

    samples: the size of this rank's share, 1 or more, where shares differ; its gradient, a mean over the share, then
        counts in proportion. All ranks give it or none does.
    Frozen parameters are left alone, and so are those for which no rank has a gradient. One that only some ranks have
    used counts as zeros on the others. Gradients are dense.
    """
    guards.right_group(group, model.parameters())
    for parameter in trainable(model).values():
        # In float32 for 16 bits, where a sum may overflow and its mean does not.
        message = Message([parameter], 1 if samples is None else samples, master_dtype(parameter.dtype))
        dist.all_reduce(message.packed(), group=group)
        message.take_means()


class Message:
    """Gradients on their way to their mean.

    | gradients x weight | for each parameter, weight if this rank has a gradient | weight |
    """

    def __init__(self, parameters: Sequence[nn.Parameter], weight: float, dtype: torch.dtype) -> None:
        sizes = [*(parameter.numel() for parameter in parameters), len(parameters) + 1]
        self._content = parameters[0].new_empty(sum(sizes), dtype=dtype)
        *places, self._weights = self._content.split(sizes)
        self._places = {p: place.view_as(p) for p, place in zip(parameters, places, strict=True)}
        self._weight, self._factor = weight, self._weights.fill_(weight)[-1:]

    def pack(self, parameter: nn.Parameter) -> Tensor:
        """Put a gradient into its place, and return the place."""
        place, gradient = self._places[parameter], parameter.grad
        if gradient is None or self._weight == 0:  # an empty share has a loss of 0 / 0, and 0 x nan is nan
            return place.zero_()
        return torch.mul(gradient, self._factor, out=place)

    @torch.no_grad()
    def packed(self) -> Tensor:
        """The vector for the ranks to add up: all gradients, each packed now unless it is in its place already."""
        for number, (parameter, place) in enumerate(self._places.items()):
            if parameter.grad is None:
                self._weights[number] = 0
            if parameter.grad is not place:
                self.pack(parameter)
        return self._content

    def take_means(self) -> None:
        """Take the mean gradients from the sum of the ranks' messages."""
        *had_one, total = self._weights.tolist()
        if total != 1:
            self._content /= total
        for (parameter, mean), is_there in zip(self._places.items(), had_one, strict=True):
            if not is_there:
                parameter.grad = None
            elif parameter.grad is not mean:
                parameter.grad = mean.to(parameter.grad_dtype)


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
        make_equal(named_tensors(model), group)
        self._buckets = fill_buckets(reversed(trainable(model).values()), bucket_mb)
        self._reducer = Reducer(self._buckets, self._all_reduce, overlap)
        self._messages: dict[int, Message] = {}
        self._on_their_way: list[Any] = []
        self._samples: int | None = None  # in forward passes since the last `finish()`
        self._first_total: int | None = None
        for number, bucket in enumerate(self._buckets):
            watch_gradients(bucket, self._gradient_is_computed, number)

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

    def _gradient_is_computed(self, number: int, parameter: nn.Parameter) -> None:
        if self._samples is not None:  # else another replica of the same model is at work
            parameter.grad = self._message(number).pack(parameter)  # its mean will be in the same place
            self._reducer.gradient_is_computed(number, parameter)

    def _message(self, number: int) -> Message:
        if number not in self._messages:
            bucket, samples = self._buckets[number], self._samples or 0
            # Weights need a common measure. This step's total would do, but asking for it in every step costs as much
            # as a bucket; that of the first step does as well, as `take_means` divides by the sum of the weights.
            if self._first_total is None:
                self._first_total = max(1, total_over_ranks(samples, bucket[0].device, self.group))
            self._messages[number] = Message(bucket, samples / self._first_total, bucket[0].dtype)
        return self._messages[number]

    def _all_reduce(self, number: int) -> None:
        content = self._message(number).packed()
        self._on_their_way.append(dist.all_reduce(content, group=self.group, async_op=True))

    def finish(self) -> None:
        """Wait until all gradients have arrived; from here on every `.grad` is the mean over the group.

        Raises RuntimeError if no forward pass came before it, or no backward pass after that.
        """
        guards.backward_is_done(self._samples, self._reducer.has_begun)
        self._reducer.reduce_rest()
        for number, work in enumerate(self._on_their_way):
            work.wait()
            self._messages[number].take_means()
        self._messages, self._on_their_way, self._samples = {}, [], None
        self._reducer.begin_step()
