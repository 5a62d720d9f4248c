"""S10. A memory-bound run: hybrid parallelism and mixed precision."""

from __future__ import annotations

from dataclasses import replace

from course_lib.classroom.scenarios.plans import Planning
from course_lib.classroom.scenarios.targets import Change, PlanTask
from course_lib.planner import Cluster, ModelSpec

# Zhang et al. 2022, "OPT", table 1, with longer sequences; Narayanan et al. 2021, table 1: 18.4 billion.
LONG_13B = ModelSpec(40, 5120, 40, sequence=8192, vocab=50272, flash_attention=True)
LONG_18B = ModelSpec(40, 6144, 48, sequence=8192, vocab=51200, flash_attention=True)

CHANGES: dict[str, Change] = {
    "bits": "precision=bf16",
    "optimizer": "zero=1",
    "everything": "zero=3",
    "again": "recompute=full",
}
TURNS = {
    "only in 16 bits": "precision=fp16",
    "in 32 bits, all computed again": "recompute=full",
    "in 16 bits, all computed again": "precision=fp16 recompute=full",
    "everything sharded": "dp=32 tp=1 precision=fp16 zero=3 recompute=selective",
    "as on the A100": "dp=8 tp=4 pp=1 precision=fp16 zero=1 sequence_parallel=true recompute=selective",
}


def _tasks(words: str, model: ModelSpec, nodes: int, now: str, tokens: int, more: int) -> tuple[PlanTask, PlanTask]:
    a100 = Cluster("A100-40GB", nodes, between="InfiniBand HDR")
    v100 = Cluster("V100-32GB", 4, between="InfiniBand EDR", nics_per_node=4)
    first = PlanTask(words, model, a100, 128, now, tokens, within=0.9, changes=CHANGES)
    then = replace(first, cluster=v100, now="dp=4 tp=8 precision=fp32", tokens=more, within=0.95, turns=TURNS)
    return first, replace(then, waiting={"InfiniBand EDR": 0.05})


CASE = Planning(
    "S10",
    (
        _tasks("a model of 13 billion parameters", LONG_13B, 2, "dp=2 tp=8 precision=fp32", 20_000, 23_500),
        _tasks("a model of 18 billion parameters", LONG_18B, 4, "dp=2 tp=8 pp=2 precision=fp32", 28_000, 16_900),
    ),
)
QUESTIONS = CASE.questions()
