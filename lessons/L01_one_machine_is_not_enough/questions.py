"""Questions about one machine: which of its limits calls for distribution (Q5), and where both of them end it."""

from __future__ import annotations

from typing import NamedTuple

from course_lib.classroom.questions.asking import choice, each, open_case
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Seeded
from course_lib.classroom.runs.training import train_layers
from course_lib.figures import memory_by_part
from course_lib.figures.axis import long_time, memory_size
from course_lib.planner import Cluster, ModelSpec, Plan, estimate
from course_lib.ranks import Pace

# Q5. Which limit calls for distribution?

SAMPLES = 4


class TooLarge(NamedTuple):
    """A model of `layers` layers, on a device with memory for `fits` of them. billions: of parameters."""

    layers: int
    fits: int
    billions: int

    @property
    def capacity(self) -> int:
        """The device's memory in bytes: the states of the layers that fit, and a tenth of that for activations."""
        ((states, _),) = train_layers(1, self.fits, SAMPLES, False)
        return states + states // 10


def _try(remedy: str, case: TooLarge) -> Outcome:
    """Improve one thing: does a device now hold the model, or its share of the layers?"""
    enough = (n for n in range(2, case.layers + 1) if case.layers % n == 0 and case.layers // n < case.fits)
    devices = next(enough) if remedy == "memory" else 1
    pace = Pace({"forward": 1e-6, "backward": 1e-6} if remedy == "speed" else {"forward": 0.01, "backward": 0.02})
    samples = 1 if remedy == "samples" else SAMPLES
    peak = max(held.peak for held in train_layers(devices, case.layers, samples, devices > 1, pace=pace))
    fits = peak <= case.capacity
    found = {"case": case, "devices": devices, "fits": fits, "peak": peak}
    return Outcome(fits, found=found, shown=fits is (remedy == "memory"))


# Computational bottlenecks of a single machine

SEVEN = ModelSpec(layers=32, hidden=4096, heads=32, sequence=2048, vocab=50257, flash_attention=True)
TOKENS = 140e9  # twenty for each parameter
FLOPS = 6 * SEVEN.parameters * TOKENS  # Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1
LAYERS = 8  # of a small model
MACHINES = {
    "one H100": (Cluster("H100-80GB", 1, 1), Plan()),
    "one H200": (Cluster("H200-141GB", 1, 1), Plan()),
    "each of eight H100": (Cluster("H100-80GB", 1, 8), Plan(dp=8, zero=3)),
}
H200 = MACHINES["one H200"][0].spec


def _two_limits() -> Outcome:
    ((small, _),) = train_layers(1, LAYERS, 4, False)
    planned = {name: estimate(SEVEN, cluster, plan, 256) for name, (cluster, plan) in MACHINES.items()}
    one, larger, eight = planned.values()
    lines = (
        f"{name}: {memory_size(e.memory.total)} of {memory_size(e.capacity)}, {e.fit}; "
        f"{long_time(TOKENS / e.tokens_per_second)} of training"
        for name, e in planned.items()
    )
    alone_or_shared = {name: e.memory for name, e in planned.items() if e is not larger}
    picture = memory_by_part(alone_or_shared, one.capacity, title="What an H100 holds, alone and with seven others")
    fits = [e.fit for e in planned.values()] == ["does not fit", "fits", "fits"]
    right = fits and larger.tokens_per_second < eight.tokens_per_second / 4
    return Outcome(None, found={"lines": "; ".join(lines), "small": small}, shown=right, pictures=(picture,))


QUESTIONS: dict[str, Seeded] = {
    "Q5": Seeded(
        TooLarge(8, 4, 13),
        choice(each(_try, ("speed", "data", "memory", "network", "samples"))),
        [TooLarge(*layers, billions) for layers in ((6, 3), (8, 5), (12, 6)) for billions in (7, 20, 34)],
        lambda case: {"billions": case.billions, "states": 16 * case.billions},
    ),
    "one_machine": Seeded(None, open_case(_two_limits)),
}
