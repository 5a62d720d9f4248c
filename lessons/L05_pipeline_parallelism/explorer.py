"""An explorer of pipelines: choose a schedule, and real ranks run it, and the simulator predicts it.

    | stages         --o---   4             | what every rank holds,      |
    | micro-batches  ---o--   8             | over time                   |
    | schedule       -o----   gpipe         |                             |
    | cut            o-----   equal         |                             |
    | the result, in words                  |                             |
    | the timeline of all ranks                                           |

Devices are emulated, so that a laptop can show what eight of them would do.
"""

from __future__ import annotations

from typing import NamedTuple

from course_lib.classroom.runs import pipeline_step
from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import HALF, WIDTH, Explorer, View, compared
from course_lib.figures import gantt, held_activations
from course_lib.figures.axis import counted, duration, number, percent
from course_lib.planner import simulate
from course_lib.ranks import Pace
from course_lib.schedules import SCHEDULES, Schedule
from course_lib.timeline import Timeline
from lessons.L05_pipeline_parallelism.in_flight import in_flight

STAGES = (2, 3, 4, 6, 8)
MICRO_BATCHES = (1, 2, 4, 6, 8, 12, 16)
NAMES = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1")
LAYERS = 288  # of the model, so that a sixth of any stage is a whole number of layers
SECONDS = 0.002  # for the minibatch in one layer: forward, and each half of the backward
USUAL = 0.9  # seconds on the axis of time
CUTS = ("equal ranks", "last rank 1/6 more", "last rank 1/3 more")


class PipelineSetting(NamedTuple):
    """The values of the controls. moved: sixths of a rank's layers, moved from the first stage to the last."""

    ranks: int
    micro_batches: int
    name: str
    moved: int

    @property
    def stages_per_rank(self) -> int:
        return 2 if self.name == "interleaved_1f1b" else 1

    @property
    def schedule(self) -> Schedule:
        return SCHEDULES[self.name](self.ranks * self.stages_per_rank, self.micro_batches)

    @property
    def layers(self) -> list[int]:
        """The number of layers of each stage."""
        n = self.ranks * self.stages_per_rank
        layers = [LAYERS // n] * n
        moved = self.moved * (LAYERS // self.ranks) // 6
        layers[0] -= moved
        layers[-1] += moved
        return layers

    def run(self) -> Timeline:
        """Run one step, forward and backward, on real ranks, at the pace of the devices that they stand for."""
        pace = Pace(dict.fromkeys(("forward", "backward", "weight_grad"), SECONDS / self.micro_batches))
        return pipeline_step(self.schedule, pace, self.layers)

    def predict(self) -> Timeline:
        """Simulate the same step."""
        seconds = [SECONDS / self.micro_batches * layers for layers in self.layers]
        return simulate(self.schedule, seconds, seconds, seconds)


def look(setting: PipelineSetting) -> View:
    predicted, step = setting.predict(), setting.run()
    return View(
        describe(setting, step, predicted),
        in_flight(step, HALF, "What does every rank hold?", USUAL),
        gantt(step, width=WIDTH, title="What did every rank do?", usual=USUAL),
    )


def describe(setting: PipelineSetting, step: Timeline, predicted: Timeline) -> str:
    """Describe a step: its time and bubble beside the predicted ones, and the activations held by the fullest rank."""
    idle, expected = step.idle_fraction(), predicted.idle_fraction()
    micro_batches = counted(setting.micro_batches, "micro-batch")
    most = max(one.most for one in held_activations(step))
    return (
        f"{counted(setting.ranks, 'stage')}, {micro_batches}, {setting.name}, {step.origin}: "
        f"{duration(step.makespan)}, {compared(step.makespan, predicted.makespan)}. The ranks were idle for "
        f"{percent(idle)} of the time, the bubble; predicted {percent(expected)}. The fullest rank held the "
        f"activations of {number(most)} of {micro_batches}."
    )


class PipelineExplorer(Explorer):
    """An explorer of stages, micro-batches, schedule, and of how evenly the layers are cut."""

    def __init__(self, stages: int = 4, micro_batches: int = 8, schedule: str = "gpipe", moved: int = 0) -> None:
        controls = [
            Slider("stages", STAGES, stages),
            Slider("micro-batches", MICRO_BATCHES, micro_batches),
            Slider("schedule", NAMES, schedule),
            Slider("cut", range(len(CUTS)), moved, CUTS),
        ]
        super().__init__(controls, lambda *values: [look(PipelineSetting(*values))], (326, 312))
