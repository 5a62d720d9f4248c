"""Buckets: parameters whose gradients travel together, in one message as soon as all of them are computed.

One message for each parameter would pay the link's latency each time; one for all could leave only at the end of the
backward pass, which begins at the last layer. So buckets are filled from the last parameter to the first:

    compute      | forward | backward:  head   layer 2   layer 1   embedding |
    network                                  | bucket 0 |      | bucket 1 |  | bucket 2 |

Ranks that use different parameters complete their buckets in different orders, but messages only match where all ranks
send the same. So a bucket waits for those before it.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 13(12).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from course_lib.mechanisms import guards


def fill_buckets(parameters: Iterable[nn.Parameter], bucket_mb: float) -> list[list[nn.Parameter]]:
    """Parameters in the given order, in buckets of one dtype; only a single one may exceed `bucket_mb` MiB."""
    buckets: list[list[nn.Parameter]] = []
    for parameter in parameters:
        last = buckets[-1] if buckets else []
        size = sum(held.nbytes for held in [*last, parameter])
        if not last or size > bucket_mb * 2**20 or last[0].dtype != parameter.dtype:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


class Reducer:
    """Reduces buckets in order, each once its gradients are computed and the buckets before it are on their way.

    reduce: a method to call with the number of a bucket.
    overlap: reduce from within the backward pass; otherwise all buckets wait for `reduce_rest`.
    """

    def __init__(
        self, buckets: Sequence[Sequence[nn.Parameter]], reduce: Callable[[int], None], overlap: bool = True
    ) -> None:
        self._buckets, self._reduce, self._overlap = buckets, weakly(reduce), overlap
        self.begin_step()

    def begin_step(self) -> None:
        """Expect a gradient of each parameter, and to reduce bucket 0 first."""
        self._missing = [set(map(id, bucket)) for bucket in self._buckets]
        self._next = 0
        self.has_begun = False

    def gradient_is_computed(self, number: int, parameter: Tensor) -> None:
        """Note a gradient of the bucket with this number."""
        missing = self._missing[number]
        guards.only_one_backward(id(parameter) in missing)
        missing.remove(id(parameter))
        self.has_begun = True
        if not missing and self._overlap:
            while self._next < len(self._buckets) and not self._missing[self._next]:
                self._reduce_next()

    def reduce_rest(self) -> None:
        """Reduce the buckets that are left, also those with parameters that this rank has not used."""
        while self._next < len(self._buckets):
            self._reduce_next()

    def _reduce_next(self) -> None:
        self._next += 1
        self._reduce(self._next - 1)


def watch_gradients(parameters: Iterable[nn.Parameter], method: Callable[..., None], number: int) -> None:
    """Call the method with this number and a parameter whenever the parameter's gradient is computed."""
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(weakly(method, number))


def weakly(method: Callable[..., Any], *given: Any) -> Callable[..., Any]:
    """The method, with these arguments first, as a hook that does not keep the method's owner alive."""
    reference = weakref.WeakMethod(method)
    return lambda *args: (bound := reference()) and bound(*given, *args)
