"""Replicas: what copies of a model need in order to stay equal.

They begin with the same parameters. In a step each counts by its share of the minibatch, and none is updated before its
gradients are averaged. Whatever else would let replicas drift apart without a word is refused here in a sentence.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from course_lib.mechanisms.groups import Group, rank_in

_UNKNOWN = -1  # the share of a rank that did not say


def make_equal(model: nn.Module, group: Group) -> None:
    """Give every rank the parameters and buffers of the group's first.

    Raises ValueError on all ranks if their models differ.
    """
    tensors: dict[str, Tensor] = {
        name if parameter.requires_grad else f"{name} (frozen)": parameter
        for name, parameter in model.named_parameters()
    }
    tensors |= {f"{name} (a buffer)": buffer for name, buffer in model.named_buffers()}
    check_same_parameters(tensors, "the model has", device_of(model), group)
    from_first_rank(model, group)


def from_first_rank(tensors: nn.Module | Iterable[Tensor], group: Group = None) -> None:
    """Make tensors those of the group's first rank, in one message for each dtype and 256 MiB.

    tensors: or a model, for all of its parameters and buffers.
    """
    if isinstance(tensors, nn.Module):
        tensors = (*tensors.parameters(), *tensors.buffers())
    dist._broadcast_coalesced(group or dist.group.WORLD, [tensor.detach() for tensor in tensors], 2**28, 0)  # type: ignore[arg-type]


def check_same_parameters(
    tensors: Mapping[str, Tensor], what: str, device: torch.device, group: Group, samples: int | None = None
) -> list[int]:
    """Make sure that all ranks name the same tensors, and return everyone's `samples` (or _UNKNOWN), by rank.

    Only a checksum goes around. It has the same size whatever a rank holds, so the comparison itself cannot hang.
    Raises ValueError on every rank if names, shapes or dtypes differ, and on a rank that is not in the group.
    """
    rank_in(group)
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


def _difference(listed: list[str], what: str, group: Group) -> str:
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


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters(), torch.empty(0)).device


def samples_in(inputs: Any) -> int:
    """The length of the first tensor."""
    return next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), 1)


def part_of_minibatch(samples: int | None, shares: list[int]) -> float:
    """The part of the minibatch that this rank has."""
    if samples is None and set(shares) == {_UNKNOWN}:
        return 1 / len(shares)
    if samples is None or min(shares) < 1:
        given = ["None" if share == _UNKNOWN else str(share) for share in shares]
        raise ValueError(f"samples is {', '.join(given)} on the ranks of the group; give 1 or more on all, or on none")
    return samples / sum(shares)


def mean_share(samples: int, device: torch.device, group: Group) -> Callable[[], float]:
    """Begin to add up the ranks' samples. Returns a function that waits for their mean, at least 1 / N."""
    total = torch.tensor([samples], device=device)
    work = dist.all_reduce(total, group=group, async_op=True)

    def mean() -> float:
        work.wait()
        return max(1, int(total)) / dist.get_world_size(group)

    return mean


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those within tuples, lists, dicts and dataclasses, too."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf):
            yield from tensors_in(vars(leaf))


# A step in the right order


@dataclasses.dataclass(eq=False)
class Step:
    """What a replica has done since its last `finish()`, which tells what it may do next.

    parameters: those that wait for `finish()`.
    """

    parameters: Collection[Tensor]
    phase: Literal["idle", "forward", "accumulated", "backward"] = "idle"
    accumulated_samples: int = 0  # of forward passes within no_sync()
    latest_samples: int | None = None  # of the latest one outside

    def __post_init__(self) -> None:
        _steps.add(self)

    @property
    def samples(self) -> int:
        return self.accumulated_samples + (self.latest_samples or 0)

    def begin_forward(self, samples: int, is_syncing: bool) -> None:
        if self.phase == "backward":
            raise RuntimeError(
                "finish() was not called after the last backward(); "
                "call it before optimizer.step(), or accumulate gradients inside no_sync()"
            )
        self.phase = "forward"
        if not is_syncing:
            self.accumulated_samples += samples
            return
        latest, self.latest_samples = self.latest_samples, samples
        if latest not in (None, samples):
            raise RuntimeError(
                f"a forward pass with {latest} samples and one with {samples} came before one backward(), whose "
                "gradient can count for only one number of them; give both passes as many, or call backward() and "
                "finish() after each (and evaluate inside torch.no_grad())"
            )

    def gradient_is_computed(self, is_first: bool, is_syncing: bool) -> None:
        if not is_first:
            raise RuntimeError(
                "a second backward() before finish() would change gradients that are already on their way; "
                "call finish() first, or accumulate gradients inside no_sync()"
            )
        self.phase = "backward" if is_syncing else "accumulated"

    def check_backward_is_done(self) -> None:
        if self.phase == "idle":
            raise RuntimeError(
                "finish() has nothing to finish: there was no forward pass since the last one; "
                "call it once per step, after backward()"
            )
        if self.phase == "forward" and self.samples:  # without samples there may be no loss to go back from
            raise RuntimeError(
                "finish() was called before backward(), so there is no gradient to average yet; call it after "
                "backward() and before optimizer.step() (and evaluate inside torch.no_grad())"
            )


_steps: weakref.WeakSet[Step] = weakref.WeakSet()


def check_finished(parameters: Iterable[Tensor]) -> None:
    """Raise RuntimeError if a replica has yet to average the gradients of one of the parameters."""
    waiting = {tensor for step in _steps if step.phase in ("accumulated", "backward") for tensor in step.parameters}
    if not waiting.isdisjoint(parameters):
        raise RuntimeError(
            "step() came before finish(), with gradients that are not averaged yet, so the ranks' models would drift "
            "apart; call finish() after backward() and before step()"
        )


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    check_finished(parameter for group in optimizer.param_groups for parameter in group["params"])


register_optimizer_step_pre_hook(_before_step)  # of all optimizers: a replica does not know which one it trains with
