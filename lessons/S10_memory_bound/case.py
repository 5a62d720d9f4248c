"""S10. A memory-bound run: hybrid parallelism and mixed precision."""

from __future__ import annotations

from dataclasses import replace

from course_lib.classroom.scenarios.plans import Planning
from course_lib.classroom.scenarios.targets import Change, PlanTask
from course_lib.planner import Cluster, ModelSpec

# Brown et al. 2020, table 2.1; Black et al. 2022, "GPT-NeoX-20B"; Narayanan et al. 2021, table 1: 18.4 billion.
GPT_3B = ModelSpec(32, 2560, 32, sequence=4096, vocab=50272, flash_attention=True)
GPT_7B, GPT_13B = replace(GPT_3B, hidden=4096), replace(GPT_3B, layers=40, hidden=5120, heads=40)
GPT_18B = replace(GPT_3B, layers=40, hidden=6144, heads=48, vocab=51200)
NEOX_20B = replace(GPT_3B, layers=44, hidden=6144, heads=64, vocab=50432, tied_embeddings=False)
TF32_FASTER = 8  # 156 TFLOP/s against 19.5 (A100 data sheet)

TURNS = {
    "only in 16 bits": "precision=fp16",
    "in 32 bits, all computed again": "recompute=full",
    "in 16 bits, all computed again": "precision=fp16 recompute=full",
    "in 16 bits, state shared out": "precision=fp16 zero=1 recompute=selective",
}


def _tasks(
    model: ModelSpec, sequence: int, a100: Cluster, batch: int, now: str, nodes: int
) -> tuple[PlanTask, PlanTask]:
    model = replace(model, sequence=sequence)
    words = f"a model of {model.parameters / 1e9:.1f} billion parameters, with sequences of {sequence:,} tokens"
    v100 = Cluster("V100-32GB", nodes, between="InfiniBand EDR", nics_per_node=4)
    changes: dict[str, Change] = {
        "bits": "precision=bf16",
        "tensor_floats": ("", replace(a100, matmul=TF32_FASTER * a100.spec.matmul)),
        "everything": "zero=3",
        "again": "recompute=full",
    }
    first = PlanTask(words, model, a100, batch, f"{now} precision=fp32", within=0.9, changes=changes)
    then = replace(first, cluster=v100, now=f"dp={nodes} tp=8 precision=fp32", within=0.95)
    return first, replace(then, waiting={"InfiniBand EDR": 0.05}, turns=TURNS)


CASE = Planning(
    "S10",
    (
        _tasks(GPT_13B, 4096, Cluster("A100-40GB", 8), 64, "dp=4 tp=8 pp=2 micro_batch=2", 8),
        _tasks(GPT_18B, 4096, Cluster("A100-80GB", 2), 128, "dp=4 tp=4", 4),
        _tasks(GPT_3B, 16384, Cluster("A100-40GB", 8), 128, "dp=8 tp=4 pp=2", 4),
        _tasks(NEOX_20B, 16384, Cluster("A100-80GB", 2), 64, "dp=2 tp=4 pp=2", 2),
        _tasks(GPT_3B, 4096, Cluster("A100-40GB", 2, 4), 128, "dp=8", 2),
        _tasks(GPT_7B, 32768, Cluster("A100-80GB", 4), 64, "dp=2 tp=8 pp=2", 2),
    ),
)
QUESTIONS = CASE.questions()
