"""Published observations of memory: what was measured, what ran, and what ran out of it, each with its source.

BLOOM's figures are in benchmarks/published.json, with the step times that ran. Left out, with the reason:

    nanotron with tensor ranks   it keeps what sequence parallelism gathers, where a plan gathers it again
    nanotron, micro-batch 1      some runs with 1 are marked as out of memory, and run with 4
    torchtitan's 405B            it is not published into how many micro-batches a pipeline divides its local batch
    mixtures of experts, 4 bits  a plan has neither
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from benchmarks import _published as published
from course_lib.planner import ModelSpec, Plan
from course_lib.planner.hardware import GiB
from course_lib.planner.memory import Memory, memory_of_worst_device


class Observation(NamedTuple):
    """A published figure. kind: "allocated" or "reserved" by the allocator, "nvidia-smi", "ran" or "out of memory".

    n_bytes: measured, or what the device has.
    """

    source: str
    kind: str
    n_bytes: float
    model: ModelSpec
    plan: Plan
    micro_batches: int

    @property
    def memory(self) -> Memory:
        return memory_of_worst_device(self.model, self.plan, self.micro_batches)


llama: partial[ModelSpec] = partial(ModelSpec, gated_mlp=True, tied_embeddings=False, flash_attention=True)
llama3: partial[ModelSpec] = partial(llama, kv_heads=8, vocab=128256)
SHAPES = {"8B": (32, 4096, 32, 14336), "70B": (80, 8192, 64, 28672), "405B": (126, 16384, 128, 53248)}


def llama3_of(size: str, sequence: int = 8192, layers: int | None = None) -> ModelSpec:
    all_layers, hidden, heads, ffn = SHAPES[size]
    return llama3(layers or all_layers, hidden, heads, sequence, ffn_hidden=ffn)


# SimuMax, docs/b200/b200_release_v1.2_summary.md (1b8ca90): "real alloc GiB" of its dense rows, 8 B200.
# Model, layers, sequence, tp, cp, pp, dp, GiB
SIMUMAX = [
    ("70B", 12, 4096, 1, 1, 2, 4, 66.55),
    ("70B", 12, 4096, 2, 1, 1, 4, 60.68),
    ("70B", 12, 4096, 4, 1, 1, 2, 39.07),
    ("70B", 12, 4096, 8, 1, 1, 1, 28.29),
    ("405B", 4, 4096, 1, 1, 2, 4, 87.08),
    ("405B", 4, 4096, 2, 1, 1, 4, 81.59),
    ("405B", 4, 4096, 4, 1, 1, 2, 52.89),
    ("405B", 4, 4096, 8, 1, 1, 1, 38.57),
    ("70B", 12, 32768, 2, 4, 1, 1, 68.43),
    ("70B", 12, 32768, 1, 8, 1, 1, 104.51),
    ("405B", 4, 32768, 2, 4, 1, 1, 87.03),
    ("405B", 4, 32768, 1, 8, 1, 1, 139.22),
    ("70B", 12, 131072, 2, 4, 1, 1, 112.67),
    ("70B", 12, 131072, 1, 8, 1, 1, 147.99),
    ("405B", 4, 131072, 2, 4, 1, 1, 118.13),
]

# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (31a17bf), tables 1 to 4: GiB reserved, H100 with 96 GB.
# Its selective checkpointing saves every other product and attention: by bytes, every other layer is recomputed.
# Model, sequence, micro-batch, dp, tp, cp, recomputed, GiB
TORCHTITAN = [
    ("8B", 8192, 2, 8, 1, 1, 0.5, 82.4),
    ("8B", 8192, 2, 8, 1, 1, 0.5, 77.0),
    ("8B", 32768, 1, 8, 1, 1, 1.0, 83.9),
    ("8B", 65536, 1, 4, 1, 2, 1.0, 84.2),
    ("8B", 131072, 1, 2, 1, 4, 1.0, 84.0),
    ("8B", 262144, 1, 1, 1, 8, 1.0, 84.5),
    ("8B", 8192, 2, 128, 1, 1, 0.5, 67.0),
    ("8B", 8192, 2, 128, 1, 1, 0.5, 62.0),
    ("70B", 8192, 16, 32, 8, 1, 1.0, 71.9),
    ("70B", 8192, 16, 32, 8, 1, 1.0, 67.6),
]

# torchtitan, docs/performance.md (0413364), Llama 2 on 64 A100-80GB, 4,096 tokens: micro-batch, recompute, outcome
LLAMA2 = {
    "13B": llama(40, 5120, 40, 4096, 32000, ffn_hidden=13824),
    "70B": llama(80, 8192, 64, 4096, 32000, 8, ffn_hidden=28672),
}
TORCHTITAN_2 = [
    ("13B", 2, "none", 1.0, "ran"),
    ("70B", 1, "full", 0.5, "ran"),
    ("70B", 2, "full", 1.0, "ran"),
    ("70B", 2, "full", 0.5, "out of memory"),
]

# nanotron, huggingface.co/nanotron/old_bench (2024), 1B on H100-80GB: dp, pp, micro-batch, what happened
NANOTRON_1B = llama(24, 2048, 32, 4096, 50257, ffn_hidden=4096, tied_embeddings=True)
NANOTRON = [
    (2, 4, 4, "ran"),
    (1, 8, 4, "ran"),
    (64, 1, 2, "ran"),
    (2, 4, 16, "out of memory"),
    (2, 4, 128, "out of memory"),
    (1, 8, 16, "out of memory"),
    (1, 8, 128, "out of memory"),
]

# NVIDIA Megatron Bridge, performance summaries 25.09 to 26.02.01: the plans of all dense rows with 8 bits. All ran.
# Device, model, devices, batch, micro-batch, tp, pp, cp, virtual stages, FSDP
MEGATRON_BRIDGE = [
    ("H100", "405B", 1024, 512, 1, 8, 8, 2, 8, False),
    ("H100", "405B", 1024, 1536, 1, 8, 8, 2, 8, False),
    ("H100", "70B", 64, 128, 1, 4, 8, 1, 5, False),
    ("H100", "70B", 64, 256, 1, 4, 8, 1, 5, False),
    ("H100", "8B", 8, 128, 1, 1, 1, 1, 1, True),
    ("B200", "405B", 128, 64, 1, 4, 8, 2, 8, False),
    ("B200", "8B", 8, 128, 2, 1, 1, 1, 1, False),
    ("GB200", "405B", 128, 64, 1, 2, 1, 1, 1, True),
    ("GB200", "405B", 128, 64, 1, 4, 8, 2, 8, False),
    ("GB200", "405B", 256, 1536, 1, 4, 16, 1, 4, False),
    ("GB200", "405B", 256, 1536, 1, 4, 16, 1, 8, False),
    ("GB200", "70B", 64, 128, 2, 1, 1, 1, 1, True),
    ("GB200", "70B", 64, 128, 2, 2, 4, 1, 5, False),
    ("GB200", "70B", 64, 256, 1, 2, 4, 1, 5, False),
    ("GB200", "70B", 64, 256, 2, 1, 1, 1, 1, True),
    ("GB200", "8B", 8, 128, 2, 1, 1, 1, 1, False),
    ("GB300", "405B", 256, 1536, 1, 2, 8, 2, 4, False),
    ("GB300", "405B", 256, 1536, 1, 4, 8, 1, 4, False),
    ("GB300", "70B", 64, 256, 1, 1, 4, 1, 5, False),
    ("GB300", "70B", 64, 256, 2, 1, 1, 1, 1, True),
    ("GB300", "70B", 64, 256, 2, 1, 4, 1, 1, False),
    ("GB300", "8B", 8, 128, 2, 1, 1, 1, 1, False),
]
# The summaries do not say what is computed again or offloaded to the host. These cannot do without either: two samples
# of 70B or one of 405B keep 250 GiB of activations and more on a device that has all layers.
AGAIN = {
    ("GB200", "405B", 1, 1),
    ("GB200", "70B", 2, 1),
    ("GB200", "70B", 2, 4),
    ("GB300", "70B", 2, 1),
    ("GB300", "70B", 2, 4),
}
# GiB: NVIDIA's data sheets, whose GB are GiB: nvidia-smi shows 81,559 MiB of H100 and 183,359 MiB of B200.
GIB = {"H100": 80, "B200": 180, "GB200": 186, "GB300": 279}


def measured() -> list[Observation]:
    """Observations with a number of bytes."""
    return [*_simumax(), *_torchtitan(), *(one for one in _bloom() if one.kind == "nvidia-smi")]


def outcomes() -> list[Observation]:
    """Observations of what ran or ran out of memory."""
    return [*(one for one in _bloom() if one.kind != "nvidia-smi"), *_llama2(), *_nanotron(), *_bridge()]


def _simumax() -> Iterator[Observation]:
    for size, layers, sequence, tp, cp, pp, dp, gib in SIMUMAX:
        plan = Plan(dp, tp, pp, 1, zero=1, sequence_parallel=tp > 1, cp=cp, fp32_gradients=True)
        yield Observation("SimuMax", "allocated", gib * GiB, llama3_of(size, sequence, layers), plan, 4)


def _torchtitan() -> Iterator[Observation]:
    for size, sequence, micro_batch, dp, tp, cp, recomputed, gib in TORCHTITAN:
        plan = Plan(
            dp, tp, 1, micro_batch, "1f1b", 1, 3, tp > 1, "full", "bf16", cp, fp32_gradients=True, recomputed=recomputed
        )
        yield Observation("torchtitan", "reserved", gib * GiB, llama3_of(size, sequence), plan, 1)


def _bloom() -> Iterator[Observation]:
    for row in published.rows_of("memory", "out of memory"):
        if row["id"].startswith("bloom"):
            plan = published.plan_of(row)
            is_measured = row["quantity"] == "memory"
            kind, n_bytes = ("nvidia-smi", row["value"] * 1e9) if is_measured else ("out of memory", 80 * GiB)
            yield Observation(
                "BLOOM", kind, n_bytes, published.model_of(row), plan, plan.micro_batches(row["global_batch"])
            )


def _llama2() -> Iterator[Observation]:
    for size, micro_batch, recompute, recomputed, kind in TORCHTITAN_2:
        plan = Plan(64, 1, 1, micro_batch, zero=3, recompute=recompute, fp32_gradients=True, recomputed=recomputed)
        yield Observation("torchtitan, 2024", kind, 80 * GiB, LLAMA2[size], plan, 1)


def _nanotron() -> Iterator[Observation]:
    for dp, pp, micro_batch, kind in NANOTRON:
        plan = Plan(dp, 1, pp, micro_batch, zero=1 if dp > 1 else 0, fp32_gradients=True)
        yield Observation("nanotron", kind, 80 * GiB, NANOTRON_1B, plan, 1024 // dp // micro_batch)


def _bridge() -> Iterator[Observation]:
    for device, size, devices, batch, micro_batch, tp, pp, cp, v, is_fsdp in MEGATRON_BRIDGE:
        dp = devices // (tp * pp * cp)
        recompute = "full" if (device, size, micro_batch, pp) in AGAIN else "none"
        schedule, zero = "interleaved_1f1b" if v > 1 else "1f1b", 3 if is_fsdp else 1
        plan = Plan(dp, tp, pp, micro_batch, schedule, v, zero, tp > 1, recompute, "fp8", cp)
        model, m = llama3_of(size), plan.micro_batches(batch)
        yield Observation(f"Megatron Bridge, {device}", "ran", GIB[device] * GiB, model, plan, m)
