"""The simulator against real processes: a paced run of the pipeline takes as long as simulated, within 3%."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, randn, zeros

from course_lib import Pace, Timeline, launch
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import simulate
from course_lib.schedules import SCHEDULES

FORWARD, BACKWARD, WEIGHT_GRAD = 0.06, 0.09, 0.06
PACE = Pace(device={"forward": FORWARD, "backward": BACKWARD, "weight_grad": WEIGHT_GRAD})
RANKS = 4


def step(rank: int, name: str, n_stages: int, micro_batches: int) -> None:
    from course_lib.mechanisms import pipeline, schedules

    config = GPTConfig(layers=n_stages, hidden=8, heads=2)
    stages = list(TinyGPT(config).blocks)[1:-1]
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
    ("name", "stages", "micro_batches"),
    [
        ("gpipe", 4, 4),
        ("1f1b", 4, 4),
        ("interleaved_1f1b", 8, 4),
        ("zb_h1", 4, 4),
        ("zb_h2", 4, 7),
        ("zbv", 8, 8),
        ("dualpipev", 8, 8),
    ],
)
def test_a_paced_run_takes_as_long_as_simulated(name: str, stages: int, micro_batches: int) -> None:
    expected = simulate(SCHEDULES[name](stages, micro_batches), FORWARD, BACKWARD, WEIGHT_GRAD).makespan
    measured = float("inf")
    for _ in range(8):  # whatever else the machine does can only make a run longer
        timeline = launch(step, RANKS, (name, stages, micro_batches), pace=PACE).timeline
        measured = min(measured, computing(timeline))
        if measured < 1.02 * expected:
            break
    assert measured == pytest.approx(expected, rel=0.03)
