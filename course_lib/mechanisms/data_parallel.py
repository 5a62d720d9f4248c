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
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms.buckets import InOrder, fill_buckets, nobody_had_one, watch_gradients
from course_lib.mechanisms.groups import Group
from course_lib.mechanisms.replicas import (
    Step,
    check_same_parameters,
    device_of,
    make_equal,
    mean_share,
    part_of_minibatch,
    samples_in,
)
from course_lib.timeline import progress


def average_gradients(model: nn.Module, group: Group = None, samples: int | None = None) -> None:
    """Replace each parameter's gradient by its mean over the group, in place.

    samples: the size of this rank's share, where shares differ; its gradient, a mean over the share, then counts
        in proportion. All ranks give it or none does.
    Frozen parameters are left alone, and so are those for which no rank has a gradient.

    Raises ValueError, on all ranks, if they disagree on which parameters have a gradient or if samples is wrong.
    """
    gradients = {name: tensor.grad for name, tensor in trainable(model).items() if tensor.grad is not None}
    shares = check_same_parameters(gradients, "have a gradient", device_of(model), group, samples)
    weight = part_of_minibatch(samples, shares)
    for gradient in gradients.values():
        gradient *= weight  # before they are added up, as in 16 bits the sum may overflow where the mean does not
        dist.all_reduce(gradient, group=group)


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
    gradient, a mean over the share, is weighted by it, so shares may differ. A parameter that only some ranks have
    used counts as zeros on the others; one that no rank has used, or that was frozen, has no gradient after `finish()`
    either, and so is left alone. Gradients are dense.

    A forgotten `finish()` is told in the `step()` of an optimizer that has the model's parameters (`MasterWeights`
    is one), and else in the next forward pass.

    bucket_mb: gradients travel in buckets of up to this many MiB, filled from the last parameter to the first; a
        larger parameter gets a bucket of its own, and a bucket holds one dtype. None: one bucket for all.
    overlap: send each bucket from within the backward pass; otherwise send all of them in `finish()`.

    Raises ValueError if bucket_mb is not positive or the ranks' models have different parameters or buffers.
    """

    def __init__(
        self, model: nn.Module, group: Group = None, bucket_mb: float | None = 25, overlap: bool = True
    ) -> None:
        super().__init__()
        self.module, self.group, self.overlap = model, group, overlap
        parameters = list(trainable(model).values())
        buckets = fill_buckets(reversed(parameters), bucket_mb)
        make_equal(model, group)
        self._buckets = [_Bucket(held) for held in buckets]
        self._in_order = InOrder(buckets, self._send)
        watch_gradients(parameters, self._gradient_is_computed)
        self._step = Step(parameters)
        self._is_syncing = True
        self._usual_share: float | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns.

        Raises RuntimeError if the gradients of the last step were not finished, and for a second forward pass with
        another number of samples before `backward()`: the gradient of both has only one weight.
        """
        if torch.is_grad_enabled():
            self._step.begin_forward(samples_in((args, kwargs)), self._is_syncing)
        return self.module(*args, **kwargs)

    def _gradient_is_computed(self, parameter: Tensor) -> None:
        if self._step.phase == "idle":  # another replica of the same model is at work
            return
        self._step.gradient_is_computed(self._in_order.expects(parameter), self._is_syncing)
        if self._is_syncing and self._in_order.note(parameter) and self.overlap:
            progress(self._in_order.fraction())
            self._in_order.send()

    def _send(self, number: int) -> None:
        samples, bucket = self._step.samples, self._buckets[number]
        # Weights need a common measure. This step's total would do, but asking for it in every step costs as much as
        # a bucket; the mean share of the first step does as well, as `receive` divides by the sum of the weights.
        if self._usual_share is None:
            self._usual_share = mean_share(samples, bucket.flat.device, self.group)()
        bucket.send(samples / self._usual_share, self.group)

    def finish(self) -> None:
        """Wait until all gradients have arrived; from here on every `.grad` is the mean over the group.

        Raises RuntimeError if no forward pass came before it, or no backward pass after that.
        """
        self._step.check_backward_is_done()
        self._in_order.send(rest=True)
        for bucket in self._buckets:
            bucket.receive()
            if bucket.flat.dtype == torch.float16:  # no room for the weights of shares that have grown: ask again
                self._usual_share = None
        self._in_order.begin()
        self._step = Step(self._step.parameters)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: forward and backward passes inside send nothing, the next `finish()` sends the sum."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before


class _Bucket:
    """Gradients that travel together in one flat tensor, followed by the weight that they were multiplied by.

    `views` are the parts of the flat tensor in the shapes of the parameters.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes) + 1, dtype=parameters[0].dtype, device=parameters[0].device)
        self.gradients, self.weight = self.flat[:-1], self.flat[-1]
        parts = self.gradients.split(sizes)
        self.views = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]

    @torch.no_grad()
    def send(self, weight: float, group: Group) -> None:
        if self.flat.itemsize == 2:  # a sum may overflow in 16 bits where the mean does not
            weight /= dist.get_world_size(group)
        self.weight.fill_(weight)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.fill_(-0.0)
            elif weight == 0:  # an empty share has a loss of 0 / 0, and 0 x nan is nan
                view.zero_()
            else:
                torch.mul(parameter.grad.to_dense(), self.weight, out=view)
                view.view(-1)[:1] += 0.0  # -0.0 + 0.0 is 0.0
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def receive(self) -> None:
        self.work.wait()
        pairs = zip(self.parameters, self.views, strict=True)
        used = [(one, view) for one, view in pairs if one.grad is not None or not any(nobody_had_one([view]))]
        self.gradients /= self.weight  # only now: it may round a tiny negative number to -0.0
        for parameter, view in used:
            parameter.grad = view
