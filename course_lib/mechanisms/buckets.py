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

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def fill_buckets(parameters: Iterable[nn.Parameter], bucket_mb: float | None) -> list[list[nn.Parameter]]:
    """Parameters in the given order, in buckets of one dtype and device; one that holds two has at most `bucket_mb`.

    bucket_mb: in MiB; None for no limit. Raises ValueError if it is not positive.
    """
    limit = math.inf if bucket_mb is None else bucket_mb * 2**20
    if not limit > 0:
        raise ValueError(f"bucket_mb={bucket_mb} holds nothing; give a positive number of MiB, for instance 25")
    full: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        bucket = filling.setdefault(kind, [])
        if bucket and sum(held.nbytes for held in bucket) + parameter.nbytes > limit:
            full.append(filling.pop(kind))
            bucket = filling.setdefault(kind, [])
        bucket.append(parameter)
    return [*full, *filling.values()]


class InOrder:
    """Sends buckets, each when its gradients are computed and those before it are sent.

    send: a method that is told the number of a bucket.
    """

    def __init__(self, buckets: Sequence[Sequence[nn.Parameter]], send: Callable[[int], None]) -> None:
        self.buckets, self._send = buckets, weakly(send)
        self._total_bytes = sum(parameter.nbytes for bucket in buckets for parameter in bucket)
        self.begin()

    def begin(self) -> None:
        """Expect a gradient of each parameter, and to send bucket 0 first."""
        self._missing: list[set[Tensor]] = [set(bucket) for bucket in self.buckets]
        self._bucket_of = {parameter: missing for missing in self._missing for parameter in missing}
        self.next = 0

    def expects(self, parameter: Tensor) -> bool:
        return parameter in self._bucket_of[parameter]

    def note(self, parameter: Tensor) -> bool:
        """A gradient is computed. Returns whether those of its bucket all are."""
        missing = self._bucket_of[parameter]
        missing.discard(parameter)
        return not missing

    def fraction(self) -> float:
        """How much of the gradients is computed, from 0 to 1."""
        return 1 - sum(parameter.nbytes for missing in self._missing for parameter in missing) / self._total_bytes

    def send(self, rest: bool = False) -> None:
        """Send the buckets whose turn it is; with `rest` all that are left, complete or not."""
        while self.next < len(self.buckets) and (rest or not self._missing[self.next]):
            self.next += 1
            self._send(self.next - 1)


def watch_gradients(parameters: Iterable[nn.Parameter], method: Callable[[Any], None]) -> None:
    """Call the method with a parameter whenever its gradient is computed."""
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(weakly(method))


def nobody_had_one(sums: Iterable[Tensor]) -> list[bool]:
    """Of these sums over the ranks, which are of a gradient that no rank had, where each of them sends -0.0 then.

    Only -0.0 + -0.0 is -0.0, so nothing else has to be sent for all to know.
    """
    firsts = torch.stack([total.reshape(-1)[0] if total.numel() else total.new_zeros(()) for total in sums])
    return ((firsts == 0) & firsts.signbit()).tolist()  # a GPU is asked once, not for each


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The method as a hook. Hooks live as long as what they hang on, and should not keep the method's owner alive."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*args)

    return hook
