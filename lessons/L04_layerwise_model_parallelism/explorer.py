"""An explorer of layer-wise model parallelism: the bytes on each rank, and its busy time.

    | units       --o---   4               | what every rank holds:         |
    | minibatch   -o----   32 samples      | parameters, gradients,         |
    | vocabulary  o-----   12 words        | optimizer state, activations   |
    | cut         o-----   by number       |                                |
    | the result, in words                 |                                |
    | the timeline of all ranks                                         |

Memory is measured, by a ledger on every rank. Time is emulated: all blocks take equally long.
"""

from __future__ import annotations

from typing import NamedTuple

from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import HALF, WIDTH, Explorer, Runs, View, compared
from course_lib.figures import gantt, memory_by_part
from course_lib.figures.axis import duration, memory_size, percent
from course_lib.model import GPTConfig
from course_lib.planner import simulate
from course_lib.ranks import Pace
from course_lib.schedules import SCHEDULES
from course_lib.timeline import Timeline
from lessons.L04_layerwise_model_parallelism.runs import LayerWiseStep, layerwise_step

LAYERS = 6  # with embedding and head, 8 blocks
UNITS = (1, 2, 3, 4, 6, 8)
SAMPLES = (8, 32, 64)
VOCABULARIES = (12, 1000, 4000)
USUAL = 0.15  # seconds on the axis of time
CUTS = ("number", "bytes")
FORWARD, BACKWARD = 0.006, 0.012  # seconds for a block


class LayerWiseSetting(NamedTuple):
    """The values of the controls."""

    units: int
    samples: int
    vocabulary: int
    cut: str

    @property
    def alone(self) -> LayerWiseSetting:
        return self._replace(units=1, cut="number")

    def run(self) -> LayerWiseStep:
        config = GPTConfig(layers=LAYERS, hidden=32, vocab=self.vocabulary)
        pace = Pace({"forward": FORWARD, "backward": BACKWARD})
        return layerwise_step(self.units, self.samples, pace, config, self.cut)


def predict(step: Timeline) -> Timeline:
    """Simulate a pass through the same stages, one rank after the other."""
    seconds = {
        kind: [sum(span.duration for span in step.of(rank) if span.kind == kind) for rank in range(step.world_size)]
        for kind in ("forward", "backward")
    }
    return simulate(SCHEDULES["naive"](step.world_size, 1), seconds["forward"], seconds["backward"])


def look(setting: LayerWiseSetting, runs: Runs) -> View:
    alone = runs[setting.alone]
    step = alone if setting.units == 1 else runs[setting]
    bars = {f"rank {rank}": own for rank, own in enumerate(step.held)}
    if setting.units > 1:
        bars = {"one alone": alone.held[0], **bars}
    predicted = predict(step.timeline)
    return View(
        describe(setting, step, alone, predicted),
        memory_by_part(bars, width=HALF, title="What does every rank hold?", usual=6 * 2**20),
        gantt(step.timeline, width=WIDTH, title="What did every rank do?", usual=USUAL),
    )


def describe(setting: LayerWiseSetting, step: LayerWiseStep, alone: LayerWiseStep, predicted: Timeline) -> str:
    """Say which rank holds most, how that compares with an equal share, and how long a step takes."""
    time, whole = step.timeline.makespan, alone.held[0].total
    if setting.units == 1:
        return f"1 unit holds all {memory_size(whole)}; {duration(time)} for a step, {step.timeline.origin}."
    totals = [own.total for own in step.held]
    fullest = totals.index(max(totals))
    return (
        f"{setting.units} units: rank {fullest} is the fullest, with {memory_size(max(totals))} measured, "
        f"{percent(max(totals) / whole)} of what one unit alone holds (an equal share is "
        f"{percent(1 / setting.units)}). A step takes {duration(time)}, {step.timeline.origin}, "
        f"{compared(time, predicted.makespan)}; alone {duration(alone.timeline.makespan)}. "
        f"On average a unit is busy for {percent(1 - step.timeline.idle_fraction())} of the time."
    )


class LayerWiseExplorer(Explorer):
    """An explorer of units, samples, vocabulary, and of cuts by number of layers or by bytes."""

    def __init__(self, units: int = 4, samples: int = 32, vocabulary: int = 1000, cut: str = "number") -> None:
        controls = [
            Slider("units", UNITS, units),
            Slider("minibatch", SAMPLES, samples, [f"{n} samples" for n in SAMPLES]),
            Slider("vocabulary", VOCABULARIES, vocabulary, [f"{n:,} words" for n in VOCABULARIES]),
            Slider("cut", CUTS, cut, [f"by {name}" for name in CUTS]),
        ]
        runs = Runs()
        super().__init__(controls, lambda *values: [look(LayerWiseSetting(*values), runs)], (363, 312))
