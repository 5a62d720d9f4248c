"""S1. A model on a single node, started in the way that has always worked: choose a plan, and defend it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from course_lib.classroom.scenarios.plans import Planning
from course_lib.classroom.scenarios.targets import PlanTask
from course_lib.planner import Cluster, ModelSpec

# Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1: 1.3, 2.7 and 6.7 billion parameters.
GPT_1B = ModelSpec(24, 2048, 16, sequence=2048, vocab=50272, flash_attention=True)
GPT_3B, GPT_7B = replace(GPT_1B, layers=32, hidden=2560, heads=32), replace(GPT_1B, layers=32, hidden=4096, heads=32)
# Narayanan et al. 2021, table 1: 39.1 billion parameters.
GPT_39B = replace(GPT_1B, layers=48, hidden=8192, heads=64, vocab=51200)

LINK = "In summer the node may get slower links, so the plan should not spend much of a step waiting for them."
MEMORY = "A teacher model will lie in the same memory later, so the plan may need only a part of it."


def _tasks(
    model: ModelSpec, node: Cluster, batch: int, micro_batch: int, goal: str, **limits: Any
) -> tuple[PlanTask, PlanTask]:
    n, precision = node.devices, "bf16" if "bf16" in node.spec.peak else "fp16"
    words = f"a model of {model.parameters / 1e9:.1f} billion parameters, with sequences of {model.sequence:,} tokens"
    now = f"dp={n} micro_batch={micro_batch} precision={precision}"
    changes = {
        "again": "recompute=full",
        "optimizer": "zero=1",
        "samples": f"micro_batch={max(1, micro_batch // 8)}",
        "matrices": f"dp=1 tp={n}",
    }
    turns = {
        "matrices among all devices": f"dp=1 tp={n}",
        "everything sharded": "micro_batch=1 zero=3",
        "everything sharded, all computed again": "micro_batch=1 zero=3 recompute=full",
        "a stage for each device": f"dp=1 pp={n} micro_batch=1",
        "replicas that share the optimizer's state": "micro_batch=1 zero=1 recompute=selective",
    }
    first = PlanTask(words, model, node, batch, now, changes=changes)
    return first, replace(first, goal=goal, turns=turns, **limits)


CASE = Planning(
    "S1",
    (
        _tasks(GPT_7B, Cluster("A100-80GB", inside="PCIe 4"), 32, 2, LINK, waiting={"PCIe 4": 0.1}),
        _tasks(GPT_39B, Cluster("B200-180GB"), 32, 4, MEMORY, within=0.6),
        _tasks(replace(GPT_1B, sequence=8192), Cluster("A100-40GB"), 32, 2, MEMORY, within=0.6),
        _tasks(GPT_1B, Cluster("V100-32GB", devices_per_node=16), 256, 8, MEMORY, within=0.6),
        _tasks(GPT_3B, Cluster("A100-40GB", devices_per_node=4), 32, 1, MEMORY, within=0.6),
        _tasks(replace(GPT_1B, sequence=8192), Cluster("RTX-4090", devices_per_node=4), 256, 1, MEMORY, within=0.75),
    ),
)
QUESTIONS = CASE.questions()
