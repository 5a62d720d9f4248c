"""The planner beside training steps on one GPU: on an H100 (one_gpu.json), and on yours, if there is one.

Plain steps: eager PyTorch, bf16 weights with fp32 masters unless a row says fp32, fused Adam block by block, flash
attention. The planner counts the seconds of the device. Where that waits for its host, a step takes longer.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from course_lib.model import Embedding, GPTConfig, Head, TinyGPT
from course_lib.planner import DEVICES, Cluster, Estimate, ModelSpec, Plan, estimate

DATA = Path(__file__).with_name("one_gpu.json")
LESSER = {"PCIe", "PCIE", "NVL", "Laptop", "D"}  # cards with less than the peak or the bandwidth of the catalogue's
STEP = "model", "micro_batch", "recompute", "micro_batches", "precision"  # what a row is about
TURNS = 5
Row = dict[str, Any]


@cache
def stored() -> dict[str, Any]:
    return json.loads(DATA.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Compared:
    """A measured step and its estimate."""

    row: Row
    estimate: Estimate

    @property
    def waited(self) -> bool:
        """Whether the device waited for its host: kernels fill less than 85% of the step, or, if nobody has added them
        up, the host began the last one after 95% of it. In one_gpu.json nothing lies from 82% to 86%, or 92% to 98%."""
        if "step" in self.row and "kernels" in self.row:
            return self.row["kernels"] < 0.85 * self.row["step"]
        return "step" in self.row and self.row["enqueued"] > 0.95 * self.row["step"]

    @property
    def counts(self) -> bool:
        """Whether the planner is held to its seconds: those of a step in bf16 whose device did not wait."""
        return "step" in self.row and "precision" not in self.row and not self.waited

    def predicted(self, what: str) -> float:
        step, memory = self.estimate.step_time.total, self.estimate.memory
        states, layer = memory.parameters + memory.optimizer, memory.activations / self.estimate.model.layers
        return {"step": step, "kernels": step, "used": memory.total, "states": states, "layer": layer}[what]

    def ratio(self, what: str) -> float:
        return self.predicted(what) / self.row[what]

    def is_inside(self, what: str) -> bool:
        interval = self.estimate.memory if what == "used" else self.estimate.step_time
        return interval.low <= self.row[what] <= interval.high

    def cells(self, what: str, unit: float) -> str:
        if what not in self.row:
            return " " * 27
        mark = " " if self.is_inside(what) else "!"
        return f"{self.predicted(what) * unit:10.1f}{self.row[what] * unit:10.1f}{self.ratio(what):6.2f}{mark}"


def compared(rows: Iterable[Row], device: str = "H100-80GB") -> list[Compared]:
    """Rows as in one_gpu.json, each with what the planner says of it on a device of its catalogue."""
    found = []
    for row in rows:
        model = ModelSpec(**stored()["models"][row["model"]], dropout=False, flash_attention=True)
        plan = Plan(micro_batch=row["micro_batch"], recompute=row["recompute"], precision=row.get("precision", "bf16"))
        cluster, batch = Cluster(device, devices_per_node=1), row["micro_batch"] * row["micro_batches"]
        found.append(Compared(row, estimate(model, cluster, plan, batch)))
    return found


def table(every: list[Compared]) -> str:
    """Time and memory of each step, predicted, measured, and their ratio; then the ratios of all."""
    head = f"{'predicted':>10}{'measured':>10}{'ratio':>6} "
    lines = [f"{'ms and GiB; !: not in its interval':35}{head}{head}"]
    for one in every:
        of = f"{one.row['model']:18}{one.row['micro_batches']} x {one.row['micro_batch']}  {one.row['recompute']:5}"
        waits = "waited" if one.waited else one.row.get("precision", "")
        lines.append(f"{of:29}{waits:6}{one.cells('step', 1e3)}{one.cells('used', 2**-30)}".rstrip())
    sets = {"step": ("steps in bf16 that did not wait", [one for one in every if one.counts])}
    names = {
        "kernels": "sums of kernels",
        "used": "memory in use",
        "states": "states",
        "layer": "a layer's activations",
    }
    sets |= {what: (name, [one for one in every if what in one.row]) for what, name in names.items()}
    for what, (name, some) in sets.items():
        if ratios := [one.ratio(what) for one in some]:
            off = statistics.mean(abs(ratio - 1) for ratio in ratios)
            spread = f"{statistics.mean(ratios):.2f} in the mean, {min(ratios):.2f} to {max(ratios):.2f}"
            lines.append(f"{len(ratios)} x {name}: ratio {spread}; off by {off:.1%} in the mean")
    return "\n".join(lines)


class BlockwiseAdam:
    """Adam on 32-bit masters, block by block: only one block's gradients are there in 32 bits at a time."""

    def __init__(self, model: TinyGPT, lr: float = 1e-5) -> None:
        self._parts, seen = [], set[Tensor]()
        for block in model.blocks:
            weights = [weight for weight in block.parameters() if weight not in seen]  # embedding and head are one
            seen.update(weights)
            masters = [weight.detach().float() for weight in weights]
            self._parts.append((weights, masters, torch.optim.AdamW(masters, lr=lr, fused=True)))

    @torch.no_grad()
    def step(self) -> None:
        for weights, masters, adam in self._parts:
            for weight, master in zip(weights, masters, strict=True):
                master.grad, weight.grad = cast(Tensor, weight.grad).float(), None
            adam.step()
            adam.zero_grad()
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)


def built(shape: dict[str, int], dtype: torch.dtype, device: torch.device) -> TinyGPT:
    """A model whose weights are drawn on its device; the course draws on the CPU, which takes too long here."""
    with torch.device("meta"):
        model = TinyGPT(GPTConfig(**shape, tied_embeddings=True), dtype=dtype)
    embedding, *_, head = model.to_empty(device=device).blocks
    cast(Head, head).output.weight = cast(Embedding, embedding).token.weight
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, 0, 0.02)
        else:
            nn.init.constant_(weight, float(name.endswith("norm.weight")))
    return model


def loss_of(model: TinyGPT, tokens: Tensor, recompute: bool) -> Tensor:
    embedding, *layers, head = model.blocks
    x = embedding(tokens[:, :-1])
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False) if recompute else layer(x)
    return F.cross_entropy(head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


def measured(row: Row, shape: dict[str, int], device: torch.device) -> Row:
    """A row of the same step on this device: "step" and "enqueued", on a GPU also "kernels" and "used"."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    model = built(shape, torch.float32 if "precision" in row else torch.bfloat16, device)
    adam = BlockwiseAdam(model)
    tokens = torch.randint(shape["vocab"], (row["micro_batch"], shape["sequence"] + 1), device=device)

    def step(micro_batches: int = row["micro_batches"]) -> None:
        for _ in range(micro_batches):
            loss_of(model, tokens, row["recompute"] == "full").backward()
        adam.step()

    def timed() -> tuple[float, float]:
        wait()
        began = time.perf_counter()
        step()
        enqueued = time.perf_counter() - began
        wait()
        return time.perf_counter() - began, enqueued

    found = {name: row[name] for name in STEP if name in row}
    for _ in range(2):
        step(micro_batches=2)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found["used"] = total - free
    found["step"], found["enqueued"] = map(statistics.median, zip(*(timed() for _ in range(TURNS)), strict=True))
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step()
            wait()
        found["kernels"] = sum(event.self_device_time_total for event in seen.key_averages()) / 1e6
    return found


def catalogue_name(card: str, memory: float) -> str | None:
    """The planner's name of a card with the name that torch.cuda.get_device_name has; None if it knows none."""
    words = set(re.split("[ -]", card))
    alike = [name for name in DEVICES if {*re.sub(r"-\d+GB$", "", name).split("-")} <= words and not words & LESSER]
    return min(alike, key=lambda name: abs(DEVICES[name].memory - memory), default=None)


def main() -> None:
    """Print what the planner says beside what was measured: on the H100, then here, of the steps that fit this GPU."""
    known = stored()
    print(f"{known['card']}, {known['software']}, {known['date']}\n{table(compared(known['rows']))}\n")
    if not torch.cuda.is_available():
        print("There is no GPU here to measure the same steps on.")
        return
    device, card = torch.device("cuda"), torch.cuda.get_device_name()
    name = catalogue_name(card, torch.cuda.get_device_properties(device).total_memory)
    if name is None:
        print(f"The planner's catalogue has no {card}, so there is nothing to compare with.")
        return
    rows = []
    for one in compared(known["rows"], name):
        torch.cuda.empty_cache()
        if one.estimate.fits:
            rows.append(measured(one.row, known["models"][one.row["model"]], device))
    print(f"{card}, PyTorch {torch.__version__}, here and now\n{table(compared(rows, name))}")


if __name__ == "__main__":
    main()
