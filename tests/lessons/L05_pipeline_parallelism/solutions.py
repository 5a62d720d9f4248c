"""Solutions to the exercise on pipeline parallelism, as students write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import ScheduleInterleaved1F1B

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import changed
from course_lib.planner import simulate
from course_lib.schedules import SCHEDULES, Action
from lessons.L05_pipeline_parallelism import checks
from lessons.L05_pipeline_parallelism.checks import best, idle_share, interleaved, listed, ran
from tests.lessons.changes import told, ways

# pipeline_actions


def as_in_the_course(name: str, stage: int, n_stages: int, n_micro_batches: int) -> list[Action]:
    return SCHEDULES[name](n_stages, n_micro_batches).actions[stage]


def with_a_limit(name: str, stage: int, n_stages: int, n_micro_batches: int) -> list[Any]:
    """Go forward while there is room, backward when there is none, with plain tuples."""
    limit = n_micro_batches if name == "gpipe" else n_stages - stage
    actions: list[Any] = []
    forward = backward = 0
    while backward < n_micro_batches:
        if forward < n_micro_batches and forward - backward < limit:
            actions.append(("F", stage, forward))
            forward += 1
        else:
            actions.append(("B", stage, backward))
            backward += 1
    return actions


pair = '[Action("F", stage, k), Action("B", stage, k - ahead)]'
from_one = "actions = [one._replace(micro_batch=one.micro_batch + 1) for one in actions]; return actions"

# interleaved_actions


def by_step_numbers(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> list[Action]:
    """Compute stage and micro-batch from the number of a step, as in Megatron-LM."""

    def action(op: str, step: int) -> Action:
        group, inside = divmod(step, n_ranks * stages_per_rank)
        number, k = divmod(inside, n_ranks)
        number = number if op == "F" else stages_per_rank - 1 - number
        return Action(op, number * n_ranks + rank, group * n_ranks + k)

    total = stages_per_rank * n_micro_batches
    ahead = min(total, 2 * (n_ranks - rank - 1) + (stages_per_rank - 1) * n_ranks)
    actions = [action("F", step) for step in range(ahead)]
    for step in range(total - ahead):
        actions += [action("F", ahead + step), action("B", step)]
    return actions + [action("B", step) for step in range(total - ahead, total)]


def of_pytorch(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> list[Action]:
    schedule = object.__new__(ScheduleInterleaved1F1B)
    schedule.n_local_stages, schedule.pp_group_size = stages_per_rank, n_ranks
    schedule._n_microbatches, schedule.microbatches_per_round = n_micro_batches, n_ranks
    found = schedule._calculate_single_rank_operations(rank)
    ops = [(one, "F" if one.computation_type.name == "FORWARD" else "B") for one in found if one]
    return [Action(op, one.stage_index, one.microbatch_index or 0) for one, op in ops]


def of_the_course(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> list[Action]:
    return SCHEDULES["interleaved_1f1b"](n_ranks * stages_per_rank, n_micro_batches, stages_per_rank).actions[rank]


lists = "actions + backwards[len(forwards) - ahead :]"

# run_actions

weight, forward, back = " * len(targets[k]) / samples", "y = module(x)", "y.backward(dy)"
loss = "y = loss_fn(y, targets[k]) * len(targets[k]) / samples"
of_y = "torch.autograd.grad(loss_fn(y, targets[k]), y)[0] * (len(targets[k]) / samples)"
sends, returns = "sending.append(dist.isend(y.detach(), rank + 1))", "sending.append(dist.isend(x.grad, rank - 1))"
handles = "dist.recv(x, rank - 1)", "dist.irecv(x, rank - 1).wait()", "y.detach()", "y.detach().clone()"
with_handles = changed(ran, "with_handles", *handles, "dy := torch.empty_like(y)", "dy := torch.zeros(y.shape).to(y)")
# gradients by torch.autograd.grad, added up by hand
by_hand: tuple[str, ...] = forward, "y = module(x.requires_grad_())", "x.grad", "dx"
by_hand += (
    back,
    """\
dx, *gradients = torch.autograd.grad(y, [x, *module.parameters()], dy)
            for parameter, gradient in zip(module.parameters(), gradients):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient""",
)
# sums first, then each gradient is divided once by all samples, with those of an earlier minibatch in it
divided = (
    weight,
    " * len(targets[k])",
    "    for handle in sending:",
    """\
    for parameter in module.parameters():
        parameter.grad /= samples
    for handle in sending:""",
)
# the same, then added to the earlier gradients
put_apart = (
    "in_flight, sending = {}, []",
    """in_flight, sending = {}, []
    earlier = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()""",
)
added = (
    "handle.wait()  # type: ignore[union-attr]",
    """handle.wait()
    for parameter, gradient in zip(module.parameters(), earlier):
        parameter.grad += 0 if gradient is None else gradient""",
)

# bubble


def simulated(forward: list[float], backward: list[float], n_micro_batches: int) -> float:
    return simulate(SCHEDULES["gpipe"](len(forward), n_micro_batches), forward, backward).idle_fraction()


share = "1 - busy / (n * step)"

# best_micro_batches


def by_size(samples: int, n_stages: int, overhead: float, per_sample: float, room: float) -> int:
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    fitting = [size for size in sizes if size * min(n_stages, samples // size) <= room]
    return samples // min(fitting, key=lambda size: (samples / size + n_stages - 1) * (overhead + per_sample * size))


found = "min(fitting, key=seconds)"
formula = "round(samples / (samples * overhead / ((n_stages - 1) * per_sample)) ** 0.5)"

RIGHT: dict[Exercise, list[Callable[..., object]]] = {
    checks.pipeline_actions: [
        as_in_the_course,
        with_a_limit,
        *ways(listed, by_operation=(pair, '[Action(op, stage, k - ahead * (op == "B")) for op in "FB"]')),
        *ways(listed, plain_tuples=("return actions", "actions = [tuple(one) for one in actions]; return actions")),
    ],
    checks.interleaved_actions: [
        by_step_numbers,
        of_pytorch,
        of_the_course,
        *ways(interleaved, plain_tuples=(lists, f"[tuple(one) for one in {lists}]")),
    ],
    checks.run_actions: [
        with_handles,
        *ways(
            ran,
            gradients_by_hand=by_hand,
            weighted_at_the_end=(*divided, *put_apart, *added),
            loss_when_it_goes_back=(loss, "pass", "dy = None", f"dy = None\n            if rank == last: {loss}"),
            gradient_of_y_first=(loss, "pass", "dy = None", f"dy = None\n            if rank == last: dy = {of_y}"),
        ),
    ],
    checks.bubble: [
        simulated,
        *ways(
            idle_share,
            as_a_tensor=(share, f"torch.tensor({share})"),
            with_the_slowest_apart=("sum(each) + (m - 1) * max(each)", "sum(each) - max(each) + m * max(each)"),
            idle_over_all=(share, "(n * step - busy) / (n * step)"),
        ),
    ],
    checks.best_micro_batches: [
        by_size,
        *ways(
            best,
            sorted_first=(found, "sorted(fitting, key=seconds)[0]"),
            as_a_float=(found, f"float({found})"),
            as_a_tensor=(found, f"torch.tensor({found})"),
        ),
    ],
}

WRONG: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.pipeline_actions: told(
        listed,
        returns_nothing=("`the result[stage 0]` is not what it should be", "return ", ""),
        numbers_of_another_stage=(
            "`the result[stage 2]` is not what it should be",
            "actions = [",
            "stage = 0; actions = [",
        ),
        counts_from_one=(
            "Rank 0 runs F2, and the 2 micro-batches are numbered from 0 to 1",
            "return actions",
            from_one,
        ),
        backward_first=("could not run", pair, f"{pair}[::-1]"),
        ahead_of_all=(
            "Rank 0 begins with 3 forward passes, and there are 2 micro-batches. How far ahead can it run?",
            "min(n_stages - 1 - stage, n_micro_batches)",
            "n_stages - 1 - stage",
        ),
        ahead_of_all_and_back=(
            "Rank 0 begins with 3 forward passes, and there are 2 micro-batches. How far ahead can it run?",
            "min(n_stages - 1 - stage, n_micro_batches)",
            "n_stages - 1 - stage",
            "range(n_micro_batches - ahead,",
            "range(max(n_micro_batches - ahead, 0),",
        ),
    ),
    checks.interleaved_actions: told(
        interleaved,
        pairs_without_a_micro_batch=(
            "`the result[rank 0]` is not what it should be",
            lists,
            f"[one[:2] for one in {lists}]",
        ),
        no_numbers=(
            "`the result[rank 0]` is not what it should be",
            lists,
            f"[one._replace(stage='s') for one in {lists}]",
        ),
        names_own_stages=(
            "Rank 0 has stages [0, 2], and your list for it has [0, 1]",
            lists,
            f"[one._replace(stage=one.stage // n_ranks) for one in {lists}]",
        ),
        never_starts=("Rank 0 has stages [0, 2], and your list for it has none", lists, "[]"),
        one_less=("could not run", "len(forwards))", "len(forwards)) - 1"),
        last_lost=("rank 0 never runs B of micro-batch 3 on stage 0", lists, f"({lists})[:-1]"),
    ),
    checks.run_actions: told(
        ran,
        forwards_alone=(
            "`the result[order of passes]` is not what it should be",
            " in actions",
            " in [one for one in actions if one.op == 'F']",
        ),
        five_times_the_loss=("5 times too large", "loss_fn(", "5 * loss_fn("),
        updates_as_it_goes=(
            "changes `0.weight`",
            back,
            f"{back}; [one.data.sub_(one.grad) for one in module.parameters()]",
        ),
        divides_what_was_there=("should be minus 0.5 times `0.weight.grad` of rank 0 as it was", *divided),
        first_stage_left_out=("on rank 0. Right on rank 1", back, f"{back}; rank or module.zero_grad(False)"),
    ),
    checks.bubble: told(
        idle_share,
        in_percent=("is not what it should be", share, f"100 * ({share})"),
        as_text=("is not what it should be", share, f"str({share})"),
        of_two_stages=("is not what it should be", share, "1 - busy / (2 * step)"),
        changes_the_lists=("changes `plans[0][1][0]`", "n, m =", "backward[0] += 1; n, m ="),
    ),
    checks.best_micro_batches: told(
        best,
        seconds_of_it=("is not what it should be", found, f"seconds({found})"),
        by_the_formula=("The samples cannot be divided by this", found, formula),
        twice_as_many=("is not what it should be", found, f"2 * {found}"),
        in_a_list=("than it should have", found, f"[{found}]"),
        the_longest=("is not what it should be", found, "max(fitting, key=seconds)"),
    ),
}

# Runs that do not come to their end
ACCIDENTS: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.run_actions: told(
        ran,
        blocks_while_sending=(
            "somebody must receive first",
            sends,
            "dist.send(y.detach(), rank + 1)",
            returns,
            "dist.send(x.grad, rank - 1)",
        ),
        buffer_without_dtype=("the dtype of what", "x.new_empty(", "torch.empty("),
    ),
}
