"""How much each sample counts in gradients, read from what stages have computed: weights set by hand come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import changed
from lessons.L04_layerwise_model_parallelism.checks import sample_by_sample
from lessons.L05_pipeline_parallelism.checks import in_halves, listed, ran
from tests.lessons.parts import checks

ONE_BY_ONE, SHARE = "size = None, 1", " * (len(b) / len(targets))"


def in_pieces(size: int, counts: str) -> Callable[..., Any]:
    """A step in pieces of some size, each of which counts as said."""
    return changed(sample_by_sample, "in_pieces", ONE_BY_ONE, f"size = None, {size}", SHARE, counts)


def first_five(stage: Any, inputs: Any, targets: Any, loss_fn: Callable, width: int) -> None:
    in_halves(stage, inputs[:5], targets[:5], loss_fn, width)


def as_many(stage: Any, inputs: Any, targets: Any, loss_fn: Callable, width: int) -> None:
    """Two micro-batches, in which the smaller one's mean counts as much as the other's."""
    sizes = [len(inputs) // 2, len(inputs) - len(inputs) // 2]
    actions = listed("gpipe", dist.get_rank(), dist.get_world_size(), 2)

    def alike(y: Any, target: Any) -> Any:
        return loss_fn(y, target) * len(inputs) / (2 * len(target))

    ran(actions, stage, [*inputs.split(sizes)], [*targets.split(sizes)], alike, width)


@pytest.mark.parametrize(
    ("exercise", "program", "counts"),
    [
        (checks.lighter_step, in_pieces(2, " / len(inputs.split(size))"), "samples 0 to 1: 0.25, sample 2: 0.5"),
        (checks.lighter_step, in_pieces(2, ""), "samples 0 to 1: 0.5, sample 2: 1"),
        (
            checks.lighter_step,
            in_pieces(4, ""),
            "samples 0 to 3: 0.25, sample 4: 1. In a mean over all 5, each counts 0.2",
        ),
        (checks.faster_pipeline, as_many, "samples 0 to 2: 0.167, samples 3 to 6: 0.125"),
        (checks.faster_pipeline, first_five, "samples 0 to 4: 0.2, samples 5 to 6: 0"),
    ],
)
def test_the_weights_of_samples_are_told(exercise: Exercise, program: Callable, counts: str) -> None:
    assert counts in exercise(program).message


def test_gradients_that_are_no_sum_over_samples_are_not_told_so() -> None:
    shuffled = changed(in_halves, "shuffled", "targets.split", "targets.flip(0).split")
    alike = changed(in_halves, "alike", "loss_fn, width)", "lambda a, b: 3 * loss_fn(a, b), width)")
    for program in (shuffled, alike):
        assert "each sample counts" not in checks.faster_pipeline(program).message
