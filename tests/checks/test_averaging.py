"""Every right way to average gradients is accepted, and every wrong one is told what is wrong about it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import checks
from course_lib.checks import averaging

Average = Callable[[nn.Module, int], Any]

verdict_on = functools.cache(checks.average_gradients)  # several tests look at one verdict


def gradients(model: nn.Module) -> Iterator[Tensor]:
    return (parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def all_samples(samples: int) -> int:
    total = torch.tensor(samples)
    dist.all_reduce(total)
    return int(total)


# Right ones


def weighted_before(model: nn.Module, samples: int) -> None:
    total = all_samples(samples)
    for gradient in gradients(model):
        gradient *= samples / total
        dist.all_reduce(gradient)


def divided_after(model: nn.Module, samples: int) -> None:
    total = all_samples(samples)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is not None:
            weighted = parameter.grad * samples
            dist.all_reduce(weighted)
            parameter.grad = weighted / total


def in_one_message(model: nn.Module, samples: int) -> None:
    everything = list(gradients(model))
    message = torch.cat([gradient.flatten() for gradient in everything]) * samples / all_samples(samples)
    dist.all_reduce(message)
    for gradient, part in zip(everything, message.split([g.numel() for g in everything]), strict=True):
        gradient.copy_(part.view_as(gradient))


def in_one_message_with_the_samples(model: nn.Module, samples: int) -> None:
    everything = list(gradients(model))
    one = everything[0].new_ones(1)
    message = torch.cat([*(gradient.flatten() for gradient in everything), one]) * samples
    dist.all_reduce(message)
    message /= message[-1].clone()
    for gradient, part in zip(everything, message[:-1].split([g.numel() for g in everything]), strict=True):
        gradient.copy_(part.view_as(gradient))


def with_handles(model: nn.Module, samples: int) -> None:
    total = all_samples(samples)
    handles = []
    for gradient in gradients(model):
        gradient.mul_(samples / total)
        handles.append(dist.all_reduce(gradient, async_op=True))
    for handle in handles:
        handle.wait()


def by_gathering(model: nn.Module, samples: int) -> None:
    total = all_samples(samples)
    for gradient in gradients(model):
        everyone = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, gradient * samples)
        gradient.copy_(torch.stack(everyone).sum(0) / total)


def with_a_float32_weight(model: nn.Module, samples: int) -> None:
    total = torch.tensor(samples)
    dist.all_reduce(total)
    for gradient in gradients(model):
        gradient *= samples / total
        dist.all_reduce(gradient)


@pytest.mark.parametrize(
    "fn", [weighted_before, divided_after, in_one_message, with_handles, by_gathering, with_a_float32_weight]
)
def test_a_right_average_passes(fn: Average) -> None:
    verdict = verdict_on(fn)
    assert verdict.passed, verdict
    assert verdict.idle is not None and verdict.idle.timeline.origin == "emulated"


def test_other_problems_and_another_model_pass_too() -> None:
    assert checks.average_gradients(weighted_before, seed=1).passed


def test_the_price_is_exact() -> None:
    model = averaging.AVERAGING.priced.model()
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    message = size + 8  # one number more: the samples of all ranks
    verdict = verdict_on(in_one_message_with_the_samples)
    sent, memory = verdict.costs
    assert sent.yours == sent.best == f"{2 * 3 * message // 4:,}"
    assert memory.best == "0"
    assert size <= int(memory.yours.replace(",", "")) <= 3 * size
    exchanging = 6 * (averaging.LINK.latency + message / 4 / averaging.LINK.bandwidth)
    assert verdict.idle is not None
    assert verdict.idle.best == pytest.approx(exchanging / (0.05 + 0.1 + exchanging), rel=1e-9)
    assert verdict.idle.timeline.idle_fraction() == pytest.approx(verdict.idle.best, rel=1e-9)


def test_what_costs_too_much_gets_a_remark() -> None:
    gathered = verdict_on(by_gathering)
    assert any("times the bytes that are needed" in remark for remark in gathered.remarks)
    assert any("latency" in remark for remark in verdict_on(weighted_before).remarks)
    assert verdict_on(in_one_message).remarks == ()


def test_a_weight_rounded_to_float32_gets_a_remark() -> None:
    remarks = verdict_on(with_a_float32_weight).remarks
    assert any("float32" in remark for remark in remarks)


# Wrong ones, named after what the check calls them


def nothing_sent(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        gradient /= dist.get_world_size()


def parameters_averaged(model: nn.Module, samples: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def parameters_changed(model: nn.Module, samples: int) -> None:
    weighted_before(model, samples)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data -= 0.1 * parameter.grad


def gradients_gone(model: nn.Module, samples: int) -> None:
    weighted_before(model, samples)
    for parameter in model.parameters():
        parameter.grad = None


def frozen_parameter_trained(model: nn.Module, samples: int) -> None:
    total = all_samples(samples)
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad *= samples / total
        dist.all_reduce(parameter.grad)


def result_not_stored(model: nn.Module, samples: int) -> None:
    total = all_samples(samples)
    for gradient in gradients(model):
        weighted = gradient * samples / total
        dist.all_reduce(weighted)


def right_on_one_rank_only(model: nn.Module, samples: int) -> None:
    total = all_samples(samples)
    for gradient in gradients(model):
        gradient *= samples / total
        dist.reduce(gradient, 0)


def sum_without_division(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        dist.all_reduce(gradient)


def weighted_sum_without_division(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        gradient *= samples
        dist.all_reduce(gradient)


def weighted_and_divided_by_ranks(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        gradient *= samples
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def divided_twice(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        gradient /= dist.get_world_size()
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def divided_by_samples(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        dist.all_reduce(gradient)
        gradient /= samples


def divided_by_own_samples(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        gradient *= samples
        dist.all_reduce(gradient)
        gradient /= samples * dist.get_world_size()


def some_left_out(model: nn.Module, samples: int) -> None:
    total = all_samples(samples)
    for gradient in gradients(model):
        if gradient.dim() > 1:
            gradient *= samples / total
            dist.all_reduce(gradient)


def shares_counted_alike(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def too_large(model: nn.Module, samples: int) -> None:
    weighted_before(model, samples)
    for gradient in gradients(model):
        gradient *= 5


def ranks_disagree(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        before = gradient.clone()
        dist.all_reduce(gradient)
        gradient -= before


def wrong_numbers(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        dist.all_reduce(gradient, op=dist.ReduceOp.MAX)


WRONG: dict[Average, str] = {
    nothing_sent: "sends nothing",
    parameters_averaged: "You average the parameters",
    parameters_changed: "changes the parameters",
    gradients_gone: "have no gradient any more",
    frozen_parameter_trained: "frozen parameter blocks.0.position.weight has a gradient now",
    result_not_stored: "every `.grad` is what it was before",
    right_on_one_rank_only: "Rank 0 has the right gradient",
    sum_without_division: "with 2 ranks your steps are about 2 times too long",
    weighted_sum_without_division: "counts all 12 samples",
    weighted_and_divided_by_ranks: "divide by the number of ranks",
    divided_twice: "2 times too small",
    divided_by_samples: "already a mean over its share",
    divided_by_own_samples: "this rank's own `samples`",
    some_left_out: "each rank's own: blocks",
    shares_counted_alike: "Weight each gradient by `samples`",
    too_large: "5 times too large",
    ranks_disagree: "Ranks 0 and 1 end with different gradients",
    wrong_numbers: "not that of the whole minibatch",
}


@pytest.mark.parametrize(("fn", "words"), WRONG.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_average_is_told_why(fn: Average, words: str) -> None:
    verdict = verdict_on(fn)
    assert verdict.outcome == "idea"
    assert verdict.idea == fn.__name__
    assert words in verdict.message


def test_every_misconception_is_tried() -> None:
    assert {fn.__name__ for fn in WRONG} == {idea.__name__ for idea in averaging.AVERAGING.ideas}


def test_equal_shares_alone_do_not_show_that_shares_count_differently() -> None:
    assert verdict_on(shares_counted_alike).situation == "3 ranks with 4, 3 and 3 samples"


# Runs that do not come to their end


def forgets_the_frozen_parameter(model: nn.Module, samples: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def divides_the_frozen_parameter(model: nn.Module, samples: int) -> None:
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()  # type: ignore[operator, assignment]


@pytest.mark.parametrize("fn", [forgets_the_frozen_parameter, divides_the_frozen_parameter])
def test_a_forgotten_frozen_parameter_is_named(fn: Average) -> None:
    verdict = verdict_on(fn)
    assert (verdict.outcome, verdict.idea) == ("idea", "frozen_parameter_forgotten")
    assert "its `.grad` is None" in verdict.message
    assert "test_averaging.py, line" in dict(verdict.facts)["What happened"]


def only_rank_0(model: nn.Module, samples: int) -> None:
    if dist.get_rank() == 0:
        weighted_before(model, samples)


def test_a_collective_on_some_ranks_only_is_explained() -> None:
    verdict = verdict_on(only_rank_0)
    assert (verdict.outcome, verdict.idea) == ("idea", "only_some_ranks_call")
    assert "Rank 0 waits in all_reduce" in dict(verdict.facts)["What happened"]


def without_waiting(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        dist.all_reduce(gradient, async_op=True)


def test_an_operation_that_nobody_waited_for_is_told() -> None:
    verdict = verdict_on(without_waiting)
    assert verdict.outcome == "error"
    assert "returned without waiting" in dict(verdict.facts)["What happened"]
    assert "wait()" in verdict.message
