"""The runs behind the open cases about slow trainings."""

from __future__ import annotations

import pytest
import torch

from course_lib import data
from course_lib.classroom.runs.training import SMALL
from course_lib.model import TinyGPT
from lessons.L07_mixed_precision.questions import RECIPES, WAYS, added_up, train_by


def test_mixed_precision_halves_activations_and_messages_and_no_states() -> None:
    before, mixed = (train_by(RECIPES[name], workers=2, steps=3) for name in ("float32", "mixed"))
    assert mixed.activations < 0.55 * before.activations
    assert mixed.sent == pytest.approx(before.sent / 2, rel=0.01)
    assert round(before.states) == 4 + 4 + 8
    assert round(mixed.states) == 2 + 4 + 4 + 8  # its gradients are in 32 bits when the optimizer needs them


def test_small_terms_are_lost_in_a_sum_of_16_bits() -> None:
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
