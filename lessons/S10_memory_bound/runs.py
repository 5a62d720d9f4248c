"""A run in fp16 that overflows."""

from __future__ import annotations

from itertools import pairwise

import torch

from course_lib import data
from course_lib.classroom.questions.markup import bullets
from course_lib.classroom.questions.outcome import Feedback, Outcome
from course_lib.classroom.runs.training import SMALL, shares, train
from course_lib.mechanisms.mixed_precision import LossScaler, MasterWeights
from course_lib.model import TinyGPT
from course_lib.ranks import launch


def overflow(scale: float = 2.0**24, steps: int = 24) -> Feedback:
    """A small model trained in fp16 with a dynamic loss scale that is too large at first. Measured."""
    losses, scales = launch(_train, 1, (scale, steps)).results[0]
    what = ["overflow: no update, and half the scale" if now < was else "an update" for was, now in pairwise(scales)]
    lines = map("loss {:.2f}, scaled by {:,.0f}: {}".format, losses, scales, what)
    return Feedback("", Outcome(None, bullets(lines)), title="A small model in fp16, step by step (measured)")


def _train(rank: int, scale: float, steps: int) -> tuple[list[float], list[float]]:
    """The loss of each step, and the scales: of the first step, and after each."""
    torch.manual_seed(0)
    model, scaler, scales = TinyGPT(SMALL, dtype=torch.float16), LossScaler(scale, growth_interval=4), list[float]()
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, scaler, lr=3e-3)
    minibatches = shares(rank, 32, steps)
    losses = train(
        model, minibatches, data.answer_loss, optimizer, scaler, combine=lambda: scales.append(scaler.scale_factor)
    )
    return losses, [*scales, scaler.scale_factor]
