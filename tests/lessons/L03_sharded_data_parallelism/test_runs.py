"""Steps with ZeRO, against the formulas of the papers and one process."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from course_lib import Link, Pace
from course_lib.model import TinyGPT
from course_lib.timeline import Timeline
from lessons.L03_sharded_data_parallelism.runs import FOUR_LAYERS, STAGES, compute_again, sharded_step

SIZES = [parameter.numel() for parameter in TinyGPT(FOUR_LAYERS).parameters()]
PARAMETERS = sum(SIZES)
# Parameters, gradients and optimizer state: numbers of 4 bytes for each parameter, on each of n ranks.
HELD = {0: lambda n: (1, 1, 2), 1: lambda n: (1, 1 + 1 / n, 2 / n), 2: lambda n: (1, 1 / n, 2 / n)}
HELD[3] = lambda n: (1 / n, 1 / n, 2 / n)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_holds_what_the_table_says(stage: int, n: int) -> None:
    for held in sharded_step(stage, n).held:
        parts = (held.parameters, held.gradients, held.optimizer)
        counts_of_steps = 4 * (len(SIZES) + 2 * n)  # AdamW's step count of each piece; a few paddings
        for found, expected in zip(parts, HELD[stage](n), strict=True):
            assert 0 <= found - 4 * PARAMETERS * expected <= counts_of_steps


def pace(bandwidth: float = 80e6) -> Pace:
    return Pace({"forward": 0.08, "backward": 0.16, "optimizer": 0.0}, Link(0.0002, bandwidth))


def test_without_prefetch_the_same_is_sent_and_all_of_it_is_waited_for() -> None:
    ahead, waiting = (sharded_step(3, 4, pace=pace(), prefetch=prefetch) for prefetch in (True, False))
    assert torch.equal(ahead.weights, waiting.weights)
    assert ahead.timeline.bytes_sent(0) == waiting.timeline.bytes_sent(0)
    assert ahead.timeline.busy(0) == pytest.approx(waiting.timeline.busy(0))
    gathers = sum(span.duration for span in waiting.timeline.of(0) if span.name == "all_gather")
    assert waiting.timeline.transferring(0) >= gathers
    assert ahead.timeline.transferring(0) < gathers / 2


def test_recomputing_costs_a_forward_pass_and_changes_no_number() -> None:
    kept, again = (sharded_step(3, 4, pace=pace(), recompute=recompute) for recompute in (False, True))
    assert torch.equal(kept.weights, again.weights)
    assert again.timeline.busy(0) - kept.timeline.busy(0) == pytest.approx(0.08 / 4)
    assert again.timeline.bytes_sent(0) == kept.timeline.bytes_sent(0)
    samples, inputs = 32 // 4, 4 * FOUR_LAYERS.sequence * FOUR_LAYERS.hidden
    # The inputs of four layers, and everything that the recomputed layer saves: 16 times as much, and the statistics
    # of its norms and scores; its own input is there already.
    one_layer = samples * (16 * inputs + 4 * FOUR_LAYERS.sequence * (4 + FOUR_LAYERS.heads))
    assert again.activations[0] == pytest.approx(4 * samples * inputs + one_layer, rel=0.05)


def test_a_layer_that_computes_again_keeps_its_input_alone() -> None:
    model = TinyGPT(FOUR_LAYERS)
    compute_again(model)
    saved: list[int] = []
    hidden = model.blocks[0](torch.zeros(2, 8, dtype=torch.int64))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.blocks[1](hidden)
    assert saved == [hidden.numel()]


def test_a_step_is_the_last_one_alone() -> None:
    """The measured step includes neither earlier steps nor the gathering of the weights."""
    timeline: Timeline = sharded_step(3, 2, steps=3).timeline
    assert Fraction(timeline.bytes_sent(0), 4 * PARAMETERS) < Fraction(16, 10)
