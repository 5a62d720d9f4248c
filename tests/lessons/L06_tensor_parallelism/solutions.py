"""Solutions as students write them: right ones in many ways, and wrong ones without a single misconception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import changed
from lessons.L06_tensor_parallelism import checks
from lessons.L06_tensor_parallelism.checks import column, entropy, heads_cut, row, summed
from tests.lessons.changes import told, ways

# column_parallel


f, y, gathered = "conjugate(x, unchanged, summed)", "F.linear(x, weight, bias)", "side_by_side(one[..., None]).sum(-1)"
of_two, to_rank_0 = "lambda one: 2 * summed(one) / dist.get_world_size()", "lambda one: dist.reduce(one, 0) or one"
einsum = y, 'torch.einsum("...i,oi->...o", x, weight) + bias'

# row_parallel


class SumOfPartialSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_sum: Tensor) -> Tensor:
        return summed(partial_sum)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def row_with_a_function_of_its_own(x: Any, weight: Any, bias: Any) -> Any:
    return SumOfPartialSums.apply(x @ weight.T) + bias


g, start = "conjugate(partial_sum, summed, unchanged)", "partial_sum = F.linear(x, weight)"
in_place = "(dist.all_reduce(partial_sum.data) or partial_sum)"
differentiable = start, f"from torch.distributed.nn.functional import all_reduce; {start}", g, "all_reduce(partial_sum)"
# The sum, but added to each rank's own part: every rank rounds differently.
difference = "partial_sum + (summed(partial_sum.detach()) - partial_sum.detach())"

# cut_heads

share, pieces, columns = ".tensor_split(n)[rank]", "qkv[rows], bias[rows]", "out[:, own]"
views = "qkv.view(3, hidden, -1)[:, own].flatten(0, 1), bias.view(3, -1)[:, own].flatten()"
in_thirds = "*(torch.cat([third[own] for third in one.chunk(3)]) for one in (qkv, bias))"
left_over_on_one = "[rank * (heads // n) : heads if rank == n - 1 else (rank + 1) * (heads // n)]"
cut_like_cards = changed(heads_cut, "cut_like_cards", share, "[rank::n]")

# cross_entropy


def loss_by_logsumexp(logits: Any, targets: Any, first: int) -> Any:
    """Stay stable without a common maximum: log-sum-exp of all ranks' log-sum-exps, which are gathered."""
    hit = torch.arange(logits.shape[1]) + first == targets[:, None]
    own = torch.stack([torch.logsumexp(logits, -1), logits.where(hit, 0).sum(1)])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    totals, of_targets = torch.stack(parts, 1)
    total = torch.logsumexp(totals, 0)
    gradient = torch.exp(logits - total[:, None]) - hit.double()
    return (total - of_targets.sum(0)).mean(), gradient / len(targets)


def loss_of_plain_exponentials(logits: Any, targets: Any, first: int) -> Any:
    """Send two sums, one after the other, and no maximum."""
    exponentials = logits.exp()
    dist.all_reduce(total := exponentials.sum(1))
    place = targets - first
    is_own = (place >= 0) & (place < logits.shape[1])
    logit = torch.zeros_like(total)
    logit[is_own] = logits[is_own, place[is_own]]
    dist.all_reduce(logit)
    gradient = exponentials / total[:, None]
    gradient[is_own, place[is_own]] -= 1
    return (total.log() - logit).mean(), gradient / len(targets)


add_up, mean, agree = (
    "dist.all_reduce(sums)",
    "(total.log() - logit).mean()",
    "dist.all_reduce(largest, dist.ReduceOp.MAX)",
)
in_three = add_up, "dist.all_reduce(total); dist.all_reduce(logit)"
loss_in_three_operations = changed(entropy, "loss_in_three_operations", *in_three)
rows = "rows = ((place >= 0) & (place < logits.shape[-1])).nonzero().flatten()"
mask: tuple[str, ...] = rows, "hit = torch.arange(logits.shape[-1]) == place[:, None]"
mask += "logit[rows] = exponentials[rows, place[rows]]", "logit += (exponentials * hit).sum(-1)"
mask += "gradient[rows, place[rows]] -= 1", "gradient -= hit.double()"

RIGHT: dict[Exercise, list[Callable[..., object]]] = {
    checks.column_parallel: [
        *ways(
            column,
            with_einsum=einsum,
            by_a_product=(y, "x @ weight.T + bias"),
            with_a_hook=(f, "x.view_as(x); x.register_hook(summed)"),
            by_gathering=("summed", f"lambda one: {gathered}"),
        ),
    ],
    checks.row_parallel: [
        row_with_a_function_of_its_own,
        *ways(
            row,
            # autograd does not see in-place changes of .data, just as g needs
            in_place=(g, in_place),
            in_place_with_a_warning=(g, in_place.replace(".data", "")),
            by_gathering=("summed", f"lambda one: {gathered}"),
        ),
    ],
    checks.cut_heads: [
        cut_like_cards,
        *ways(
            heads_cut,
            by_views=(pieces, views),
            with_the_larger_shares_last=(share, "[heads * rank // n : heads * (rank + 1) // n]"),
            a_list_of_thirds=(f"return {pieces}, {columns}", f"return [{in_thirds}, {columns}]"),
        ),
    ],
    checks.cross_entropy: [
        loss_by_logsumexp,
        loss_in_three_operations,
        *ways(entropy, with_a_mask=mask, mean_by_mean=(mean, "total.log().mean() - logit.mean()")),
    ],
}

WRONG: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.column_parallel: told(
        column,
        column_detached=("nothing goes on to x", f, "x.detach(); summed(x)"),
        column_without_bias=("`the result[bias.grad]` is None", "weight, bias)", "weight)"),
        column_in_float32=("`the result[y]` has another", y, f"{y}.float()"),
        column_of_two_ranks=("1.5 times too small. There are 3 ranks", "summed", of_two),
        column_reduced_to_rank_0=("on rank 1. Right on rank 0.", "summed", to_rank_0),
        column_returns_a_pair=("than it should have", y, f"{y}, x"),
        column_broadcasts=("is exactly what rank 0 sent", "summed", "lambda one: dist.broadcast(one, 0) or one"),
    ),
    checks.row_parallel: told(
        row,
        row_of_differentiable_all_reduce=("added up once more on the way back", *differentiable),
        row_as_a_difference=("different numbers in their last digits", g, difference),
        row_detached=("`the result[x.grad]` is None", g, "summed(partial_sum.detach())"),
        row_takes_the_largest=(
            "This is not what was asked for. Wrong: `the result[y]`.",
            g,
            in_place.replace(".data", ".data, dist.ReduceOp.MAX"),
        ),
    ),
    checks.cut_heads: told(
        heads_cut,
        cut_nothing_returned=("not in whole heads", "return ", ""),
        cut_without_bias=("not in whole heads", pieces, "qkv[rows]"),
        cut_in_float32=("not in whole heads", columns, f"{columns}.float()"),
        cut_and_scaled=("2 times too small", columns, f"{columns} / n"),
        cut_in_place=("changes `qkv`", "rows = ", "qkv.zero_(); rows = "),
        cut_with_all_left_over_on_one=("All heads that are left over go to one rank", share, left_over_on_one),
    ),
    checks.cross_entropy: {loss_of_plain_exponentials: "What may be subtracted from all logits"}
    | told(
        entropy,
        loss_alone=("sends nothing", agree, "pass", add_up, "pass"),
        loss_as_a_number=("`the result[loss]` has another", mean, f"{mean}.item()"),
        loss_without_gradient=("`the result[loss]` is missing", ", gradient.div_(len(targets))", ""),
        loss_in_the_logits=("changes `logits`", "logits - largest[:, None]", "logits.sub_(largest[:, None])"),
        loss_summed_once_more=("2 times too large", mean, f"summed({mean})"),
        # the right result, from all logits, twice
        loss_from_logits_of_all=("a rank gives", add_up, f"side_by_side(logits); {add_up}"),
    ),
}
