"""An explorer of data parallelism: turn a knob, and real ranks run one training step at the new setting.

    | ranks      --o---   4          | speed-up over the   |
    | batch size -o----   32 samples | number of ranks,    |
    | link speed ---o--   10 MB/s    | and the ideal       |
    | [x] overlap                    |                     |
    | the result, in words           |                     |
    | what every rank did in this step                     |

Devices and links are emulated, so that a laptop can show what eight devices would do.

A move runs one step and draws it at once; the rest of the speed-up curve is run when no further move comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from course_lib.classroom.runs import training_step
from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import HALF, WIDTH, Explorer, Runs, View
from course_lib.figures import Timing, gantt, speed_up, time_breakdown
from course_lib.figures.axis import counted, duration, percent
from course_lib.figures.breakdown import largest_loss
from course_lib.ranks import Link, Pace
from course_lib.timeline import Timeline

SECONDS_PER_SAMPLE = {"forward": 0.002, "backward": 0.004, "optimizer": 0.0}  # so small a model is updated in no time
LATENCY = 0.0005  # seconds
BATCH_SIZES = (16, 32, 64)
LINK_SPEEDS = (2, 5, 10, 20, 100)  # megabytes per second
USUAL = 0.1  # seconds on the axis of time
CURVE = (1, 2, 4, 8)  # numbers of ranks that every speed-up curve gets


class DataParallelSetting(NamedTuple):
    """The values of the controls. link_speed: between any two ranks, in megabytes per second."""

    ranks: int
    batch_size: int
    link_speed: float
    overlap: bool

    def with_ranks(self, ranks: int) -> DataParallelSetting:
        if ranks == 1:  # one rank sends nothing, so its link does not matter
            return DataParallelSetting(1, self.batch_size, max(LINK_SPEEDS), True)
        return self._replace(ranks=ranks)

    def run(self) -> Timeline:
        """Run one training step on real ranks, at the pace of the devices and links that they stand for."""
        pace = Pace(SECONDS_PER_SAMPLE, Link(LATENCY, self.link_speed * 1e6))
        return training_step(self.ranks, self.batch_size, pace, self.overlap)


def look(setting: DataParallelSetting, runs: Runs) -> Iterator[View]:
    """Run the step, and one rank to compare it with; then the other points of its curve."""
    alone, step = (runs[setting.with_ranks(ranks)] for ranks in (1, setting.ranks))
    for left in runs.one_by_one([setting.with_ranks(ranks) for ranks in CURVE]):
        yield View(
            describe(setting, step, alone),
            speed_up(curve(setting, runs), HALF, "How much faster are more ranks?", max(CURVE), setting.ranks),
            gantt(step, width=WIDTH, title="What did every rank do?", usual=USUAL),
            left,
        )


def curve(setting: DataParallelSetting, runs: Runs) -> list[Timing]:
    """The timings of all steps run so far that differ from this setting only in the number of ranks."""
    settings = (setting.with_ranks(ranks) for ranks in range(1, max(CURVE) + 1))
    return [Timing.of(runs[one]) for one in settings if one in runs]


def describe(setting: DataParallelSetting, step: Timeline, alone: Timeline) -> str:
    """Describe a step in two sentences. alone: the same step on one rank."""
    what = f"{counted(setting.ranks, 'rank')}, {setting.batch_size} samples"
    text = f"{what}, {step.origin}: {duration(step.makespan)} for a step"
    if setting.ranks == 1:
        return f"{text}. One rank has nobody to wait for and nothing to send."
    shares = time_breakdown(step)
    return (
        f"{text}, {alone.makespan / step.makespan:.1f} times as fast as 1 rank (ideal: {setting.ranks}). "
        f"The ranks computed for {percent(shares['compute'])} of the time; "
        f"the largest loss is {largest_loss(shares)}."
    )


class DataParallelExplorer(Explorer):
    """An explorer of ranks, batch size, link speed and overlap; the speed-up curve is completed when no move comes."""

    def __init__(self, ranks: int = 4, batch_size: int = 32, link_speed: float = 5, overlap: bool = True) -> None:
        controls = [
            Slider("ranks", range(1, max(CURVE) + 1), ranks),
            Slider("batch size", BATCH_SIZES, batch_size, [f"{size} samples" for size in BATCH_SIZES]),
            Slider("link speed", LINK_SPEEDS, link_speed, [f"{speed} MB/s" for speed in LINK_SPEEDS]),
            Slider("overlap", (False, True), overlap, ("off", "on")),
        ]
        runs = Runs()
        super().__init__(controls, lambda *values: look(DataParallelSetting(*values), runs), (356, 312))
