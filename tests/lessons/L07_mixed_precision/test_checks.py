"""The exercise on mixed precision: its right solutions beside one process and PyTorch, its prices, and its numbers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import launch
from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import Case, Observed
from lessons.L07_mixed_precision import checks
from tests.classroom.checks.prices import costs, verdict_on
from tests.lessons.L07_mixed_precision import solutions as s

N = 4


def left(exercise: Exercise, case: Case) -> list[Observed]:
    return [programs[0] for programs in exercise.run_right(case).results]


def test_the_scale_is_that_of_a_grad_scaler_that_sees_all_ranks() -> None:
    history, interval = "3....1.0....", 3
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=interval)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(torch.zeros(1))
    scales, taken = [], []
    for where in history:
        weight.grad = torch.tensor([0.0 if where == "." else torch.inf])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        taken.append(float(where == "."))
    for one in left(checks.update_scale, checks._steps(N, history, interval)):
        assert one.values["the result[scale after it]"].tolist() == scales
        assert one.values["the result[is the step taken]"].tolist() == taken


def test_the_example_of_the_notebook() -> None:
    (one, _) = left(checks.update_scale, checks._steps(2, "....0....", 3))
    assert [int(k) for k in one.values["the result[scale after it]"].tolist()] == [
        *(1024, 1024, 2048, 2048, 1024),
        *(1024, 1024, 2048, 2048),
    ]
    assert one.values["the result[good steps after it]"].tolist() == [1, 2, 0, 1, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_are_what_float64_has_and_weights_are_these_rounded(dtype: torch.dtype) -> None:
    case = checks._updates(N, dtype, 9, 0.1, gradients="missing")
    for rank, one in enumerate(left(checks.master_step, case)):
        weights, gradients, lr = case.arguments(rank)
        exact = [nn.Parameter(weight.double()) for weight in weights]
        optimizer = torch.optim.SGD(exact, lr=lr, momentum=0.5)
        for of_step in gradients:
            for parameter, gradient in zip(exact, of_step, strict=True):
                parameter.grad = None if gradient is None else gradient.double()
            optimizer.step()
        for i, parameter in enumerate(exact):
            master = one.values[f"the result[masters][{i}]"]
            torch.testing.assert_close(master.double(), parameter.detach(), rtol=1e-6, atol=0)
            assert torch.equal(one.values[f"the result[weights][{i}]"], master.to(dtype))  # type: ignore[arg-type]


@pytest.mark.parametrize(("micro_batches", "kind"), [(5, "usual"), (100, "very different"), (1, "large")])
def test_the_mean_is_that_in_float64(micro_batches: int, kind: str) -> None:
    case = checks._sums(N, micro_batches, kind)
    expected = torch.stack([torch.stack(case.arguments(rank)[0]).double().mean(0) for rank in range(N)]).mean(0)
    for one in left(checks.sum_gradients, case):
        # Each rank rounds its part, and 3 additions round, each by half a last digit, 2^-11.
        torch.testing.assert_close(one.values["the result"].double(), expected, rtol=4 * 2.0**-11, atol=0)


@pytest.mark.parametrize("kind", ["a large norm", "a norm below"])
def test_gradients_are_clipped_as_pytorch_does_with_all_of_them(kind: str) -> None:
    case = checks._norms(N, kind, 2.0 if kind == "a large norm" else 1e9)
    everything = [case.arguments(rank) for rank in range(N)]
    parameters: list[list[nn.Parameter]] = []
    for gradients, scale, _ in everything:
        parameters.append([nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients])
        for parameter, gradient in zip(parameters[-1], gradients, strict=True):
            parameter.grad = gradient / scale
    nn.utils.clip_grad_norm_([parameter for of_rank in parameters for parameter in of_rank], everything[0][2])
    for one, of_rank in zip(left(checks.unscale_and_clip, case), parameters, strict=True):
        assert one.values["the result"] == 1
        for i, parameter in enumerate(of_rank):
            torch.testing.assert_close(one.values[f"gradients[{i}]"], parameter.grad, rtol=1e-5, atol=0)


def test_the_best_sum_is_one_all_reduce_of_two_bytes_a_number() -> None:
    price = costs(checks.sum_gradients, checks.mean_of_all)
    assert price["bytes a rank sends"] == (f"{2 * 3 * 3_000 * 2 // 4:,}",) * 2
    assert price["operations they take"] == ("1", "1")
    sent, best = costs(checks.sum_gradients, s.sum_by_scatter)["bytes a rank sends"]
    assert sent == best  # a ring all-reduce is a reduce-scatter and an all-gather


def test_a_sum_is_judged_by_the_true_mean_and_no_rank_may_have_another_bit() -> None:
    micro_batches = [torch.tensor([1.0, 3.0 + rank]).half() for rank in range(2)]
    true = torch.tensor([1.0, 3.5])

    def seen(*results: Tensor) -> list[Tensor]:
        pairs = zip(results, micro_batches, strict=True)
        observed = [Observed({"the result": one}, {"micro_batches[0]": own}, [], 0, False) for one, own in pairs]
        return [values["the result"] for values in checks._rounded_alike(observed)]  # type: ignore[misc]

    nearly = true * (1 + 2.0**-10)
    assert all(torch.equal(one, true) for one in seen(nearly, nearly))
    for left in ((nearly, true), (1.1 * true, 1.1 * true)):
        assert all(map(torch.equal, seen(*left), left))


def test_four_bytes_a_number_are_a_price_and_told_as_the_idea_that_they_are() -> None:
    sent_in_32_bits = next(one.program for one in checks.sum_gradients.mistakes if "32" in one.program.__name__)
    verdict = checks.sum_gradients(sent_in_32_bits)
    assert (verdict.outcome, verdict.idea) == ("price", "sent_in_32_bits")


def test_agreeing_takes_one_operation_a_step_and_the_norm_one_in_all() -> None:
    assert costs(checks.update_scale, checks.adapted)["operations they take"] == ("6", "6")
    assert costs(checks.unscale_and_clip, checks.clipped)["operations they take"] == ("1", "1")
    assert "2 times where 1 would do" in verdict_on(checks.unscale_and_clip, s.clip_with_a_flag).remarks[-1]
    assert "bytes a rank sends" not in costs(checks.master_step, checks.updated)


# The numbers in the notebook


def half(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float16)


def test_what_float16_cannot_hold() -> None:
    assert half(3000) + half(1) == 3000
    assert half(40000) + half(40000) == torch.inf
    assert half(2.0**-24) > 0 and half(2.0**-24) / 4 == 0
    assert half(65504).isfinite() and half(65520) == torch.inf
    assert half(2.0**-25) == 0 and half(2.0**-25 * 1.01) > 0
    assert torch.finfo(torch.float16).eps / 2 == 2.0**-11
    assert torch.amp.GradScaler("cpu").get_growth_interval() == 2000


def test_an_all_reduce_with_max_may_lose_a_nan() -> None:
    def largest(rank: int) -> float:
        number = torch.tensor(torch.nan if rank else 1.0)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return float(number)

    assert launch(largest, 2).results == [1.0, 1.0]
