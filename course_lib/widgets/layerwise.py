"""An explorer of layer-wise model parallelism: who holds how much, and who is busy.

    | units       --o---   4               | what every rank holds:         |
    | minibatch   -o----   32 samples      | parameters, gradients,         |
    | vocabulary  o-----   12 words        | optimizer state, activations   |
    | cut         o-----   by number       |                                |
    | what came of it, in words            |                                |
    | what every rank did in a step, and below it on the same axis one rank alone |

Both are measured, at the computer's own speed: only one rank ever has something to do, so few cores are enough.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from course_lib.experiments import LayerWiseStep, layerwise_step
from course_lib.figures import gantt, memory_by_part
from course_lib.figures.axis import data_size, duration, percent
from course_lib.model import GPTConfig
from course_lib.widgets.controls import Slider
from course_lib.widgets.live import HALF, WIDTH, LiveExplorer, View

LAYERS = 14  # with embedding and head, 16 blocks
UNITS = (1, 2, 3, 4, 6, 8)
SAMPLES = (8, 32, 128)
VOCABULARIES = (12, 1000, 4000)
CUTS = ("number", "bytes", "time")


class Setting(NamedTuple):
    """What the controls say."""

    units: int
    samples: int
    vocabulary: int
    cut: str

    @property
    def alone(self) -> Setting:
        return self._replace(units=1, cut="number")

    def run(self) -> LayerWiseStep:
        return layerwise_step(self.units, self.samples, GPTConfig(layers=LAYERS, vocab=self.vocabulary), self.cut)


def draw(setting: Setting, step: LayerWiseStep, alone: LayerWiseStep) -> View:
    """step: at this setting.  alone: the same on one unit."""
    bars = {f"rank {rank}": own for rank, own in enumerate(step.held)}
    if setting.units > 1:
        bars = {"one alone": alone.held[0], **bars}
    return View(
        describe(setting, step, alone),
        memory_by_part(bars, width=HALF, title="What does every rank hold?"),
        gantt(step.timeline, alone.timeline if setting.units > 1 else None, WIDTH, "What did every rank do?"),
    )


def describe(setting: Setting, step: LayerWiseStep, alone: LayerWiseStep) -> str:
    """Who holds most, how that compares with an equal share, and how long a step takes."""
    time, whole = step.timeline.makespan, alone.held[0].total
    if setting.units == 1:
        return f"1 unit, {step.timeline.origin}: it holds all {data_size(whole)}; {duration(time)} for a step."
    totals = [own.total for own in step.held]
    fullest = totals.index(max(totals))
    return (
        f"{setting.units} units, {step.timeline.origin}: rank {fullest} is the fullest, with {data_size(max(totals))}, "
        f"{percent(max(totals) / whole)} of what one unit alone holds (an equal share is "
        f"{percent(1 / setting.units)}). A step takes {duration(time)}, alone {duration(alone.timeline.makespan)}. "
        f"On average a unit is busy for {percent(1 - step.timeline.idle_fraction())} of the time."
    )


class LayerWiseExplorer:
    """Units, samples, vocabulary, and by what the layers are cut."""

    def __init__(self, units: int = 4, samples: int = 32, vocabulary: int = 1000, cut: str = "number") -> None:
        self.units = Slider("units", UNITS, units)
        self.samples = Slider("minibatch", SAMPLES, samples, [f"{n} samples" for n in SAMPLES])
        self.vocabulary = Slider("vocabulary", VOCABULARIES, vocabulary, [f"{n:,} words" for n in VOCABULARIES])
        self.cut = Slider("cut", CUTS, cut, [f"by {name}" for name in CUTS])
        self._alone: dict[Setting, LayerWiseStep] = {}
        self.explorer = LiveExplorer([self.units, self.samples, self.vocabulary, self.cut], self.look)

    @property
    def setting(self) -> Setting:
        return Setting(self.units.value, self.samples.value, self.vocabulary.value, self.cut.value)

    def look(self) -> View:
        setting = self.setting
        if setting.alone not in self._alone:
            self._alone[setting.alone] = setting.alone.run()
        alone = self._alone[setting.alone]
        return draw(setting, alone if setting.units == 1 else setting.run(), alone)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return self.explorer._repr_mimebundle_()
