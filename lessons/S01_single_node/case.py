"""S1. A model of 30 billion parameters on a single node of eight GPUs: choose a plan, and defend it."""

from __future__ import annotations

from dataclasses import replace

from course_lib.classroom.scenarios.plans import Planning
from course_lib.classroom.scenarios.targets import Change, PlanTask
from course_lib.planner import Cluster, ModelSpec

# Zhang et al. 2022, "OPT", table 1; Black et al. 2022, "GPT-NeoX-20B".
OPT_30B = ModelSpec(48, 7168, 56, sequence=2048, vocab=50272, flash_attention=True)
OPT_13B = replace(OPT_30B, layers=40, hidden=5120, heads=40)
NEOX_20B = ModelSpec(44, 6144, 64, sequence=2048, vocab=50432, tied_embeddings=False, flash_attention=True)

CHANGES: dict[str, Change] = {
    "again": "recompute=full",
    "optimizer": "zero=1",
    "memory": ("", Cluster("B200-180GB")),
    "matrices": "dp=1 tp=8",
}
TURNS = {
    "matrices among all eight": "dp=1 tp=8",
    "everything sharded": "zero=3",
    "everything sharded, all computed again": "zero=3 recompute=full",
    "a stage for each device": "dp=1 pp=8",
    "a stage for each device, all recomputed": "dp=1 pp=8 recompute=full",
}


def _tasks(words: str, model: ModelSpec, node: Cluster, tokens: int, more: int) -> tuple[PlanTask, PlanTask]:
    first = PlanTask(words, model, node, 256, "dp=8", tokens, changes=CHANGES)
    return first, replace(first, tokens=more, waiting={node.inside_link.name: 0.1}, turns=TURNS)


CASE = Planning(
    "S1",
    (
        _tasks("a model of 30 billion parameters", OPT_30B, Cluster("A100-80GB"), 5_000, 6_200),
        _tasks("a model of 20 billion parameters", NEOX_20B, Cluster("A100-80GB", inside="PCIe 4"), 3_500, 9_700),
        _tasks("a model of 30 billion parameters", OPT_30B, Cluster("H100-80GB"), 11_000, 16_000),
        _tasks("a model of 13 billion parameters", OPT_13B, Cluster("A100-40GB"), 9_000, 12_700),
    ),
)
QUESTIONS = CASE.questions()
