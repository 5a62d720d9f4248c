"""The checks for the exercise on combining mechanisms: a mesh, a norm that counts each number once, and sums and means.

mesh_groups(rank, dp, pp, tp)                       the ranks with which a rank shares an axis
gradient_norm(gradients, copied_on, groups)         the norm of a whole model, each number counted once
complete_gradients(gradients, added_on, groups)     partial sums are added up, replicas averaged

Without communication a mesh may have more ranks than there are processes: each process then asks for some of its ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.messages import most_sent, on_one_link
from course_lib.classroom.checks.part import Budget, Case, Observed, normal
from course_lib.classroom.checks.tables import as_number, as_numbers
from course_lib.mechanisms.mesh import AXES, Mesh
from course_lib.ranks import Link, Pace
from course_lib.timeline import compute

PACE = Pace({"backward": 0.04}, Link(latency=0.002, bandwidth=1e6))
Sizes = tuple[int, int, int]  # dp, pp, tp
Groups = dict[str, list[int]]
Axes = tuple[str, ...]


def _random(shape: Sequence[int], *seeds: int) -> Tensor:
    """A random tensor; other seeds, each below 100, draw another one."""
    seed = sum(number * 100**place for place, number in enumerate(seeds))
    return normal(seed)(*shape)


def _on_mesh(arguments: Any, sizes: Sizes, seed: int = 0, new: str = "", frozen: bool = False) -> Case:
    text = f"a mesh of {dp_pp_tp(sizes)}{', one parameter frozen' * frozen}"
    return Case(text, math.prod(sizes), partial(arguments, sizes, seed, frozen), new)


def dp_pp_tp(sizes: Sizes) -> str:
    return " x ".join(map(str, sizes)) + " (dp x pp x tp)"


def _on_meshes(arguments: Any, seed: int) -> list[Case]:
    axes = [((2, 1, 1), ""), ((1, 1, 2), "tensor ranks"), ((1, 2, 1), "stages"), ((3, 1, 1), ""), ((1, 1, 3), "")]
    axes += [((1, 3, 1), "a stage between first and last"), ((2, 1, 2), "two axes"), ((2, 2, 1), ""), ((1, 2, 2), "")]
    frozen = _on_mesh(arguments, (1, 2, 2), seed, "a parameter that is not trained: its gradient is None", True)
    return [*(_on_mesh(arguments, sizes, seed, new) for sizes, new in axes), frozen]


# Ranks and groups


def grouped(rank: int, dp: int, pp: int, tp: int) -> Groups:
    mesh = torch.arange(dp * pp * tp).view(dp, pp, tp)
    d, p, t = (mesh == rank).nonzero()[0].tolist()
    return {"dp": mesh[:, p, t].tolist(), "pp": mesh[d, :, t].tolist(), "tp": mesh[d, p].tolist()}


def _mesh(n: int, sizes: Sizes, seed: int, new: str = "other sizes") -> Case:
    sizes = (sizes[0] + seed, *sizes[1:])
    ranks = range(math.prod(sizes))
    return Case(f"a mesh of {dp_pp_tp(sizes)}", n, lambda rank: (ranks[rank::n], *sizes), new)


def _meshes(seed: int) -> list[Case]:
    two = [((1, 1, 2), ""), ((2, 1, 2), "two axes"), ((2, 2, 2), "three axes")]
    more = [_mesh(n, sizes, seed) for n in (3, 4) for sizes in ((3, 2, 2), (1, 1, n), (2, 3, 4))]
    return [*(_mesh(2, sizes, seed, new) for sizes, new in two), *more]


def _play_mesh(fn: Any, ranks: range, dp: int, pp: int, tp: int) -> Any:
    answers = {f"rank {rank}": fn(rank, dp, pp, tp) for rank in ranks}
    return {rank: _in_tensors(groups) if isinstance(groups, dict) else groups for rank, groups in answers.items()}


def _in_tensors(groups: dict) -> dict:
    """The groups as tensors of whole numbers, in which wrong ranks are easier to read."""
    return {axis: as_numbers(ranks, None) for axis, ranks in groups.items()}


def _astray(observed: list[Observed]) -> str:
    """A sentence about the first rank in a group that the mesh does not have, or about a group without its own rank."""
    n = math.prod(int(str(observed[0].before[axis])) for axis in AXES)
    groups = [(k, v.flatten().tolist()) for seen in observed for k, v in seen.values.items() if isinstance(v, Tensor)]
    text = "`{}` names rank {}, and there are the ranks 0 to {}. Along an axis, is each number below its size?"
    said = [text.format(name, rank, n - 1) for name, ranks in groups for rank in ranks if not 0 <= rank < n]
    without = [name for name, ranks in groups if int(name.split("]")[0].split()[-1]) not in ranks]
    return next(iter(said + [f"`{name}` leaves out the rank that asks." for name in without]), "")


price = _mesh(4, (2, 2, 2), 0)
mesh_groups = Exercise("mesh_groups", grouped, _play_mesh, _meshes, price, PACE, rule=_astray, by_rank=False)


# The norm


def norm(gradients: list[Any], copied_on: list[Axes], groups: Groups) -> float:
    rank = dist.get_rank()
    squares = torch.zeros(())
    for gradient, axes in zip(gradients, copied_on, strict=True):
        counts = all(rank == groups[axis][0] for axis in axes)
        if counts and gradient is not None:
            squares += gradient.square().sum()
    dist.all_reduce(squares)
    return float(squares.sqrt())


def _held(sizes: Sizes, seed: int, frozen: bool, rank: int) -> tuple[list[Any], list[Axes], Groups]:
    """A rank's gradients: of a cut matrix, a norm, what only it holds, and on the first and last stage an embedding."""
    groups = grouped(rank, *sizes)
    numbers = {axis: members.index(rank) for axis, members in groups.items()}
    kinds: list[tuple[int, Axes]] = [(4, ("dp",)), (2, ("dp", "tp"))] * (sizes[1] < 3 or numbers["pp"] != 1)
    kinds += [(1, ())] * (sizes[0] == 1)
    kinds += [(3, ("dp", "pp"))] * (numbers["pp"] in (0, sizes[1] - 1))
    gradients: list[Any] = []
    for size, axes in kinds:
        own = (0 if axis in axes else 1 + number for axis, number in numbers.items())
        gradients.append(None if frozen and size == 2 else _random((size, 3), seed, size, *own).float())
    with compute("backward"):
        return gradients, [axes for _, axes in kinds], groups


def _play_norm(fn: Any, gradients: list[Any], copied_on: list[Axes], groups: Groups) -> Any:
    return as_number(fn(gradients, copied_on, groups))


def _one_message(observed: list[Observed]) -> str:
    times, n = most_sent(observed)
    wrong = f"The norm is right, but a rank communicates {times} times, {n} numbers in all. One number would do."
    return wrong * (n > 1)


cases, price = partial(_on_meshes, _held), _on_mesh(_held, (2, 1, 2))
# for rounding: dozens of squares are added up in float32
gradient_norm = Exercise("gradient_norm", norm, _play_norm, cases, price, PACE, rounding=1e-5, breach=_one_message)


# Partial sums and averages


def completed(gradients: list[Any], added_on: list[Axes], groups: dict[str, Any]) -> None:
    known = [(one, axes) for one, axes in zip(gradients, added_on, strict=True) if one is not None]
    replicas = groups["dp"]
    for axis in ("tp", "pp"):
        _add_up([one for one, axes in known if axis in axes], groups[axis])
    _add_up([one for one, axes in known], replicas, 1 / dist.get_world_size(replicas))


def _add_up(gradients: list[Tensor], group: Any, share: float = 1.0) -> None:
    """Add up gradients over a group in one message, and multiply the sums by `share`."""
    if not gradients:
        return
    flat = torch.cat([one.flatten() for one in gradients])
    dist.all_reduce(flat, group=group)
    for one, total in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        one.copy_(share * total.view_as(one))


def weights(pp: int, seed: int) -> list[Tensor]:
    """The weights of x + down relu(up (scale x)) + bias, pp times in a row; all stages have the same scale and bias."""
    return [_random(shape, seed, i) for i, shape in enumerate([(pp, 12, 3), (pp, 3, 12), (3,), (3,)])]


def samples(replica: int, seed: int) -> Iterator[Tensor]:
    return (_random((2, 3), seed, i, 1 + replica) for i in range(2))


def _arisen(
    sizes: Sizes, seed: int, frozen: bool, rank: int, has_early: bool = True
) -> tuple[list[Any], list[Axes], Sizes]:
    """A rank's gradients after backward: partial sums, over stages and tensor ranks (scale) or over stages (bias)."""
    _, pp, tp = sizes
    d, p, t = (members.index(rank) for members in grouped(rank, *sizes).values())
    up, down, scale, bias = weights(pp, seed)
    x, y = samples(d, seed)
    biases = [bias.clone().requires_grad_() for _ in range(pp)]
    own: list[Tensor] = []
    for stage in range(pp):
        total = x + biases[stage]
        for share, cut in enumerate(zip(up[stage].chunk(tp), down[stage].chunk(tp, dim=1), strict=True)):
            parts = [part.clone().requires_grad_() for part in (*cut, scale)]
            total = total + (x * parts[2] @ parts[0].T).relu() @ parts[1].T
            own = parts if (stage, share) == (p, t) else own
        x = total
    with compute("backward"):
        gradients: list[Any] = [*torch.autograd.grad((x - y).square().mean(), [*own, biases[p]])]
    gradients[1:2] = [None] if frozen else gradients[1:2]
    first = 0 if has_early else 2
    return gradients[first:], [(), (), ("pp", "tp"), ("pp",)][first:], sizes


def _play_step(fn: Any, gradients: list[Any], added_on: list[Axes], sizes: Sizes) -> None:
    """Complete the gradients on a mesh, and close it: open groups would cost the next run new processes."""
    mesh = Mesh(*sizes)
    fn([*gradients], added_on, {axis: mesh.group(axis) for axis in AXES})
    mesh.close()


cases, price = partial(_on_meshes, _arisen), _on_mesh(_arisen, (2, 1, 2))
complete_gradients = Exercise("complete_gradients", completed, _play_step, cases, price, PACE, rounding=1e-12)


# On two links


def at_once(gradients: list[Any], added_on: list[Axes], groups: dict[str, Any]) -> None:
    known = [(one, axes) for one, axes in zip(gradients, added_on, strict=True) if one is not None]
    early = [one for one, axes in known if not axes]
    if early:
        message = torch.cat([one.flatten() for one in early])
        handle = dist.all_reduce(message, group=groups["dp"], async_op=True)
    completed([one for one, axes in known if axes], [axes for _, axes in known if axes], groups)
    if early:
        handle.wait()
        for one, mean in zip(early, message.split([one.numel() for one in early]), strict=True):
            one.copy_(mean.view_as(one) / dist.get_world_size(groups["dp"]))


def _few_meshes(seed: int) -> list[Case]:
    late = _on_mesh(partial(_arisen, has_early=False), (2, 1, 2), seed, "every gradient is a partial sum")
    return [*_on_meshes(_arisen, seed)[6:], late]


price, slow = _on_mesh(_arisen, (2, 2, 2)), Link(0.004, 2.5e4)
levels = Budget("emulated milliseconds", 74, 71, at_once, 60)
on_nodes = partial(Exercise, rounding=1e-12, budget=levels, breach=partial(on_one_link, n_groups=3))
pace = Pace(PACE.device, Link(0.004, 1e5), slow, 4)
faster_completion = on_nodes("faster_completion", completed, _play_step, _few_meshes, price, pace)
