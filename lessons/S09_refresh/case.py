"""S9. New hardware with the old plan: choose again."""

from __future__ import annotations

from dataclasses import replace

from course_lib.classroom.scenarios.plans import Planning
from course_lib.classroom.scenarios.targets import Change, PlanTask
from course_lib.planner import Cluster, ModelSpec

# Narayanan et al. 2021, table 1: the models of 18.4 and 39.1 billion parameters.
GPT_18B = ModelSpec(40, 6144, 48, sequence=2048, vocab=51200, flash_attention=True)
GPT_39B = replace(GPT_18B, layers=48, hidden=8192, heads=64)
V100 = Cluster("V100-32GB", 16, between="InfiniBand EDR", nics_per_node=4)

TURNS = {
    "the old plan": "",
    "the old plan, nothing computed again": "recompute=none",
    "half as many tensor ranks": "dp=2 tp=4",
    "replicas alone, everything sharded": "dp=32 tp=1 pp=1 micro_batch=1 zero=3 recompute=selective",
    "what is best on a fast network": "dp=16 tp=1 pp=2 micro_batch=2 zero=1 recompute=selective",
}


def _tasks(
    words: str, model: ModelSpec, new: Cluster, tokens: int, more: int, now: str, old: str
) -> tuple[PlanTask, PlanTask]:
    changes: dict[str, Change] = {
        "network": ("", replace(new, nics_per_node=16)),
        "memory": ("", replace(new, device="H200-141GB")),
        "stages": "dp=2 pp=2",
        "again": "recompute=none",
    }
    first = PlanTask(words, model, new, 512, now, tokens, changes=changes, old=(old, V100))
    slow = replace(new, between="Ethernet 25")
    return first, replace(first, cluster=slow, tokens=more, waiting={"Ethernet 25": 0.2}, turns=TURNS)


NOW = "tp=8 pp=4 micro_batch=4 recompute=full precision=fp16"
H100 = Cluster("H100-80GB", 4, between="InfiniBand NDR")
CASE = Planning(
    "S9",
    (
        _tasks("a model of 18 billion parameters", GPT_18B, H100, 120_000, 98_000, NOW, "dp=4"),
        _tasks("a model of 39 billion parameters", GPT_39B, H100, 58_000, 51_000, NOW, "dp=4"),
    ),
)
QUESTIONS = CASE.questions()
