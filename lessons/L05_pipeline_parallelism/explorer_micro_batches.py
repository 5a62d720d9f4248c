"""An explorer of the size of micro-batches: the shortest step lies between too many small ones and too few large ones.

    | micro-batch  ---o--   4 samples       | time of a step over the     |
    | stages       --o---   4               | size: computing, overhead,  |
    | overhead     -o----   4 ms            | idle; and what is held      |
    | memory       --o---   16 samples      |                             |
    | the result, in words                  |                             |
    | the timeline of all ranks with the size chosen                      |

A micro-batch of b samples takes h + b c seconds on a stage; h is any overhead. The minibatch has B samples and p stages
run 1f1b, so a step takes (B / b + p - 1) (h + b c) seconds, and the best b is the square root of B h / ((p - 1) c). The
model stays the same: with p stages, c is its time for a sample divided by p.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import NamedTuple

from course_lib.classroom.runs import pipeline_step
from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import HALF, WIDTH, Explorer, Runs, View, compared
from course_lib.figures import gantt
from course_lib.figures.axis import counted, duration, number
from course_lib.ranks import Pace
from course_lib.schedules import SCHEDULES
from course_lib.timeline import Timeline
from lessons.L05_pipeline_parallelism.figure import SizedStep, best, micro_batch_sizes

MINIBATCH = 32  # samples
SIZES = (1, 2, 4, 8, 16, 32)
STAGES = (2, 3, 4, 6, 8)
OVERHEADS = (0.0, 0.002, 0.008, 0.016)  # seconds per micro-batch and stage, forward and backward together
MEMORIES = (4, 8, 16, 32)  # samples for whose activations, in its own layers, a device has room
USUAL = 0.25  # seconds on the axis of a step; twice as many where all sizes are beside each other
FORWARD, BACKWARD = 0.004, 0.008  # seconds for a sample in the whole model


class MicroBatchSetting(NamedTuple):
    """The values of the controls. size: samples of a micro-batch. overhead: seconds. memory: samples."""

    size: int
    stages: int
    overhead: float
    memory: int

    def with_size(self, size: int) -> MicroBatchSetting:
        """The setting to run for another size; memory makes no difference to a run."""
        return self._replace(size=size, memory=0)

    @property
    def micro_batches(self) -> int:
        return MINIBATCH // self.size

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of one micro-batch on one stage, forward and backward."""
        half, samples = self.overhead / 2, self.size / self.stages
        return {"forward": half + samples * FORWARD, "backward": half + samples * BACKWARD}

    @property
    def ideal(self) -> float:
        """The best size by the formula, which ignores memory."""
        return sqrt(MINIBATCH * self.overhead * self.stages / ((self.stages - 1) * (FORWARD + BACKWARD)))

    def run(self) -> Timeline:
        return pipeline_step(SCHEDULES["1f1b"](self.stages, self.micro_batches), Pace(self.seconds))

    def predict(self, measured: float | None = None) -> SizedStep:
        """The step by the formula. measured: the seconds of its run, if it was run."""
        overhead = self.overhead * self.micro_batches
        computing = (FORWARD + BACKWARD) * MINIBATCH / self.stages
        idle = (self.stages - 1) * sum(self.seconds.values())
        held = min(self.stages, self.micro_batches) * self.size
        return SizedStep(self.size, computing, overhead, idle, held, held <= self.memory, measured)


def look(setting: MicroBatchSetting, runs: Runs) -> Iterator[View]:
    """Run the step with micro-batches of this size, then with the others."""
    step = runs[setting.with_size(setting.size)]
    for left in runs.one_by_one([setting.with_size(size) for size in SIZES]):
        sizes = curve(setting, runs)
        yield View(
            describe(setting, step, sizes),
            micro_batch_sizes(sizes, setting.size, HALF, "How large should a micro-batch be?", 2 * USUAL),
            gantt(step, width=WIDTH, title="What did every rank do with this size?", usual=USUAL),
            left,
        )


def curve(setting: MicroBatchSetting, runs: Runs) -> list[SizedStep]:
    """The steps of every size at this setting, modelled, and measured as far as they were run."""
    steps = [runs.get(setting.with_size(size)) for size in SIZES]
    return [
        setting._replace(size=size).predict(step and step.makespan) for size, step in zip(SIZES, steps, strict=True)
    ]


def describe(setting: MicroBatchSetting, step: Timeline, sizes: list[SizedStep]) -> str:
    """Describe a step, and the best size that fits."""
    (own,) = (one for one in sizes if one.size == setting.size)
    text = (
        f"Micro-batches of {counted(setting.size, 'sample')}, {setting.micro_batches} of them on "
        f"{setting.stages} stages, {step.origin}: {duration(step.makespan)} for a step, "
        f"{compared(step.makespan, own.modelled)}. "
    )
    if not own.fits:
        text += f"A real device would have no room: {own.held} samples held, memory for {setting.memory}. "
    fastest = best(sizes)
    if fastest is None:
        return text + "No size fits into memory."
    text += f"The best size that fits is {counted(fastest.size, 'sample')}"
    if not setting.overhead:
        return text + "; without overhead, smaller is always faster."
    return text + f"; the formula, which knows nothing of memory, says {number(setting.ideal)}."


class MicroBatchExplorer(Explorer):
    """An explorer of micro-batch size, stages, overhead and memory; the curve is completed when no move comes."""

    def __init__(self, size: int = 4, stages: int = 4, overhead: float = 0.008, memory: int = 32) -> None:
        controls = [
            Slider("micro-batch", SIZES, size, [counted(size, "sample") for size in SIZES]),
            Slider("stages", STAGES, stages),
            Slider("overhead", OVERHEADS, overhead, [f"{1000 * each:g} ms each" for each in OVERHEADS]),
            Slider("memory", MEMORIES, memory, [f"for {counted(size, 'sample')}" for size in MEMORIES]),
        ]
        runs = Runs()
        super().__init__(controls, lambda *values: look(MicroBatchSetting(*values), runs), (355, 312))
