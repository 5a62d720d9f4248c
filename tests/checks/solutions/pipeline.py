"""Solutions to the exercise on pipeline parallelism, as students write them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from course_lib import checks
from course_lib.checks.exercise import Exercise
from course_lib.checks.pipeline import best, idle_share, interleaved, listed, ran
from course_lib.planner import simulate
from course_lib.schedules import SCHEDULES, Action

# pipeline_actions, right


def by_phases(name: str, stage: int, n_stages: int, n_micro_batches: int) -> list[Action]:
    """Warm-up, steady state, cool-down."""
    ahead = n_micro_batches if name == "gpipe" else min(n_micro_batches, n_stages - stage - 1)
    steady = n_micro_batches - ahead
    ops = ["F"] * ahead + ["F", "B"] * steady + ["B"] * ahead
    counts = {"F": 0, "B": 0}
    actions = []
    for op in ops:
        actions.append(Action(op, stage, counts[op]))
        counts[op] += 1
    return actions


def with_a_limit(name: str, stage: int, n_stages: int, n_micro_batches: int) -> list[Any]:
    """Forward while there is room, backward when there is none: plain tuples."""
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


def gpipe_apart(name: str, stage: int, n_stages: int, n_micro_batches: int) -> list[Action]:
    forwards = [Action("F", stage, k) for k in range(n_micro_batches)]
    backwards = [Action("B", stage, k) for k in range(n_micro_batches)]
    if name == "gpipe":
        return forwards + backwards
    ahead = n_stages - stage - 1
    mixed = [one for pair in zip(forwards[ahead:], backwards, strict=False) for one in pair]
    return forwards[:ahead] + mixed + backwards[max(0, n_micro_batches - ahead) :]


def sorted_by_time(name: str, stage: int, n_stages: int, n_micro_batches: int) -> list[Action]:
    """If F and B take equally long, the F of stage s begins at turn 2 k + s, up to the first that have no gap."""
    if name == "gpipe":
        return listed(name, stage, n_stages, n_micro_batches)
    ahead = n_stages - 1 - stage
    turns = [(2 * (k - ahead), Action("F", stage, k)) for k in range(n_micro_batches)]
    turns += [(2 * k + 1, Action("B", stage, k)) for k in range(n_micro_batches)]
    return [action for _, action in sorted(turns)]


# pipeline_actions, wrong


def numbers_of_another_stage(name: str, stage: int, n_stages: int, n_micro_batches: int) -> list[Action]:
    return [one._replace(stage=0) for one in listed(name, stage, n_stages, n_micro_batches)]


def small_letters(name: str, stage: int, n_stages: int, n_micro_batches: int) -> list[Action]:
    return [one._replace(op=one.op.lower()) for one in listed(name, stage, n_stages, n_micro_batches)]


def counts_from_one(name: str, stage: int, n_stages: int, n_micro_batches: int) -> list[Action]:
    return [one._replace(micro_batch=one.micro_batch + 1) for one in listed(name, stage, n_stages, n_micro_batches)]


def returns_a_schedule(name: str, stage: int, n_stages: int, n_micro_batches: int) -> Any:
    return SCHEDULES[name](n_stages, n_micro_batches)


def prints_only(name: str, stage: int, n_stages: int, n_micro_batches: int) -> None:
    print(listed(name, stage, n_stages, n_micro_batches))


def drops_the_last(name: str, stage: int, n_stages: int, n_micro_batches: int) -> list[Action]:
    return listed(name, stage, n_stages, n_micro_batches)[:-1]


def only_known_sizes(name: str, stage: int, n_stages: int, n_micro_batches: int) -> list[Action]:
    return listed(name, stage, 3, n_micro_batches)


def backward_first(name: str, stage: int, n_stages: int, n_micro_batches: int) -> list[Action]:
    """B before F in each pair: the last stage has nothing yet to go back with."""
    actions = listed(name, stage, n_stages, n_micro_batches)
    return actions if name == "gpipe" else [*actions[1::-1], *actions[2:]]


# interleaved_actions, right


def by_step_numbers(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> list[Action]:
    """As in Megatron-LM: from the number of a step to its stage and its micro-batch."""

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


def with_iterators(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> list[Any]:
    def steps(op: str, stages: list[int]) -> Any:
        for first in range(0, n_micro_batches, n_ranks):
            for stage in stages:
                for k in range(first, first + n_ranks):
                    yield (op, stage, k)

    stages = [rank + i * n_ranks for i in range(stages_per_rank)]
    forward, backward = steps("F", stages), steps("B", stages[::-1])
    ahead = (stages_per_rank - 1) * n_ranks + 2 * (n_ranks - 1 - rank)
    actions = list(itertools.islice(forward, ahead))
    for one in forward:
        actions += [one, next(backward)]
    return actions + list(backward)


def of_pytorch(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> list[Action]:
    schedule = object.__new__(ScheduleInterleaved1F1B)
    schedule.n_local_stages, schedule.pp_group_size = stages_per_rank, n_ranks
    schedule._n_microbatches, schedule.microbatches_per_round = n_micro_batches, n_ranks
    found = schedule._calculate_single_rank_operations(rank)
    ops = [(one, "F" if one.computation_type.name == "FORWARD" else "B") for one in found if one]
    return [Action(op, one.stage_index, one.microbatch_index or 0) for one, op in ops]


def by_counting(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> list[Action]:
    """The next stage is the one that is furthest behind; a micro-batch has its number by counting."""
    stages = [rank + i * n_ranks for i in range(stages_per_rank)]
    total = {stage: {"F": 0, "B": 0} for stage in stages}

    def following(op: str) -> Action:
        order = stages if op == "F" else stages[::-1]
        group = min(done[op] // n_ranks for done in total.values())
        stage = next(stage for stage in order if total[stage][op] // n_ranks == group)
        total[stage][op] += 1
        return Action(op, stage, total[stage][op] - 1)

    steps = stages_per_rank * n_micro_batches
    ahead = min(steps, (stages_per_rank - 1) * n_ranks + 2 * (n_ranks - 1 - rank))
    ops = ["F"] * ahead + ["F", "B"] * (steps - ahead) + ["B"] * ahead
    return [following(op) for op in ops]


# interleaved_actions, wrong


def nothing_at_all(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> None:
    interleaved(rank, n_ranks, stages_per_rank, n_micro_batches)


def pairs_without_a_micro_batch(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> list[Any]:
    return [(op, stage) for op, stage, _ in interleaved(rank, n_ranks, stages_per_rank, n_micro_batches)]


def no_numbers(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> list[Any]:
    return [Action(op, "s", k) for op, _, k in interleaved(rank, n_ranks, stages_per_rank, n_micro_batches)]  # type: ignore[arg-type]


def names_own_stages(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> list[Action]:
    """0, 1, ... on each rank."""
    found = interleaved(rank, n_ranks, stages_per_rank, n_micro_batches)
    return [one._replace(stage=one.stage // n_ranks) for one in found]


def one_less(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> list[Action]:
    actions = interleaved(rank, n_ranks, stages_per_rank, n_micro_batches)
    first = next(i for i, one in enumerate(actions) if one.op == "B")
    return [*actions[: first - 1], actions[first], actions[first - 1], *actions[first + 1 :]]


def last_micro_batch_lost(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> list[Action]:
    return interleaved(rank, n_ranks, stages_per_rank, n_micro_batches)[:-1]


def mirrored(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> list[Action]:
    return interleaved(n_ranks - 1 - rank, n_ranks, stages_per_rank, n_micro_batches)


def in_words(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> Any:
    return [f"{op}{k}" for op, _, k in interleaved(rank, n_ranks, stages_per_rank, n_micro_batches)]


def never_starts(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> list[Action]:
    return []


def always_two_stages(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> list[Action]:
    return interleaved(rank, n_ranks, 2, n_micro_batches)


# run_actions, right


def with_handles_in_a_list(
    actions: Any, module: Any, inputs: Any, targets: Any, loss_fn: Any, width: int, weighted: bool = True
) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    total = sum(len(target) for target in targets)
    xs: dict[int, Tensor] = {}
    ys: dict[int, Tensor] = {}
    handles = []
    for action in actions:
        k = action.micro_batch
        if action.op == "F":
            if rank:
                xs[k] = torch.zeros(len(inputs[k]), width, dtype=inputs[k].dtype, requires_grad=True)
                dist.recv(xs[k].data, rank - 1)
            ys[k] = module(xs[k] if rank else inputs[k])
            if rank < last:
                handles.append(dist.isend(ys[k].detach(), rank + 1))
        elif rank == last:
            weight = len(targets[k]) / total if weighted else 1 / len(targets)
            (loss_fn(ys.pop(k), targets[k]) * weight).backward()
        else:
            dy = torch.empty_like(ys[k])
            dist.recv(dy, rank + 1)
            torch.autograd.backward(ys.pop(k), dy)
        if action.op == "B" and rank:
            handles.append(dist.isend(xs.pop(k).grad, rank - 1))  # type: ignore[arg-type]
    for handle in handles:
        handle.wait()


def weighted_at_the_end(actions: Any, module: Any, inputs: Any, targets: Any, loss_fn: Any, width: int) -> None:
    """Sums first, divided by all samples, and then added to what was there."""
    earlier = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    divides_what_was_there(actions, module, inputs, targets, loss_fn, width)
    for parameter, gradient in zip(module.parameters(), earlier, strict=True):
        parameter.grad += 0 if gradient is None else gradient


def divides_what_was_there(actions: Any, module: Any, inputs: Any, targets: Any, loss_fn: Any, width: int) -> None:
    """Sums first, and each gradient divided once by all samples, with those of an earlier minibatch in it."""

    def summed(y: Tensor, target: Tensor) -> Tensor:
        return loss_fn(y, target) * sum(map(len, targets))

    ran(actions, module, inputs, targets, summed, width)
    for parameter in module.parameters():
        parameter.grad /= sum(map(len, targets))


def in_functions(actions: Any, module: Any, inputs: Any, targets: Any, loss_fn: Any, width: int) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    sent: list[Any] = []

    def forward(k: int) -> None:
        x = inputs[k]
        if rank > 0:
            x = torch.empty(len(x), width).to(x)
            dist.recv(x, rank - 1)
            x = x.requires_grad_(True)
        y = module(x)
        kept[k] = x, y
        if rank != last:
            sent.append(dist.isend(y.detach().clone(), rank + 1))

    def backward(k: int) -> None:
        x, y = kept.pop(k)
        if rank == last:
            share = len(targets[k]) / sum(map(len, targets))
            (share * loss_fn(y, targets[k])).backward()
        else:
            gradient = torch.empty_like(y)
            dist.irecv(gradient, rank + 1).wait()
            y.backward(gradient)
        if rank != 0:
            sent.append(dist.isend(x.grad, rank - 1))  # type: ignore[arg-type]

    for op, _, k in actions:
        {"F": forward, "B": backward}[op](k)
    for handle in sent:
        handle.wait()


def gradients_by_hand(actions: Any, module: Any, inputs: Any, targets: Any, loss_fn: Any, width: int) -> None:
    """torch.autograd.grad in place of backward(), and added up on one's own."""
    rank, last, samples = dist.get_rank(), dist.get_world_size() - 1, sum(map(len, targets))
    parameters, kept, handles = list(module.parameters()), {}, []
    for op, _, k in actions:
        if op == "F":
            x = inputs[k].new_empty(len(inputs[k]), width) if rank else inputs[k]
            if rank:
                dist.recv(x, rank - 1)
            y = module(x.requires_grad_())
            kept[k] = x, y
            if rank < last:
                handles.append(dist.isend(y.detach(), rank + 1))
            continue
        x, y = kept.pop(k)
        dy = None
        if rank < last:
            dist.recv(dy := torch.empty_like(y), rank + 1)
        else:
            y = loss_fn(y, targets[k]) * len(targets[k]) / samples
        dx, *found = torch.autograd.grad(y, [x, *parameters], dy)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if rank:
            handles.append(dist.isend(dx, rank - 1))
    for handle in handles:
        handle.wait()


# run_actions, wrong


def runs_nothing(actions: Any, module: Any, inputs: Any, targets: Any, loss_fn: Any, width: int) -> None:
    pass


def forwards_alone(actions: Any, module: Any, inputs: Any, targets: Any, loss_fn: Any, width: int) -> None:
    ran([one for one in actions if one.op == "F"], module, inputs, targets, loss_fn, width)


def five_times_the_loss(actions: Any, module: Any, inputs: Any, targets: Any, loss_fn: Any, width: int) -> None:
    ran(actions, module, inputs, targets, lambda y, target: 5 * loss_fn(y, target), width)


def updates_as_it_goes(actions: Any, module: Any, inputs: Any, targets: Any, loss_fn: Any, width: int) -> None:
    ran(actions, module, inputs, targets, loss_fn, width)
    for parameter in module.parameters():
        parameter.data -= parameter.grad


def clears_what_it_has(actions: Any, module: Any, inputs: Any, targets: Any, loss_fn: Any, width: int) -> None:
    ran(actions, module, inputs, targets, loss_fn, width)
    module.zero_grad()


def first_stage_left_out(actions: Any, module: Any, inputs: Any, targets: Any, loss_fn: Any, width: int) -> None:
    ran(actions, module, inputs, targets, loss_fn, width)
    if dist.get_rank() == 0:
        module.zero_grad(set_to_none=False)


def targets_shifted(actions: Any, module: Any, inputs: Any, targets: Any, loss_fn: Any, width: int) -> None:
    ran(actions, module, inputs, [target.flip(0) for target in targets], loss_fn, width)


def blocks_while_sending(actions: Any, module: Any, inputs: Any, targets: Any, loss_fn: Any, width: int) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    kept = {}
    for op, _, k in actions:
        if op == "F":
            x = inputs[k].new_empty(len(inputs[k]), width) if rank else inputs[k]
            if rank:
                dist.recv(x, rank - 1)
            kept[k] = x.requires_grad_(), module(x)
            if rank < last:
                dist.send(kept[k][1].detach(), rank + 1)
        else:
            x, y = kept.pop(k)
            dy = torch.empty_like(y) if rank < last else None
            if dy is None:
                y = loss_fn(y, targets[k]) * len(targets[k]) / sum(map(len, targets))
            else:
                dist.recv(dy, rank + 1)
            y.backward(dy)
            if rank:
                dist.send(x.grad, rank - 1)


def buffer_without_dtype(actions: Any, module: Any, inputs: Any, targets: Any, loss_fn: Any, width: int) -> None:
    if dist.get_rank():
        dist.recv(torch.empty(len(inputs[0]), width), dist.get_rank() - 1)
    ran(actions, module, inputs, targets, loss_fn, width)


# bubble, right


def simulated(forward: list[float], backward: list[float], n_micro_batches: int) -> float:
    return simulate(SCHEDULES["gpipe"](len(forward), n_micro_batches), forward, backward).idle_fraction()


def exactly(forward: Any, backward: Any, n_micro_batches: int) -> Any:
    p, m = len(forward), n_micro_batches
    step = sum(forward) + sum(backward) + (m - 1) * (max(forward) + max(backward))
    return float(1 - Fraction(m * (sum(forward) + sum(backward)), p * step))


def turn_by_turn(forward: list[float], backward: list[float], n_micro_batches: int) -> float:
    """When each stage is done with each micro-batch, as in a table."""
    p, ends, start = len(forward), 0.0, 0.0
    for each in (forward, backward[::-1]):
        free = [start] * p
        for _ in range(n_micro_batches):
            arrives = start
            for stage in range(p):
                free[stage] = arrives = max(free[stage], arrives) + each[stage]
        ends = start = free[-1]
    return 1 - n_micro_batches * sum(f + b for f, b in zip(forward, backward, strict=True)) / (p * ends)


def as_a_tensor(forward: list[float], backward: list[float], n_micro_batches: int) -> Tensor:
    f, b = torch.tensor(forward).double(), torch.tensor(backward).double()
    step = f.sum() + b.sum() + (n_micro_batches - 1) * (f.max() + b.max())
    return 1 - n_micro_batches * (f + b).sum() / step / len(f)


# bubble, wrong


def in_percent(forward: list[float], backward: list[float], n_micro_batches: int) -> float:
    return 100 * idle_share(forward, backward, n_micro_batches)


def as_text(forward: list[float], backward: list[float], n_micro_batches: int) -> str:
    return f"{idle_share(forward, backward, n_micro_batches):.0%}"


def no_answer(forward: list[float], backward: list[float], n_micro_batches: int) -> None:
    idle_share(forward, backward, n_micro_batches)


def what_is_busy(forward: list[float], backward: list[float], n_micro_batches: int) -> float:
    return 1 - idle_share(forward, backward, n_micro_batches)


def changes_the_lists(forward: list[float], backward: list[float], n_micro_batches: int) -> float:
    share = idle_share(forward, backward, n_micro_batches)
    forward.sort()
    backward[0] += 1
    return share


def of_the_fastest(forward: list[float], backward: list[float], n_micro_batches: int) -> float:
    return idle_share([min(forward)] * len(forward), [min(backward)] * len(backward), n_micro_batches) + 0.01


# best_micro_batches, right


def tried_one_by_one(samples: int, n_stages: int, overhead: float, per_sample: float, room: float) -> int:
    found, shortest = 0, float("inf")
    for m in range(1, samples + 1):
        size, left_over = divmod(samples, m)
        if left_over or size * min(m, n_stages) > room:
            continue
        step = (m + n_stages - 1) * (overhead + per_sample * size)
        if step < shortest:
            found, shortest = m, step
    return found


def by_size(samples: int, n_stages: int, overhead: float, per_sample: float, room: float) -> int:
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    fitting = [size for size in sizes if size * min(n_stages, samples // size) <= room]
    return samples // min(fitting, key=lambda size: (samples / size + n_stages - 1) * (overhead + per_sample * size))


def by_simulating(samples: int, n_stages: int, overhead: float, per_sample: float, room: float) -> int:
    def step(m: int) -> float:
        seconds = overhead + per_sample * samples / m
        return simulate(SCHEDULES["1f1b"](n_stages, m), seconds, seconds).makespan

    return min((m for m in divisors(samples) if min(m, n_stages) * samples // m <= room), key=step)


def divisors(samples: int) -> list[int]:
    return [m for m in range(1, samples + 1) if samples % m == 0]


def as_a_float(samples: int, n_stages: int, overhead: float, per_sample: float, room: float) -> float:
    return float(by_size(samples, n_stages, overhead, per_sample, room))


# best_micro_batches, wrong


def seconds_of_it(samples: int, n_stages: int, overhead: float, per_sample: float, room: float) -> float:
    m = best(samples, n_stages, overhead, per_sample, room)
    return (m + n_stages - 1) * (overhead + per_sample * samples / m)


def by_the_formula(samples: int, n_stages: int, overhead: float, per_sample: float, room: float) -> int:
    return round(samples / (samples * overhead / ((n_stages - 1) * per_sample)) ** 0.5)


def always_four_for_a_stage(samples: int, n_stages: int, overhead: float, per_sample: float, room: float) -> int:
    return 4 * n_stages


def twice_as_many(samples: int, n_stages: int, overhead: float, per_sample: float, room: float) -> int:
    return 2 * best(samples, n_stages, overhead, per_sample, room)


def all_that_fit(samples: int, n_stages: int, overhead: float, per_sample: float, room: float) -> list[int]:
    return [best(samples, n_stages, overhead, per_sample, room)]


def the_longest(samples: int, n_stages: int, overhead: float, per_sample: float, room: float) -> int:
    return max(divisors(samples), key=lambda m: (m + n_stages - 1) * (overhead + per_sample * samples / m))


RIGHT: dict[Exercise, list[Callable[..., object]]] = {
    checks.pipeline_actions: [by_phases, with_a_limit, gpipe_apart, sorted_by_time],
    checks.interleaved_actions: [by_step_numbers, with_iterators, of_pytorch, by_counting],
    checks.run_actions: [with_handles_in_a_list, weighted_at_the_end, in_functions, gradients_by_hand],
    checks.bubble: [simulated, exactly, turn_by_turn, as_a_tensor],
    checks.best_micro_batches: [tried_one_by_one, by_size, by_simulating, as_a_float],
}

WRONG: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.pipeline_actions: {
        numbers_of_another_stage: "`the result[stage 2]` is not what it should be",
        small_letters: "`the result[stage 0]` is not what it should be",
        counts_from_one: "could not run: rank 0 never runs F of micro-batch 0 on stage 0",
        returns_a_schedule: "`the result[stage 0]` is not what it should be",
        prints_only: "`the result[stage 0]` is not what it should be",
        drops_the_last: "could not run: rank 0 never runs B of micro-batch 1 on stage 0",
        only_known_sizes: "is not what it should be",
        backward_first: "could not run",
    },
    checks.interleaved_actions: {
        nothing_at_all: "`the result[rank 0]` is not what it should be",
        pairs_without_a_micro_batch: "`the result[rank 0]` is not what it should be",
        no_numbers: "`the result[rank 0]` is not what it should be",
        names_own_stages: "Rank 0 has stages [0, 2], and your list for it has [0, 1]",
        mirrored: "Rank 0 has stages [0, 2], and your list for it has [1, 3]",
        in_words: "`the result[rank 0]` is not what it should be",
        never_starts: "Rank 0 has stages [0, 2], and your list for it has none",
        one_less: "could not run",
        last_micro_batch_lost: "rank 0 never runs B of micro-batch 3 on stage 0",
        always_two_stages: "Rank 0 has stages [0, 2, 4], and your list for it has [0, 2]",
    },
    checks.run_actions: {
        runs_nothing: "`0.weight.grad` is not even of the right type",
        forwards_alone: "`0.weight.grad` is not even of the right type",
        five_times_the_loss: "5 times too large",
        updates_as_it_goes: "changes `0.weight`",
        clears_what_it_has: "`0.weight.grad` is not even of the right type",
        divides_what_was_there: "not what one process would have",
        first_stage_left_out: "Only rank 1 has what it should have",
        targets_shifted: "not what one process would have",
    },
    checks.bubble: {
        in_percent: "100 times too large",
        as_text: "not even of the right type",
        no_answer: "not even of the right type",
        what_is_busy: "not what was asked for",
        changes_the_lists: "changes `plans[0][1][0]`",
        of_the_fastest: "not what was asked for",
    },
    checks.best_micro_batches: {
        seconds_of_it: "not what was asked for",
        by_the_formula: "The samples cannot be divided by this",
        always_four_for_a_stage: "not what was asked for",
        twice_as_many: "2 times too large",
        all_that_fit: "not even of the right type",
        the_longest: "as small as can be",
    },
}

# Runs that do not come to their end
ACCIDENTS: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.run_actions: {
        blocks_while_sending: "somebody must receive first",
        buffer_without_dtype: "the dtype of what",
    },
}
