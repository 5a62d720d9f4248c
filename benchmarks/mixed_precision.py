"""Step time and memory of mixed precision on a GPU: ours, torch.amp, and float32; same model, same data, one run.

They take turns, step by step, so that other load on the machine hits all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.mechanisms.mixed_precision import LossScaler, MasterWeights
from course_lib.model import GPTConfig, TinyGPT

SHAPE = GPTConfig(vocab=8192, sequence=512, layers=12, hidden=768, heads=12)
BATCH_SIZE = 16
STEPS = 21
WARM_UP = 5

Step = Callable[[Tensor, Tensor], None]


def main() -> None:
    """Print the median step time and the peak memory of each way, and both relative to float32."""
    if not torch.cuda.is_available():
        print(
            "Skipped: there is no GPU here. What a CPU makes of 16-bit arithmetic, from native to emulated, says\n"
            "nothing about a GPU, and its memory is not counted by torch."
        )
        return
    device = torch.device("cuda")
    steps = {name: make(device) for name, make in WAYS.items()}
    print(f"One training step on {torch.cuda.get_device_name(device)}, median of {STEPS}, taking turns")
    seconds = step_times(list(steps.values()), *random_text(device))
    del steps
    memory = [peak_memory(make, device) for make in WAYS.values()]
    print(f"{'':<32}{'time':>12}{'of float32':>12}{'memory':>12}{'of float32':>12}")
    for name, time_, bytes_ in zip(WAYS, seconds, memory, strict=True):
        print(
            f"{name:<32}{time_ * 1e3:>9.1f} ms{time_ / seconds[0]:>12.2f}"
            f"{bytes_ / 2**30:>8.2f} GiB{bytes_ / memory[0]:>12.2f}"
        )


def step_times(steps: list[Step], inputs: Tensor, targets: Tensor) -> list[float]:
    """Median seconds of each kind of step."""
    seconds: list[list[float]] = [[] for _ in steps]
    for turn in range(WARM_UP + STEPS):
        for step, found in zip(steps, seconds, strict=True):
            _wait(inputs.device)
            started = time.perf_counter()
            step(inputs, targets)
            _wait(inputs.device)
            if turn >= WARM_UP:
                found.append(time.perf_counter() - started)
    return [statistics.median(found) for found in seconds]


def peak_memory(make: Callable[[torch.device], Step], device: torch.device) -> int:
    """The peak bytes of two steps on the GPU, with nothing else on it."""
    torch.cuda.empty_cache()
    inputs, targets = random_text(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step = make(device)
    for _ in range(2):
        step(inputs, targets)
    return torch.cuda.max_memory_allocated(device) - before


def random_text(device: torch.device) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(SHAPE.vocab, (BATCH_SIZE, SHAPE.sequence + 1), device=device)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def plain(device: torch.device) -> Step:
    model = TinyGPT(SHAPE).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(inputs: Tensor, targets: Tensor) -> None:
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(device: torch.device, dtype: torch.dtype) -> Step:
    scaler = LossScaler() if dtype == torch.float16 else None
    model = TinyGPT(SHAPE, dtype=dtype).to(device)
    master = MasterWeights(model.parameters(), torch.optim.AdamW, scaler, lr=1e-4)

    def step(inputs: Tensor, targets: Tensor) -> None:
        loss = loss_of(model(inputs), targets)
        (loss if scaler is None else scaler.scale(loss)).backward()
        master.step()

    return step


def torch_amp(device: torch.device, dtype: torch.dtype) -> Step:
    model: nn.Module = TinyGPT(SHAPE).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def step(inputs: Tensor, targets: Tensor) -> None:
        with torch.autocast(device.type, dtype):
            logits = model(inputs)
        scaler.scale(loss_of(logits, targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


WAYS: dict[str, Callable[[torch.device], Step]] = {
    "float32": plain,
    "bfloat16, ours": partial(ours, dtype=torch.bfloat16),
    "bfloat16, torch.amp": partial(torch_amp, dtype=torch.bfloat16),
    "float16 and scaling, ours": partial(ours, dtype=torch.float16),
    "float16 and scaling, torch.amp": partial(torch_amp, dtype=torch.float16),
}


if __name__ == "__main__":
    main()
