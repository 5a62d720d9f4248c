"""The simulator against real processes: a paced run of the pipeline takes as long as simulated, within 3%."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, randn, zeros

from course_lib import Pace, Timeline, launch
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import simulate
from course_lib.schedules import SCHEDULES

FORWARD, BACKWARD, WEIGHT_GRAD = 0.03, 0.045, 0.02
WHOLE = Pace(device={"forward": FORWARD, "backward": BACKWARD})
SPLIT = Pace(device={"forward": FORWARD, "backward": BACKWARD, "weight_grad": WEIGHT_GRAD})


def step(rank: int, name: str, n_stages: int, micro_batches: int) -> None:
    from course_lib.mechanisms import pipeline, schedules

    config = GPTConfig(layers=n_stages, hidden=8, heads=2)
    stages = list(TinyGPT(config).blocks[1:-1])
    inputs, targets = randn(micro_batches, 4, config.hidden), zeros(micro_batches, 4, config.hidden)
    pipeline.run_schedule(schedules.SCHEDULES[name](n_stages, micro_batches), stages, inputs, targets, loss)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets)


def computing(timeline: Timeline) -> float:
    """Seconds from the first computation of any rank to the last."""
    spans = [span for span in timeline.spans if span.kind in ("forward", "backward", "weight_grad")]
    return max(span.end for span in spans) - min(span.start for span in spans)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "ranks", "stages", "pace", "weight_grad"),
    [
        ("gpipe", 4, 4, WHOLE, 0.0),
        ("1f1b", 4, 4, WHOLE, 0.0),
        ("interleaved_1f1b", 4, 8, WHOLE, 0.0),
        ("zb_h1", 4, 4, SPLIT, WEIGHT_GRAD),
    ],
)
def test_a_paced_run_takes_as_long_as_simulated(
    name: str, ranks: int, stages: int, pace: Pace, weight_grad: float
) -> None:
    pytest.importorskip("course_lib.mechanisms.pipeline")
    expected = simulate(SCHEDULES[name](stages, 8), FORWARD, BACKWARD, weight_grad).makespan
    # The machine can only make a run longer, so the shortest of a few is what the schedule took.
    measured = min(computing(launch(step, ranks, (name, stages, 8), pace=pace).timeline) for _ in range(3))
    assert measured == pytest.approx(expected, rel=0.03)
