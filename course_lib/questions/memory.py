"""Questions about memory: which limit calls for distribution (Q5), and how splitting layers relieves it (Q6)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from course_lib.experiments.training import train_layers
from course_lib.questions.asking import choice, each
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.ranks import Pace

# Q5. Which limit calls for distribution?

SAMPLES = 4


class TooLarge(NamedTuple):
    """A model of so many layers, and a device with memory for so many of them."""

    layers: int
    fits: int
    billions: int

    @property
    def capacity(self) -> int:
        """Bytes: the states of the layers that fit, and a tenth for activations."""
        ((states, _),) = train_layers(1, self.fits, SAMPLES, False)
        return states + states // 10


def _try(remedy: str, case: TooLarge) -> Outcome:
    """One thing made better: does a device hold the model now, or its layers of it?"""
    enough = (n for n in range(2, case.layers + 1) if case.layers % n == 0 and case.layers // n < case.fits)
    devices = next(enough) if remedy == "memory" else 1
    pace = Pace({"forward": 1e-6, "backward": 1e-6} if remedy == "speed" else {"forward": 0.01, "backward": 0.02})
    samples = 1 if remedy == "samples" else SAMPLES
    peak = max(held.peak for held in train_layers(devices, case.layers, samples, devices > 1, pace=pace))
    fits = peak <= case.capacity
    found = {"case": case, "devices": devices, "fits": fits, "peak": peak}
    return Outcome(fits, found=found, shown=fits is (remedy == "memory"))


# Q6. How does splitting layers relieve memory?


class Split(NamedTuple):
    """So many layers on so many units."""

    layers: int
    units: int


def _hold(option: str, case: Split) -> Outcome:
    """Do it as the option says; is each unit left with its share of what one unit would hold?"""
    is_split, dtype = option == "layers", torch.bfloat16 if option == "bits" else torch.float32
    samples = 2 * case.units if is_split else 2
    held = [one.states for one in train_layers(case.units, case.layers, samples, is_split, dtype)]
    ((whole, _),) = train_layers(1, case.layers, 2 * case.units, False)
    right = max(held) * case.units <= whole
    return Outcome(right, found={"held": max(held), "whole": whole, "units": case.units}, shown=right is is_split)


def _while_waiting(case: Split) -> Outcome:
    """Training is over, and every unit waits: what it holds now."""
    held = min(one.states for one in train_layers(case.units, case.layers, 2, True))
    return Outcome(held == 0, found={"held": held}, shown=held > 0)


QUESTIONS: dict[str, Family] = {
    "Q5": Family(
        TooLarge(8, 4, 13),
        choice(each(_try, ("speed", "data", "memory", "network", "samples"))),
        [TooLarge(*layers, billions) for layers in ((6, 3), (8, 5), (12, 6)) for billions in (7, 20, 34)],
        lambda case: {"billions": case.billions, "states": 16 * case.billions},
    ),
    "Q6": Family(
        Split(8, 4),
        choice({**each(_hold, ("layers", "samples", "bits")), "waiting": _while_waiting}),
        [Split(6, 3), Split(6, 2), Split(12, 4)],
        lambda case: {**case._asdict(), "share": case.layers // case.units},
    ),
}
