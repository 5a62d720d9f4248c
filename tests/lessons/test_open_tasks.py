"""Open tasks: what is exact is rated by what it takes, and what comes to mind first is not enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.classroom.checks.exercise import Exercise, rated
from course_lib.classroom.checks.part import changed
from course_lib.classroom.checks.prose import TEXTS
from course_lib.classroom.checks.verdict import Verdict
from course_lib.mechanisms.tensor_parallel.linear import conjugate
from lessons.L02_data_parallelism.checks_averaging import each_alone, in_buckets
from lessons.L04_layerwise_model_parallelism.checks import passed_on, sample_by_sample
from lessons.L05_pipeline_parallelism.checks import halves, in_halves, listed, ran
from lessons.L06_tensor_parallelism.checks import one_after_the_other, summed, unchanged, with_one_f_and_g
from lessons.L07_mixed_precision.checks import lower_halves, upper_half, whole_masters
from lessons.L08_combining_mechanisms.checks import completed
from lessons.L09_planning.checks import at_peak, with_traffic
from tests.lessons import by_hand
from tests.lessons.by_hand import straight, summed_by_hand
from tests.lessons.L03_sharded_data_parallelism.solutions import FASTER_LAYERS, by_messages
from tests.lessons.parts import checks
from tests.lessons.test_bank import verdicts_on

TASKS = [part for part in checks.PARTS if part.budget]
SHARES = {"out of budget": 0.0, "met": 0.6, "good": 0.8, "as good as ours": 1.0}


def buckets(size: int) -> Callable[..., object]:
    def program(model: nn.Module, loss: Tensor) -> None:
        in_buckets(model, loss, size)

    return program


def pieces(size: int) -> Callable[..., object]:
    return changed(sample_by_sample, f"of_{size}", "None, 1", f"None, {size}")


def micro_batches(size: int) -> Callable[..., object]:
    return changed(in_halves, f"of_{size}", halves, f"[*map(len, inputs.split({size}))]")


def one_f_one_b(size: int) -> Callable[..., object]:
    in_turns = halves, f"[*map(len, inputs.split({size}))]", '"gpipe"', '"1f1b"'
    return changed(in_halves, f"1f1b_of_{size}", *in_turns)


quarters = "[round(len(inputs) * end / 24) for end in (0, 4, 12, 20, 24)]"
sizes = f"[one for one in torch.tensor({quarters}).diff().tolist() if one]"
small_ends = changed(in_halves, "small_ends", halves, sizes, '"gpipe"', '"1f1b"')


def all_straight(model: nn.Module, loss: Tensor) -> None:
    sums: list[Any] = []
    trained = [one for one in model.parameters() if one.requires_grad]
    hooks = [one.register_post_accumulate_grad_hook(lambda p: sums.append((p, straight(p.grad)))) for one in trained]
    loss.backward()
    for hook in hooks:
        hook.remove()
    for parameter, finish in sums:
        parameter.grad = finish() / dist.get_world_size()


def first_alone(gradients: list[Any], added_on: list[Any], groups: dict[str, Any]) -> None:
    """Let one gradient leave while partial sums are added up, if it is complete, and all others behind them."""
    handle = None if added_on[0] else dist.all_reduce(gradients[0], group=groups["dp"], async_op=True)
    completed(gradients[bool(handle) :], added_on[bool(handle) :], groups)
    if handle:
        handle.wait()
        gradients[0] /= dist.get_world_size(groups["dp"])


f, g = "conjugate(x, unchanged, summed)", "conjugate({}, summed, unchanged)"
one_f = changed(
    one_after_the_other, "one_f", f"first({f})", "first(own)", f"second({f})", "second(own)", "y = ", f"own = {f}; y = "
)
one_g = changed(with_one_f_and_g, "one_g", "second(own)", f"second({f})")


def in_place(weights: list[Tensor], gradients: list[Tensor], backward: Callable, steps: int, lr: float) -> None:
    masters = [weight.float() for weight in weights]
    for _ in range(steps):
        backward()
        for weight, master, gradient in zip(weights, masters, gradients, strict=True):
            master.sub_(gradient, alpha=lr)
            weight.copy_(upper_half(master))


def sharded(weights: list[Tensor], gradients: list[Tensor], backward: Callable, steps: int, lr: float) -> None:
    n, shards = dist.get_world_size(), [weight.view(-1).tensor_split(dist.get_world_size()) for weight in weights]
    masters = [of_ranks[dist.get_rank()].float() for of_ranks in shards]
    for _ in range(steps):
        backward()
        for of_ranks, master, gradient in zip(shards, masters, gradients, strict=True):
            master -= lr * gradient.view(-1).tensor_split(n)[dist.get_rank()].float()
            of_ranks[dist.get_rank()].copy_(upper_half(master))
            for other, shard in enumerate(of_ranks):
                dist.broadcast(shard, other)


without_wide = changed(
    whole_masters, "without_wide", "gradient.float()", "gradient", "lr * gradient", "lr * gradient.float()"
)
by_tensor = changed(
    in_place,
    "by_tensor",
    "for weight, master, gradient in zip(weights, masters, gradients, strict=True)",
    "for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True))",
    "master.sub_(gradient, alpha=lr)",
    "masters[i] = masters[i] - lr * gradient.float()",
    "half(master)",
    "half(masters[i])",
)
alone = "rank, n = dist.get_rank(), dist.get_world_size()", "rank, n = 0, 1"
halves_of_all = changed(lower_halves, "halves_of_all", *alone, "dist.broadcast(shard, other)", "pass")
held_on = changed(lower_halves, "held_on", "            del master  # before the next one is made\n", "")
peak, whole = "plan.devices * 312e12", "at_peak(model, plan, samples, network) / 0.58 + tensor"
one_factor = changed(at_peak, "one_factor", peak, f"0.452 * {peak}")
bubble = changed(with_traffic, "bubble", whole, "at_peak(model, plan, samples, network) / 0.5", " + data", "")
by_data_sheet = changed(with_traffic, "by_data_sheet", "230e9", "300e9", "0.58", "0.56")
EXPECTED: dict[Exercise, dict[Callable[..., object], int]] = {
    checks.faster_backward: {buckets(1): 0, each_alone: 0, buckets(272): 1, buckets(1088): 2, buckets(816): 3},
    checks.faster_layers: FASTER_LAYERS,
    checks.lighter_step: {pieces(32): 0, pieces(16): 1, pieces(8): 2, pieces(2): 2},
    checks.faster_pipeline: {
        micro_batches(12): 0,
        micro_batches(2): 0,
        micro_batches(5): 0,
        one_f_one_b(5): 1,
        small_ends: 2,
    },
    checks.lighter_update: {without_wide: 0, by_tensor: 1, in_place: 1, halves_of_all: 1, sharded: 2, held_on: 2},
    checks.faster_block: {one_f: 1, one_g: 1},
    checks.faster_completion: {first_alone: 1},
    checks.predict_step: {one_factor: 0, bubble: 1, by_data_sheet: 2},
}
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def solutions(task: Exercise) -> dict[Callable[..., object], int]:
    assert task.budget
    return {task.right: 0, **EXPECTED[task], task.budget.ours: 3}


@each_task
def test_all_of_them_are_exact(task: Exercise) -> None:
    assert verdicts_on(task, [*solutions(task)]) == {}


@each_task
def test_each_is_put_on_the_scale(task: Exercise) -> None:
    assert task.budget
    passed, levels = Verdict(task.name, "passed", "Exact.", share=1.0), [*SHARES]
    for program, level in solutions(task).items():
        verdict = rated(passed, task, task.budget, task.run([program], task.price_case))
        assert f"{task.budget.what}: {levels[level]}." in verdict.message, program.__name__
        assert (verdict.share, verdict.passed) == (SHARES[levels[level]], level > 0)


def test_a_check_compares_three_timelines_and_the_step_as_given_earns_nothing() -> None:
    verdict = checks.faster_block(one_after_the_other)
    assert (verdict.outcome, verdict.share) == ("budget", 0.0)
    assert dict(verdict.facts)["The scale"] == "660 as given, 530 met, 400 good, 390 ours, 374 far better"
    assert verdict.idle and [*verdict.idle.beside] == ["as given", "ours"]
    shown = verdict.idle._repr_mimebundle_()
    assert shown["text/html"].count("<img") == 2  # yours on one axis with each of the two
    assert shown["text/plain"].count("below it emulated") == 2


def forward_first(stage: nn.Module, inputs: Tensor, targets: Tensor, loss_fn: Callable, width: int) -> None:
    actions = listed("gpipe", dist.get_rank(), dist.get_world_size(), 16)
    ran(actions, stage, [*inputs.split(4)], [*targets.split(4)], loss_fn, width)


def again_at_once(stage: nn.Module, inputs: Tensor, targets: Tensor, loss_fn: Callable, width: int) -> Any:
    """A step with all samples that goes forward twice on each rank, and keeps nothing of the first pass."""
    with torch.no_grad():
        stage(inputs if dist.get_rank() == 0 else torch.zeros(len(inputs), width, dtype=inputs.dtype))
    return passed_on(stage, inputs, targets, loss_fn, width)


@pytest.mark.parametrize(
    ("task", "program", "end"),
    [
        (
            checks.faster_backward,
            buckets(10**9),
            "for 150 in ours. Most of it in yours: 330 ms in all_reduce, in the backward pass or behind it.",
        ),
        (checks.faster_backward, each_alone, "680 ms in all_reduce, in the backward pass or behind it."),
        (
            checks.lighter_step,
            forward_first,
            f"out of budget. {TEXTS['passes ahead'].format(ahead=16)} At its fullest moment, rank 1 holds new tensors "
            "mostly of these shapes: 85 of [4, 4], 5 of [1, 4]. Which of them do you still need then?",
        ),
        (
            checks.lighter_step,
            again_at_once,
            "out of budget. At its fullest moment, rank 3 holds new tensors mostly of these shapes: 7 of [64, 4], "
            "1 of [256], 1 of [4, 4]. Which of them do you still need then?",
        ),
        (
            checks.lighter_step,
            pieces(16),
            "met. At its fullest moment, rank 3 holds new tensors mostly of these shapes: 9 of [16, 4], 5 of [4, 4], "
            "5 of [1, 4]. Which of them do you still need then?",
        ),
        (checks.faster_completion, completed, f"behind it. {TEXTS['never at once'].format(rank=0)}"),
    ],
)
def test_what_saves_nothing_is_told_what_it_shares_with_the_step_as_given(
    task: Exercise, program: Callable, end: str
) -> None:
    assert task.budget
    message = rated(Verdict(task.name, "passed", ""), task, task.budget, task.run([program], task.price_case)).message
    assert message.endswith(end)


def with_a_message_behind(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    """The block as given; at the end, rank 2 waits for a message of rank 1, so it ends last."""
    rank = dist.get_rank()

    def behind(gradient: Tensor) -> None:
        if rank in (1, 2):
            dist.send(gradient, 2) if rank == 1 else dist.recv(gradient.clone(), 1)

    x.register_hook(behind)
    return one_after_the_other(x, first, second)


def test_the_time_is_told_of_the_rank_that_ends_last() -> None:
    task = checks.faster_block
    assert task.budget
    run = task.run([with_a_message_behind], task.price_case)
    message = rated(Verdict(task.name, "passed", ""), task, task.budget, run).message
    assert "Rank 2 begins 4 operations, and 2 in ours." in message


@pytest.mark.parametrize(
    ("task", "program", "takes"),
    [
        (checks.faster_backward, by_hand.shots, 1246),
        (checks.faster_backward, all_straight, 1275),
        (checks.lighter_step, by_hand.layer_by_layer, 776),
        (checks.faster_block, by_hand.with_one_f_and_g_by_hand, 370),
        (checks.faster_completion, by_hand.all_sent, 57),
        (checks.lighter_update, by_hand.number_by_number, 532),
    ],
)
def test_who_goes_far_below_ours_is_told_so(task: Exercise, program: Callable, takes: float) -> None:
    """As the pages say: one can go far below ours, and by how much."""
    assert task.budget and verdicts_on(task, [program]) == {}
    verdict = rated(Verdict(task.name, "passed", ""), task, task.budget, task.run([program], task.price_case))
    assert f"{takes:,} {task.budget.what}: far better than ours." in verdict.message
    assert verdict.share == 1.0


def in_two_groups(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    group = dist.new_group()

    def summed_in_two(tensor: Tensor) -> Tensor:
        halves = tensor.flatten().clone().chunk(2)
        works = [dist.all_reduce(h, group=one, async_op=True) for h, one in zip(halves, (None, group), strict=True)]
        for work in works:
            work.wait()
        return torch.cat(halves).view_as(tensor)

    own = conjugate(x, unchanged, summed_in_two)
    return x + conjugate(first(own) + second(own), summed_in_two, unchanged)


def by_hand_and_not(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    own = conjugate(x, unchanged, summed)
    return x + conjugate(first(own) + second(own), summed_by_hand, unchanged)


def layers_opened(x: Tensor, first: nn.Sequential, second: nn.Sequential) -> Tensor:
    own = conjugate(x, unchanged, summed)
    return x + conjugate(first[2](first[1](first[0](own))) + second(own), summed, unchanged)


@pytest.mark.parametrize(
    ("task", "program", "text"),
    [
        (checks.faster_block, in_two_groups, "on one link"),
        (checks.faster_block, by_hand_and_not, "on one link"),
        (checks.faster_layers, by_messages, "on one link"),
        (checks.faster_block, layers_opened, "unseen"),
    ],
)
def test_what_only_the_emulated_clock_lets_pass_is_refused(task: Exercise, program: Callable, text: str) -> None:
    verdict = task(program)
    assert (verdict.outcome, verdict.share, verdict.message) == ("price", 0.0, TEXTS[text])


@pytest.mark.parametrize("waits", [True, False])
def test_a_block_that_returns_before_its_sum_is_there_is_wrong(waits: bool) -> None:
    def early(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
        waiting: list[Any] = []

        def begun(tensor: Tensor) -> Tensor:
            total = tensor.clone()
            waiting.append(dist.all_reduce(total, async_op=True))
            if waits:
                waiting[0].wait()
            return total

        def ended(gradient: Tensor) -> Tensor:
            waiting.pop().wait()
            return gradient

        own = conjugate(x, unchanged, summed)
        return conjugate(first(own) + second(own) + own / dist.get_world_size(), begun, ended)

    assert checks.faster_block(early).share == waits


def test_a_solution_that_is_not_exact_earns_nothing_however_many_cases_it_passes() -> None:
    wrong = changed(in_halves, "for_even_minibatches", "len(inputs) - len(inputs) // 2]", "len(inputs) // 2]")
    assert checks.faster_pipeline(wrong).share == 0
