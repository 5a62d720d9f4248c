"""S3. A large model on a single node: find the node, make it fit, then make it fast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from course_lib.classroom.scenarios.plans import Planning
from course_lib.classroom.scenarios.targets import PlanTask
from course_lib.planner import Cluster, ModelSpec
from course_lib.planner.models import LLAMA3
from course_lib.planner.search import ALIKE

LLAMA_70B = replace(LLAMA3["70B"], sequence=8192)
# Brown et al. 2020, table 2.1: 6.7 billion; Narayanan et al. 2021, table 1: 39.1 billion.
GPT_7B = ModelSpec(32, 4096, 32, sequence=2048, vocab=50272, flash_attention=True)
GPT_39B = replace(GPT_7B, layers=48, hidden=8192, heads=64, vocab=51200)
# Wu et al. 2023, "BloombergGPT", table 4, with longer sequences.
BLOOMBERG_50B = replace(GPT_7B, layers=70, hidden=7680, heads=40, sequence=4096, vocab=131072)
# Zhang et al. 2022, "OPT", table 1.
OPT_30B = replace(GPT_7B, layers=48, hidden=7168, heads=56, sequence=16384)
OPT_66B = replace(GPT_7B, layers=64, hidden=9216, heads=72, sequence=4096)
DEVICES = {"a100": "A100-40GB", "h100": "H100-80GB", "h200": "H200-141GB", "b200": "B200-180GB"}
BUBBLE = "Hardly any time may be lost in a bubble."
LINK = "The next node may have slower links, so hardly any of a step may be spent waiting for them."


def _tasks(model: ModelSpec, node: str, batch: int, goal: str, n: int = 8, **limits: Any) -> tuple[PlanTask, PlanTask]:
    smallest = f"dp=1 tp={n} sequence_parallel=true recompute=full"
    turns = {
        "what needs the least": smallest,
        "everything sharded, all computed again": "zero=3 recompute=full",
        "a stage for each device, all recomputed": f"dp=1 pp={n} recompute=full",
        "stages of two": f"dp=1 tp=2 pp={n // 2} sequence_parallel=true recompute=selective",
        "two stages": f"dp=1 tp={n // 2} pp=2 sequence_parallel=true recompute=selective",
    }
    first = PlanTask(
        f"a model of {model.parameters / 1e9:.1f} billion parameters, with sequences of {model.sequence:,} tokens",
        model,
        Cluster(DEVICES[node], devices_per_node=n),
        batch,
        f"dp={n}",
        share=0.8,
        within=0.95,
        changes={one: (smallest, Cluster(device, devices_per_node=n)) for one, device in DEVICES.items()},
        shown=Cluster("B200-180GB", devices_per_node=n),
    )
    return first, replace(first, share=1 / ALIKE, within=1.0, goal=goal, turns=turns, **limits)


CASE = Planning(
    "S3",
    (
        _tasks(LLAMA_70B, "b200", 64, LINK, waiting={"NVLink 5": 0.1}),
        _tasks(GPT_39B, "h200", 64, LINK, waiting={"NVLink 4": 0.1}),
        _tasks(GPT_7B, "a100", 16, BUBBLE, n=4, bubble=0.02),
        _tasks(OPT_30B, "h100", 64, BUBBLE, bubble=0.04),
        _tasks(BLOOMBERG_50B, "h200", 32, BUBBLE, bubble=0.02),
        _tasks(OPT_66B, "b200", 16, "It should be as fast as the node can be."),
    ),
)
QUESTIONS = CASE.questions()
