"""Solutions to the exercise on combining mechanisms, as students write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from course_lib import checks
from course_lib.checks.combining import completed, grouped, norm
from course_lib.checks.exercise import Exercise

# mesh_groups, right


def mesh_by_division(rank: int, dp: int, pp: int, tp: int) -> Any:
    d, p, t = rank // (pp * tp), rank // tp % pp, rank % tp
    return {
        "dp": [(other * pp + p) * tp + t for other in range(dp)],
        "pp": [(d * pp + other) * tp + t for other in range(pp)],
        "tp": [(d * pp + p) * tp + other for other in range(tp)],
    }


def mesh_by_ranges(rank: int, dp: int, pp: int, tp: int) -> Any:
    stage, replica = rank // tp * tp, rank // (pp * tp) * pp * tp
    return {
        "dp": range(rank - replica, dp * pp * tp, pp * tp),
        "pp": range(replica + rank % tp, replica + pp * tp, tp),
        "tp": range(stage, stage + tp),
    }


def mesh_by_loops(rank: int, dp: int, pp: int, tp: int) -> Any:
    places = [(d, p, t) for d in range(dp) for p in range(pp) for t in range(tp)]
    own = places[rank]
    groups = {}
    for axis, name in enumerate(("dp", "pp", "tp")):
        rest = [own[i] for i in range(3) if i != axis]
        groups[name] = [n for n, place in enumerate(places) if [place[i] for i in range(3) if i != axis] == rest]
    return groups


def mesh_by_movedim(rank: int, dp: int, pp: int, tp: int) -> Any:
    mesh, groups = torch.arange(dp * pp * tp).reshape(dp, pp, tp), {}
    for dim, axis in enumerate(("dp", "pp", "tp")):
        rows = mesh.movedim(dim, -1).flatten(0, 1)
        groups[axis] = rows[(rows == rank).any(1)][0]
    return groups


# mesh_groups, wrong


def mesh_without_names(rank: int, dp: int, pp: int, tp: int) -> Any:
    return list(grouped(rank, dp, pp, tp).values())


def mesh_of_8_ranks(rank: int, dp: int, pp: int, tp: int) -> Any:
    return {"dp": [rank % 4, rank % 4 + 4], "pp": [rank & 5, rank & 5 | 2], "tp": [rank & 6, rank & 6 | 1]}


def mesh_backwards(rank: int, dp: int, pp: int, tp: int) -> Any:
    return {axis: ranks[::-1] for axis, ranks in grouped(rank, dp, pp, tp).items()}


def mesh_with_own_rank_first(rank: int, dp: int, pp: int, tp: int) -> Any:
    groups = grouped(rank, dp, pp, tp)
    return {axis: [rank, *(one for one in ranks if one != rank)] for axis, ranks in groups.items()}


def mesh_in_numbers(rank: int, dp: int, pp: int, tp: int) -> Any:
    return {axis: ranks.index(rank) for axis, ranks in grouped(rank, dp, pp, tp).items()}


def mesh_names_swapped(rank: int, dp: int, pp: int, tp: int) -> Any:
    return dict(zip(("tp", "pp", "dp"), grouped(rank, dp, pp, tp).values(), strict=True))


# gradient_norm, right


def norm_by_vector_norm(gradients: Any, copied_on: Any, groups: Any) -> Any:
    counted = [torch.zeros(1)]
    for gradient, axes in zip(gradients, copied_on, strict=True):
        if gradient is not None and {groups[axis].index(dist.get_rank()) for axis in axes} <= {0}:
            counted.append(gradient.flatten())
    square = torch.linalg.vector_norm(torch.cat(counted)).square()
    dist.all_reduce(square)
    return square.sqrt()


def norm_in_float64(gradients: Any, copied_on: Any, groups: Any) -> Any:
    first = {axis for axis, ranks in groups.items() if min(ranks) == dist.get_rank()}
    pairs = zip(gradients, copied_on, strict=True)
    mine = [g.double() for g, axes in pairs if g is not None and first.issuperset(axes)]
    total = torch.tensor([sum(float((g * g).sum()) for g in mine)], dtype=torch.float64)
    dist.all_reduce(total)
    return math.sqrt(total.item())


def norm_by_gathering(gradients: Any, copied_on: Any, groups: Any) -> Any:
    square = torch.zeros(1)
    for gradient, axes in zip(gradients, copied_on, strict=True):
        if gradient is None:
            continue
        for axis in axes:
            if groups[axis][0] != dist.get_rank():
                break
        else:
            square += gradient.norm() ** 2
    squares = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(squares, square)
    return torch.stack(squares).sum().sqrt().item()


def norm_counted_by_the_last(gradients: Any, copied_on: Any, groups: Any) -> Any:
    """The last rank of a group holds a copy whenever the first one does."""
    square = torch.tensor(0.0)
    for gradient, axes in zip(gradients, copied_on, strict=True):
        if gradient is not None and all(groups[axis][-1] == dist.get_rank() for axis in axes):
            square = square + torch.sum(gradient**2)
    dist.all_reduce(square)
    return square.item() ** 0.5


# gradient_norm, wrong


def norm_not_returned(gradients: Any, copied_on: Any, groups: Any) -> None:
    norm(gradients, copied_on, groups)


def norm_of_each(gradients: Any, copied_on: Any, groups: Any) -> Any:
    return [norm([one], [axes], groups) for one, axes in zip(gradients, copied_on, strict=True)]


def norm_that_clips(gradients: Any, copied_on: Any, groups: Any) -> Any:
    length = norm(gradients, copied_on, groups)
    for gradient in gradients:
        if gradient is not None:
            gradient /= length
    return length


def norm_by_largest(gradients: Any, copied_on: Any, groups: Any) -> Any:
    largest = torch.stack([torch.zeros(()), *(g.abs().max() for g in gradients if g is not None)]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest


def norm_on_rank_0(gradients: Any, copied_on: Any, groups: Any) -> Any:
    length = norm(gradients, copied_on, groups)
    return length if dist.get_rank() == 0 else 0.0


def norm_twice(gradients: Any, copied_on: Any, groups: Any) -> Any:
    return 2 * norm(gradients, copied_on, groups)


def norm_of_frozen_as_one(gradients: Any, copied_on: Any, groups: Any) -> Any:
    ones = [torch.ones(1) if gradient is None else gradient for gradient in gradients]
    return norm(ones, copied_on, groups)


# complete_gradients, right


def complete_one_by_one(gradients: Any, added_on: Any, groups: Any) -> None:
    for gradient, axes in zip(gradients, added_on, strict=True):
        if gradient is None:
            continue
        for axis in axes:
            dist.all_reduce(gradient, group=groups[axis])
        dist.all_reduce(gradient, group=groups["dp"])
        gradient /= dist.get_world_size(groups["dp"])


def complete_replicas_first(gradients: Any, added_on: Any, groups: Any) -> None:
    for axis in ("dp", "pp", "tp"):
        for gradient, axes in zip(gradients, added_on, strict=True):
            if gradient is not None and axis in ("dp", *axes):
                dist.all_reduce(gradient, group=groups[axis])
    for gradient in gradients:
        if gradient is not None:
            gradient.div_(groups["dp"].size())


def complete_by_copies(gradients: Any, added_on: Any, groups: Any) -> None:
    for gradient, axes in zip(gradients, added_on, strict=True):
        total = None if gradient is None else gradient.clone()
        for axis in (*axes, "dp") if total is not None else ():
            dist.all_reduce(total, group=groups[axis])
        if total is not None:
            gradient.copy_(total / dist.get_world_size(groups["dp"]))


def complete_with_shares(gradients: Any, added_on: Any, groups: Any) -> None:
    """Divided before anything is added."""
    pairs = [(one, axes) for one, axes in zip(gradients, added_on, strict=True) if one is not None]
    for one, _ in pairs:
        one /= dist.get_world_size(groups["dp"])
    for axis in groups:
        chosen = [one for one, axes in pairs if axis == "dp" or axis in axes]
        if chosen:
            flat = torch.nn.utils.parameters_to_vector(chosen)
            dist.all_reduce(flat, group=groups[axis])
            for one, part in zip(chosen, flat.split([one.numel() for one in chosen]), strict=True):
                one[...] = part.view_as(one)


# complete_gradients, wrong


def complete_elsewhere(gradients: Any, added_on: Any, groups: Any) -> Any:
    copies = [one if one is None else one.clone() for one in gradients]
    completed(copies, added_on, groups)
    return copies


def complete_nothing(gradients: Any, added_on: Any, groups: Any) -> None:
    pass


def complete_in_single_precision(gradients: Any, added_on: Any, groups: Any) -> None:
    completed(gradients, added_on, groups)
    for one in gradients:
        one.data = one.float()


def complete_in_other_tensors(gradients: Any, added_on: Any, groups: Any) -> None:
    copies = [gradient.clone() for gradient in gradients]
    completed(copies, added_on, groups)
    gradients[:] = copies


def complete_by_broadcast(gradients: Any, added_on: Any, groups: Any) -> None:
    for one in gradients:
        dist.broadcast(one, dist.get_global_rank(groups["dp"], 0), group=groups["dp"])


def complete_for_two_replicas(gradients: Any, added_on: Any, groups: Any) -> None:
    completed(gradients, added_on, groups)
    if (replicas := dist.get_world_size(groups["dp"])) > 1:
        for one in gradients:
            one *= replicas / 2


def complete_twice(gradients: Any, added_on: Any, groups: Any) -> None:
    completed(gradients, added_on, groups)
    completed(gradients, added_on, groups)


def complete_backwards(gradients: Any, added_on: Any, groups: Any) -> None:
    completed(gradients, added_on, groups)
    for one in gradients:
        one.neg_()


def complete_stumbles_over_none(gradients: Any, added_on: Any, groups: Any) -> None:
    completed(gradients, added_on, groups)
    for one in gradients:
        one.mul_(1)


def complete_on_first_tensor_rank(gradients: Any, added_on: Any, groups: Any) -> None:
    """The others do not come to the all-reduce."""
    if dist.get_rank(groups["tp"]) == 0:
        completed(gradients, added_on, groups)


RIGHT: dict[Exercise, list[Callable[..., object]]] = {
    checks.mesh_groups: [mesh_by_division, mesh_by_ranges, mesh_by_loops, mesh_by_movedim],
    checks.gradient_norm: [norm_by_vector_norm, norm_in_float64, norm_by_gathering, norm_counted_by_the_last],
    checks.complete_gradients: [
        complete_one_by_one,
        complete_replicas_first,
        complete_by_copies,
        complete_with_shares,
    ],
}

WRONG: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.mesh_groups: {
        mesh_without_names: "`the result[rank 0]",
        mesh_of_8_ranks: "not even of the right type, dtype and shape",
        mesh_backwards: "in the wrong order",
        mesh_with_own_rank_first: "in the wrong order",
        mesh_in_numbers: "not even of the right type",
        mesh_names_swapped: "not even of the right type",
    },
    checks.gradient_norm: {
        norm_not_returned: "not even of the right type",
        norm_of_each: "not even of the right type",
        norm_that_clips: "changes `gradients[0]`",
        norm_by_largest: "2.53 times too small",
        norm_on_rank_0: "Only rank 0 has what it should have",
        norm_twice: "2 times too large",
        norm_of_frozen_as_one: "1.02 times too large",
    },
    checks.complete_gradients: {
        complete_in_other_tensors: "does not reach all places",
        complete_elsewhere: "does not reach all places",
        complete_nothing: "sends nothing",
        complete_in_single_precision: "not even of the right type",
        complete_by_broadcast: "not what one process would have",
        complete_for_two_replicas: "1.5 times too large",
        complete_twice: "2 times too large",
        complete_backwards: "not what one process would have",
    },
}

ACCIDENTS: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.complete_gradients: {
        complete_stumbles_over_none: "a parameter that is not trained",
        complete_on_first_tensor_rank: "waits",
    },
}
