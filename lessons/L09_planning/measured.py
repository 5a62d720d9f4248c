"""Training steps of GPTs that were measured on A100s, with full recomputation; measured_steps.json has the sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from course_lib.planner import ModelSpec, Plan


class Step(NamedTuple):
    """A measured step: the model's name and shape, the plan, samples, bytes per second to other nodes, seconds."""

    name: str
    model: ModelSpec
    plan: Plan
    samples: int
    network: float
    seconds: float


def _measured(row: list) -> Step:
    name, layers, hidden, heads, dp, tp, pp, virtual, micro_batch, *rest = row
    order = "interleaved_1f1b" if virtual > 1 else "1f1b"
    plan = Plan(dp, tp, pp, micro_batch, order, virtual, recompute="full", precision="fp16")
    return Step(name, ModelSpec(layers, hidden, heads, 2048, 51_200), plan, *rest)


_TABLES = json.loads(Path(__file__).with_name("measured_steps.json").read_text(encoding="utf-8"))
SEEN, UNSEEN = (tuple(map(_measured, _TABLES[kind])) for kind in ("seen", "unseen"))
