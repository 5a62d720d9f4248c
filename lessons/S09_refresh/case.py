"""S9. New hardware with the old plan: choose again."""

from __future__ import annotations

from dataclasses import replace

from course_lib.classroom.questions import plan_text
from course_lib.classroom.scenarios.plans import Planning
from course_lib.classroom.scenarios.targets import Change, PlanTask
from course_lib.planner import Cluster, ModelSpec

# Brown et al. 2020, table 2.1; Black et al. 2022, "GPT-NeoX-20B"; Narayanan et al. 2021, table 1: 18.4 billion.
GPT_7B = ModelSpec(32, 4096, 32, sequence=2048, vocab=50272, flash_attention=True)
GPT_13B = replace(GPT_7B, layers=40, hidden=5120, heads=40)
NEOX_20B = replace(GPT_7B, layers=44, hidden=6144, heads=64, vocab=50432, tied_embeddings=False)
GPT_18B = replace(GPT_7B, layers=40, hidden=6144, heads=48, vocab=51200)
V100 = Cluster("V100-32GB", 16, between="InfiniBand EDR", nics_per_node=4)
SLOWER = {"InfiniBand NDR": "Ethernet 100", "InfiniBand HDR": "Ethernet 25", "Ethernet 25": "Ethernet 10"}


def _tasks(model: ModelSpec, new: Cluster, batch: int, now: str) -> tuple[PlanTask, PlanTask]:
    """The plan on the new devices, `now`, has the old one's groups and fewer replicas."""
    now = f"{now} precision=fp16"
    plan, slow = plan_text.parse(now), replace(new, between=SLOWER[new.between])
    changes: dict[str, Change] = {
        "again": "recompute=none",
        "network": ("", replace(new, nics_per_node=2 * new.devices_per_node)),
        "stages": f"dp={2 * plan.dp} pp={plan.pp // 2}" if plan.pp > 1 else "",
        "tensor": f"dp={2 * plan.dp} tp={plan.tp // 2}",
    }
    turns = {
        "the old plan": "",
        "the old plan in bf16, nothing computed again": "recompute=none precision=bf16",
        "half as many tensor ranks": f"dp={2 * plan.dp} tp={plan.tp // 2}",
        "replicas alone, everything sharded": f"dp={new.devices} tp=1 pp=1 micro_batch=1 zero=3 recompute=selective",
        "what fits a slow network": f"dp={new.devices // 8} tp=2 pp=4 micro_batch=1 zero=1 recompute=selective",
    }
    words = f"a model of {model.parameters / 1e9:.0f} billion parameters"
    old = f"dp={V100.devices // (plan.tp * plan.pp)}", V100
    first = PlanTask(words, model, new, batch, now, changes=changes, old=old)
    return first, replace(first, cluster=slow, waiting={slow.between: 0.2}, turns=turns)


def _nodes(device: str, nodes: int, between: str, each: int = 8, inside: str | None = None) -> Cluster:
    return Cluster(device, nodes, each, inside, between)


AGAIN = "micro_batch=4 zero=1 recompute=full"
CASE = Planning(
    "S9",
    (
        _tasks(GPT_13B, _nodes("H100-80GB", 4, "InfiniBand NDR"), 256, f"dp=2 tp=4 pp=4 {AGAIN}"),
        _tasks(GPT_18B, _nodes("H100-80GB", 4, "Ethernet 25", 4), 256, "dp=4 tp=4 micro_batch=4 zero=3 recompute=full"),
        _tasks(NEOX_20B, _nodes("H100-80GB", 8, "InfiniBand HDR", 4, "PCIe 5"), 64, "tp=4 pp=8 micro_batch=4 zero=1"),
        _tasks(GPT_13B, _nodes("A100-80GB", 16, "InfiniBand HDR", 4), 64, "dp=8 tp=2 pp=4 micro_batch=4 zero=1"),
        _tasks(GPT_7B, _nodes("H200-141GB", 2, "Ethernet 25"), 512, "tp=8 pp=2 zero=1 recompute=full"),
        _tasks(NEOX_20B, _nodes("A100-80GB", 8, "Ethernet 25"), 512, f"dp=4 tp=2 pp=8 {AGAIN}"),
    ),
)
QUESTIONS = CASE.questions()
