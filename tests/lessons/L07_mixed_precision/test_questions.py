"""The changes of Q9, and the numbers kept in 32 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from course_lib.classroom import questions
from course_lib.mechanisms.mixed_precision import MasterWeights
from lessons.L07_mixed_precision import questions as precision
from lessons.L07_mixed_precision.questions import TrainingSetup
from lessons.L07_mixed_precision.runs import RoundedWeights


@pytest.mark.parametrize("change", [change for _, change in precision.REMEDIES.values()])
def test_each_answer_changes_one_thing(change: dict[str, Any]) -> None:
    (name,) = change
    assert getattr(TrainingSetup(), name) != change[name]


@pytest.mark.parametrize(
    ("answer", "right", "why"),
    [
        ("20 bytes", True, "its own master"),
        ("16 bytes", False, "one gradient of 16 bits"),
        ("18 bytes", False, "is still there"),
        ("12 bytes", False, "2 for the weight"),
    ],
)
def test_bytes_for_each_weight_are_counted_and_slips_recognized(answer: str, right: bool, why: str) -> None:
    form: Any = questions.load("bytes_per_weight").form
    outcome = form.run(form.read(answer))
    assert outcome.right == right
    assert "weights 2, gradients 2, their sums 4, AdamW 8, master weights 4; together 20." in outcome.happened
    assert why in outcome.why


@pytest.mark.parametrize(
    ("dtype", "keeps", "expected"),
    [
        (torch.float32, RoundedWeights, [4, 4, 0, 8, 0]),
        (torch.float16, RoundedWeights, [2, 2, 0, 4, 0]),
        (torch.float16, MasterWeights, [2, 2, 4, 8, 4]),
    ],
)
def test_what_a_training_holds_is_what_it_keeps_in_its_dtype(dtype: Any, keeps: Any, expected: list[int]) -> None:
    assert list(precision.bytes_per_weight(dtype, keeps).values()) == expected
