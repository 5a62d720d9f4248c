"""The open cases about slow trainings: their runs, and the figures in their model answers."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import pytest
import torch

from course_lib import data
from course_lib.classroom import questions
from course_lib.classroom.runs.training import SMALL
from course_lib.model import TinyGPT
from lessons.L07_mixed_precision.questions import RECIPES, WAYS, Way, added_up, train_by


@pytest.fixture(autouse=True, scope="module")
def each_way_once() -> Iterator[None]:
    """A fixture that runs each way once, for a case and for a test of its parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Way, "run", functools.cache(Way.run))
        yield


@pytest.mark.parametrize("name", ["why_mixed_precision", "diagnose_efficiency", "optimize_training"])
def test_a_case_is_run_and_left_to_the_student_to_judge(name: str) -> None:
    feedback = questions.load(name).answer("I do not know yet.")
    assert feedback.right is None
    assert feedback.outcome.shown, feedback.outcome
    assert "A good answer:" in str(feedback)
    assert feedback.outcome.pictures


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("why_mixed_precision", ["a sixth", f"{4 + 4 + 8} bytes", "2 + 2 + 12"]),
        ("diagnose_efficiency", [f"{1 / 4:.0%}", f"{16 / (16 + 3):.0%}", f"{64 / (64 + 3):.0%}"]),
        ("optimize_training", [f"{1.2 + 0.8 / 8:.1f} s", f"{1.2 / 2 + 0.8 / 8 / 2:.2f} s", "8 of 11 turns"]),
    ],
)
def test_the_figures_of_model_answers(name: str, figures: list[str]) -> None:
    ((_, answer),) = questions.load(name).form.explanations()
    assert [figure for figure in figures if figure not in answer] == []


def test_mixed_precision_halves_activations_and_messages_and_no_states() -> None:
    before, mixed = (train_by(RECIPES[name], workers=2, steps=3) for name in ("float32", "mixed"))
    assert mixed.activations < 0.55 * before.activations
    assert mixed.sent == pytest.approx(before.sent / 2, rel=0.01)
    assert round(before.states) == 4 + 4 + 8
    assert round(mixed.states) == 2 + 4 + 4 + 8  # its gradients are in 32 bits when the optimizer needs them


def test_everything_in_float16_is_not_a_number_after_one_step() -> None:
    losses = train_by(RECIPES["everything in float16"], workers=2, steps=3).losses
    assert len(losses) == 2
    assert math.isnan(losses[-1])


def test_small_addends_are_lost_in_a_sum_of_16_bits() -> None:
    errors = [added_up(torch.bfloat16, micro_batches) for micro_batches in (1, 8, 64)]
    assert errors[0] == 0
    assert errors[0] < errors[1] < errors[2]
    assert added_up(torch.float32) < 64 * torch.finfo(torch.float32).eps


def test_the_sum_of_micro_batches_is_the_gradient_of_the_minibatch_however_often_it_travels() -> None:
    (each, first), (once, second), _ = (way.run() for way in WAYS.values())
    model = TinyGPT(SMALL)
    inputs, targets = data.examples([(10 + sample % 90, 99 - sample % 90) for sample in range(128)])
    data.answer_loss(model(inputs), targets).backward()
    whole = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    tolerance = 128 * torch.finfo(torch.float32).eps * whole.abs().max().item()  # one rounding for each sample
    torch.testing.assert_close(first, whole, rtol=0, atol=tolerance)
    torch.testing.assert_close(second, whole, rtol=0, atol=tolerance)
    assert each.bytes_sent(0) == 8 * once.bytes_sent(0)
