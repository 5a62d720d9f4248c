"""Guards: what keeps students from a slip, apart from the pages that call it with one line.

Each is about one slip that would look like a result, and says in a sentence what to do instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms.groups import Group, rank_in

# Replicas and shards


def right_group(group: Group, parameters: Iterable[Tensor]) -> None:
    """Raise ValueError on a rank outside of the group, and where it was left out although ranks hold parts of a model.

    They do where a parameter was cut, and mostly where there are smaller groups: those of another parallelism.
    """
    rank_in(group)
    groups = dist.distributed_c10d._world.pg_map
    is_cut = any(getattr(parameter, "is_cut", False) for parameter in parameters)
    if group is None and (is_cut or any(other.size() < dist.get_world_size() for other in groups)):
        raise ValueError(
            "ranks seem to hold different parts of a model (tensor shares, or stages of a pipeline), and without "
            "group= all would get the first rank's; give group=, the ranks that hold the same part as this one, "
            "or group=dist.group.WORLD if all do"
        )


def same_on_all_ranks(tensors: Mapping[str, Tensor], group: Group) -> None:
    """Raise ValueError on every rank if names, shapes or dtypes differ."""
    listed = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, listed, group=group)
    for parameter in itertools.chain.from_iterable(everyone):
        holders = [rank for rank, theirs in enumerate(everyone) if parameter in theirs]
        if len(holders) < len(everyone):
            shape, _, dtype = parameter.rpartition(" ")
            raise ValueError(
                f"ranks disagree on which parameters the model has: {shape} is listed only on rank "
                f"{', '.join(map(str, holders))} of {len(everyone)} as {dtype}; all ranks need the same ones"
            )
    if any(theirs != listed for theirs in everyone):
        raise ValueError("ranks list the model's parameters in different orders; build it the same way on all ranks")


def equal_shares(samples: int, device: torch.device, group: Group) -> Callable[[], None]:
    """Begin to compare the ranks' shares. Returns a function that raises RuntimeError if they have different sizes."""
    total = torch.tensor([samples], device=device)
    work = dist.all_reduce(total, group=group, async_op=True)

    def check() -> None:
        work.wait()
        mean = int(total) / dist.get_world_size(group)
        if samples != mean:
            raise RuntimeError(
                f"this rank's share has {samples} samples and the mean share {mean:g}, and their gradients would "
                f"count the same; give all ranks shares of the same size"
            )

    return check


# Data parallelism


def same_gradients(holders: Mapping[str, int], n: int) -> None:
    """Raise ValueError if only some of n ranks had a gradient of a parameter. holders: how many had one, by name."""
    for name, count in holders.items():
        if 0 < count < n:
            raise ValueError(
                f"ranks disagree on which parameters have a gradient: {name} has one on {count} of {n} ranks; use the "
                f"same parameters on all ranks, or DataParallel, where an unused one counts as zeros"
            )


def forward_may_begin(has_gradients: bool, latest: int | None, samples: int) -> None:
    """Raise RuntimeError after a forgotten `finish()`, and where one backward pass would have shares of two sizes.

    latest: samples of the forward pass before this one, if no `finish()` came after it.
    """
    if has_gradients:
        raise RuntimeError(
            "finish() was not called after the last backward(), so an update since then made the ranks' models drift "
            "apart; call finish() after backward() and before optimizer.step()"
        )
    if latest not in (None, samples):
        raise RuntimeError(
            f"a forward pass with {latest} samples and one with {samples} came before one backward(), whose "
            "gradient can count for only one number of them; give both passes as many, or call backward() and "
            "finish() after each (and evaluate inside torch.no_grad())"
        )


def only_one_backward(is_first: bool) -> None:
    """Raise RuntimeError for a second backward pass, whose gradients come too late."""
    if not is_first:
        raise RuntimeError(
            "a second backward() before finish() or step() would change gradients that are already on their way; "
            "add up the losses and call backward() once, or use average_gradients after the last one"
        )


def backward_is_done(samples: int | None, has_gradients: bool) -> None:
    """Raise RuntimeError where there is nothing to finish. samples: of the forward pass, None if there was none."""
    if samples is None or (samples and not has_gradients):  # without samples there may be no loss to go back from
        raise RuntimeError(
            "finish() was called before backward(), so there is no gradient to average yet; call it once per step, "
            "after backward() and before optimizer.step() (and evaluate inside torch.no_grad())"
        )


# Sharding


def same_parameters(parameters: Sequence[Tensor], group: Group) -> None:
    """Raise ValueError where nothing is to be trained, for a wrong group, and on every rank if they differ."""
    right_group(group, parameters)
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError("params holds only frozen parameters; give some that require a gradient")
    named = {f"params[{number}]": parameter for number, parameter in enumerate(parameters)}
    same_on_all_ranks(named, group)


def not_finished_yet(is_finished: bool) -> None:
    """Raise RuntimeError for gradients that come after those before them were averaged."""
    if is_finished:
        raise RuntimeError(
            "backward() came after finish(), so its gradients would be lost; "
            "call finish() after the last backward(), and then step() or zero_grad()"
        )


def finish_came_first(is_finished: bool) -> None:
    """Raise RuntimeError where somebody asks for shards whose gradients have not arrived."""
    if not is_finished:
        raise RuntimeError(
            "shards have no gradients yet, and clipping them would change nothing; "
            "call the optimizer's finish() after backward(), and ask for its shards then"
        )


def not_sharded_yet(model: nn.Module) -> None:
    """Raise ValueError for a model whose parameters are shards already."""
    if any(getattr(parameter, "is_shard", False) for parameter in model.parameters()):
        raise ValueError(f"model={type(model).__name__} is sharded already; build it anew")
