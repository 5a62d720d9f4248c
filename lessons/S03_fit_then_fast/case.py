"""S3. A model of 70 billion parameters on eight GPUs: make it fit, then make it fast."""

from __future__ import annotations

from dataclasses import replace

from course_lib.classroom.scenarios.plans import Planning
from course_lib.classroom.scenarios.targets import Change, PlanTask
from course_lib.planner import Cluster, ModelSpec
from course_lib.planner.models import LLAMA3

LLAMA_70B = replace(LLAMA3["70B"], sequence=4096)
# Zhang et al. 2022, "OPT", table 1; Touvron et al. 2023, "LLaMA", table 2: the 65B model.
OPT_66B = ModelSpec(64, 9216, 72, sequence=2048, vocab=50272, flash_attention=True)
LLAMA_65B = replace(LLAMA_70B, kv_heads=64, ffn_hidden=22016, sequence=2048, vocab=32000)

SMALLEST = "tp=8 pp=1 sequence_parallel=true recompute=full"
CHANGES: dict[str, Change] = {
    "h100": (SMALLEST, Cluster("H100-80GB")),
    "h200": (SMALLEST, Cluster("H200-141GB")),
    "eight_bits": (f"{SMALLEST} precision=fp8", Cluster("H200-141GB")),
    "b200": (SMALLEST, Cluster("B200-180GB")),
}
TURNS = {
    "what fits best": SMALLEST,
    "everything sharded, all computed again": "dp=8 pp=1 zero=3 recompute=full",
    "a stage for each device, all recomputed": "recompute=full",
    "four stages of two": "tp=2 pp=4 sequence_parallel=true recompute=selective",
    "two stages of four": "tp=4 pp=2 sequence_parallel=true recompute=selective",
}


def _tasks(words: str, model: ModelSpec, batch: int, tokens: int, more: int) -> tuple[PlanTask, PlanTask]:
    first = PlanTask(words, model, Cluster("B200-180GB"), batch, "pp=8", tokens, within=0.95, changes=CHANGES)
    return first, replace(first, tokens=more, within=1.0, bubble=0.02, turns=TURNS)


CASE = Planning(
    "S3",
    (
        _tasks("a model of 70 billion parameters", LLAMA_70B, 32, 7_000, 10_900),
        _tasks("a model of 65 billion parameters", LLAMA_65B, 64, 6_000, 12_000),
        _tasks("a model of 66 billion parameters", OPT_66B, 64, 6_500, 12_100),
    ),
)
QUESTIONS = CASE.questions()
