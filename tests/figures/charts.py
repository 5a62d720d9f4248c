"""Every chart of the course once, for tests of properties that all have."""

from __future__ import annotations

import math

import torch

from course_lib.figures import (
    Timing,
    loss_curves,
    lost_time,
    memory_by_part,
    plan_map,
    speed_up,
    step_time_by_part,
)
from course_lib.planner import Cluster, ModelSpec, Plan, estimate, search, simulate
from course_lib.schedules import SCHEDULES
from lessons.L01_one_machine_is_not_enough.figure import limits
from lessons.L05_pipeline_parallelism.figure import SizedStep, micro_batch_sizes
from lessons.L05_pipeline_parallelism.in_flight import in_flight
from lessons.L07_mixed_precision.figure import number_range
from lessons.L07_mixed_precision.runs import Format
from lessons.L09_planning.figure import roofline
from tests.figures.synthetic import spent

GPT = ModelSpec(layers=24, hidden=2048, heads=16, sequence=2048, vocab=51200, flash_attention=True)
NODES = Cluster("A100-80GB", nodes=2)
PLANS = {
    "wide": estimate(GPT, NODES, Plan(dp=16, zero=1), 64),
    "deep": estimate(GPT, NODES, Plan(dp=2, tp=2, pp=4), 64),
}
FOUND = search(GPT, Cluster("A100-80GB", 1), 64)
STEPS = [SizedStep(1, 0.1, 0.2, 0.02, 4, measured=0.325), SizedStep(2, 0.1, 0.1, 0.05, 8, fits=False)]
CHARTS = {
    "speed_up": speed_up([Timing(n, 1 / n, label=label) for n in (1, 2, 4) for label in ("a < b", "c")]),
    "lost_time": lost_time({"4 ranks": spent(60, 25, 10, 5)}),
    "memory": memory_by_part({name: one.memory for name, one in PLANS.items()}, 80e9),
    "time": step_time_by_part(PLANS),
    "plan_map": plan_map(FOUND),
    "roofline": roofline(PLANS),
    "limits": limits(PLANS, dict.fromkeys(PLANS, 2e10), chosen="wide"),
    "loss_curves": loss_curves({"float32": [3.0, 2.5, 2.0], "float16": [3.0, math.nan]}),
    "number_range": number_range({-30: 0.2, 0: 0.5, 16: 0.3}, Format.of(torch.float16)),
    "in_flight": in_flight(simulate(SCHEDULES["1f1b"](4, 8), 0.01, 0.02)),
    "micro_batch_sizes": micro_batch_sizes(STEPS, chosen=2),
}
ZOOMABLE = ("speed_up", "plan_map", "roofline", "limits", "loss_curves")  # without bars and areas
