"""Solutions to the exercise on combining mechanisms, as students write them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import changed
from lessons.L08_combining_mechanisms import checks
from lessons.L08_combining_mechanisms.checks import completed, grouped, norm
from tests.lessons.changes import told, ways

# mesh_groups


def mesh_by_loops(rank: int, dp: int, pp: int, tp: int) -> Any:
    places = [*itertools.product(range(dp), range(pp), range(tp))]
    groups = {}
    for axis, name in enumerate(("dp", "pp", "tp")):
        rest = [(*place[:axis], *place[axis + 1 :]) for place in places]
        groups[name] = [n for n, place in enumerate(rest) if place == rest[rank]]
    return groups


place, first = "(mesh == rank).nonzero()[0].tolist()", '"dp": mesh[:, p, t].tolist()'
groups = f'{{{first}, "pp": mesh[d, :, t].tolist(), "tp": mesh[d, p].tolist()}}'
ranges = '{"dp": range(rank % (pp * tp), dp * pp * tp, pp * tp), "tp": range(rank - t, rank - t + tp), '
ranges += '"pp": range(rank - p * tp, rank - p * tp + pp * tp, tp)}'
of_8_ranks = '{"dp": [rank % 4, rank % 4 + 4], "pp": [rank & 5, rank & 5 | 2], "tp": [rank & 6, rank & 6 | 1]}'

# gradient_norm

counts, square, root = "counts and gradient is not None", "gradient.square().sum()", "float(squares.sqrt())"
everyone = "every = [squares.clone() for _ in range(dist.get_world_size())]; dist.all_gather(every, squares)"
in_float64 = "torch.zeros(())", "torch.zeros(1, dtype=torch.float64)", square, "(gradient.double() ** 2).sum()"
by_vector_norm = square, "torch.linalg.vector_norm(gradient) ** 2", root, "squares.sqrt()"
norm_by_vector_norm = changed(norm, "norm_by_vector_norm", *by_vector_norm)
frozen_as_one = counts, "counts", square, f"1 if gradient is None else {square}"
clips = f"[one.div_({root}) for one in gradients if one is not None]; return"

# complete_gradients


def complete_one_by_one(gradients: Any, added_on: Any, groups: Any) -> None:
    for gradient, axes in zip(gradients, added_on, strict=True):
        if gradient is None:
            continue
        for axis in (*axes, "dp"):
            dist.all_reduce(gradient, group=groups[axis])
        gradient /= dist.get_world_size(groups["dp"])


known, replicas, of_known = "known = ", 'replicas = groups["dp"]', "if one is not None]"
average = "_add_up([one for one, axes in known], replicas, 1 / dist.get_world_size(replicas))"
divide = "[one.div_(dist.get_world_size(replicas)) for one, _ in known]"
in_float32 = average, f"{average}; gradients[0].data = gradients[0].float()"
broadcast = "[dist.broadcast(one, group=replicas, group_src=0) for one, _ in known]"
copied = f"gradients[:] = [one.clone() for one in gradients]; {known}"
with_replicas = '("tp", "pp")', '("dp", "tp", "pp")', "if axis in axes", 'if axis in (*axes, "dp")'
in_copies: tuple[str, ...] = (
    "for axis in",
    "total = gradient.clone()\n        for axis in",
    "all_reduce(gradient",
    "all_reduce(total",
)
in_copies += (
    'gradient /= dist.get_world_size(groups["dp"])',
    'gradient.copy_(total / dist.get_world_size(groups["dp"]))',
)
divided_by_replicas = 'gradient /= dist.get_world_size(groups["dp"])'
over_all_ranks = '(*axes, "dp")', '["dp"]', ", group=groups[axis]", "", 'size(groups["dp"])', "size()"
on_first_tensor_rank = replicas, f'{replicas}\n    if dist.get_rank(groups["tp"]): return'

RIGHT: dict[Exercise, list[Callable[..., object]]] = {
    checks.mesh_groups: [
        mesh_by_loops,
        *ways(
            grouped,
            by_division=(place, "rank // (pp * tp), rank // tp % pp, rank % tp"),
            in_ranges=(groups, ranges),
            in_tensors=(groups, groups.replace(".tolist()", "")),
        ),
    ],
    checks.gradient_norm: [
        norm_by_vector_norm,
        *ways(
            norm,
            in_float64=in_float64,
            by_gathering=("dist.all_reduce(squares)", f"{everyone}; squares = sum(every)"),
            # The last rank of a group holds a copy whenever the first one does.
            counted_by_the_last=("groups[axis][0]", "groups[axis][-1]"),
        ),
    ],
    checks.complete_gradients: [
        complete_one_by_one,
        *ways(complete_one_by_one, by_copies=in_copies),
        *ways(
            completed,
            replicas_first=(*with_replicas, average, divide),
            divided_before=(replicas, f"{replicas}; {divide}", ", 1 / dist.get_world_size(replicas)", ""),
        ),
    ],
}

WRONG: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.mesh_groups: told(
        grouped,
        mesh_without_names=("`the result[rank 0]", groups, f"[*{groups}.values()]"),
        mesh_of_8_ranks=("than it should have", groups, of_8_ranks),
        mesh_beyond_its_end=(
            "names rank 4, and there are the ranks 0 to 3",
            "mesh[d, p].tolist()",
            "[one + tp * d for one in mesh[d, p].tolist()]",
        ),
        mesh_in_floats=("has another dtype than it should have", "mesh[d, p].tolist()", "mesh[d, p].double().tolist()"),
        mesh_backwards=("in the wrong places", first, f"{first}[::-1]"),
    ),
    checks.gradient_norm: told(
        norm,
        norm_not_returned=("`the result` is None", "return ", ""),
        norm_that_clips=("changes `gradients[0]`", "return", clips),
        norm_on_rank_0=("on rank 1. Right on rank 0.", root, f"{root} if rank == 0 else 0.0"),
        norm_of_frozen_as_one=("a small number that is added", *frozen_as_one),
    ),
    checks.complete_gradients: told(
        complete_one_by_one,
        complete_over_all_ranks=("whatever `added_on` says", *over_all_ranks),
        complete_one_replica=("those of one replica's samples:", '(*axes, "dp")', "axes", divided_by_replicas, "pass"),
        complete_half_a_replica=("samples, divided by the number of replicas:", '(*axes, "dp")', "axes"),
    )
    | told(
        completed,
        complete_in_other_tensors=("or the mean does not stay in the gradient", known, copied),
        complete_nothing=("sends nothing", of_known, "if one is None]"),
        complete_in_single_precision=("than it should have", *in_float32),
        complete_by_broadcast=("is exactly `gradients[0]` of rank 0 as it was", average, broadcast),
        complete_for_two_replicas=("1.5 times too large", "1 / dist", "1 / min(2, dist", "(replicas))", "(replicas)))"),
    ),
}

ACCIDENTS: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.complete_gradients: told(
        completed,
        complete_stumbles_over_none=("a parameter that is not trained", f" {of_known}", "]"),
        complete_on_first_tensor_rank=("waits", *on_first_tensor_rank),  # the other ranks do not call the all-reduce
    ),
}
