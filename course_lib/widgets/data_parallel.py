"""An explorer of data parallelism: turn a knob, and real ranks run one training step at the new setting.

    | ranks      --o---   4          | speed-up over the   |
    | batch size -o----   32 samples | number of ranks,    |
    | link speed ---o--   10 MB/s    | and the ideal       |
    | [x] overlap                    |                     |
    | what came of it, in words      |                     |
    | what every rank did in this step                     |

Devices and links are emulated, so that a laptop can show what eight devices would do.

A move runs one step and draws it at once; the rest of the speed-up curve is run when no move has followed.
"""

from __future__ import annotations

from typing import NamedTuple

from course_lib.experiments import training_step
from course_lib.figures import Timing, gantt, speed_up, time_breakdown
from course_lib.figures.axis import counted, duration, percent
from course_lib.figures.breakdown import CAUSES
from course_lib.ranks import Link, Pace
from course_lib.timeline import Timeline
from course_lib.widgets.controls import Slider, Switch
from course_lib.widgets.explorer import HALF, WIDTH, Explorer, View

SECONDS_PER_SAMPLE = {"forward": 0.002, "backward": 0.004, "optimizer": 0.0}  # an update is quick here
LATENCY = 0.0005  # seconds
BATCH_SIZES = (16, 32, 64)
LINK_SPEEDS = (2, 5, 10, 20, 100)  # megabytes per second
CURVE = (1, 2, 4, 8)  # numbers of ranks that every speed-up curve gets


class DataParallelSetting(NamedTuple):
    """What the controls say. link_speed: between any two ranks, in megabytes per second."""

    ranks: int
    batch_size: int
    link_speed: float
    overlap: bool

    def with_ranks(self, ranks: int) -> DataParallelSetting:
        if ranks == 1:  # it sends nothing: the same over every link
            return DataParallelSetting(1, self.batch_size, max(LINK_SPEEDS), True)
        return self._replace(ranks=ranks)

    def run(self) -> Timeline:
        """One training step on real ranks, at the pace of the devices and links that they stand for."""
        pace = Pace(SECONDS_PER_SAMPLE, Link(LATENCY, self.link_speed * 1e6))
        return training_step(self.ranks, self.batch_size, pace, self.overlap)


class Measured:
    """The steps run so far, each setting's once, from which each has its speed-up curve."""

    def __init__(self) -> None:
        self._steps: dict[DataParallelSetting, Timeline] = {}

    def run(self, setting: DataParallelSetting) -> Timeline:
        key = setting.with_ranks(setting.ranks)
        if key not in self._steps:
            self._steps[key] = key.run()
        return self._steps[key]

    def curve(self, setting: DataParallelSetting) -> list[Timing]:
        """The timings of all settings that differ from this one in the number of ranks alone."""
        settings = (setting.with_ranks(ranks) for ranks in range(1, max(CURVE) + 1))
        return [Timing.of(self._steps[one]) for one in settings if one in self._steps]

    def missing(self, setting: DataParallelSetting) -> list[DataParallelSetting]:
        """What its curve lacks. One rank, with which all are compared, comes first."""
        return [one for one in map(setting.with_ranks, CURVE) if one not in self._steps]


def draw(setting: DataParallelSetting, step: Timeline, curve: list[Timing]) -> View:
    """A step in pictures. curve: the timings to compare it with, one rank's among them."""
    return View(
        describe(setting, step, curve),
        speed_up(curve, HALF, "How much faster are more ranks?"),
        gantt(step, width=WIDTH, title="What did every rank do?"),
    )


def describe(setting: DataParallelSetting, step: Timeline, curve: list[Timing]) -> str:
    """What came of a step, in two sentences."""
    what = f"{counted(setting.ranks, 'rank')}, {setting.batch_size} samples"
    text = f"{what}, {step.origin}: {duration(step.makespan)} for a step"
    if setting.ranks == 1:
        return f"{text}. One rank has nobody to wait for and nothing to send."
    shares = time_breakdown(step)
    (alone,) = (timing.seconds for timing in curve if timing.ranks == 1)
    cause = max(("wait", "transfer", "rest"), key=lambda cause: getattr(shares, cause))
    return (
        f"{text}, {alone / step.makespan:.1f} times as fast as 1 rank (ideal: {setting.ranks}). "
        f"The ranks computed for {percent(shares.compute)} of the time; "
        f"the largest loss is {CAUSES[cause]}, {percent(getattr(shares, cause))}."
    )


class DataParallelExplorer:
    """Ranks, batch size, link speed and overlap; the whole speed-up curve follows when no move does."""

    def __init__(self, ranks: int = 4, batch_size: int = 32, link_speed: float = 5, overlap: bool = True) -> None:
        self.ranks = Slider("ranks", range(1, max(CURVE) + 1), ranks)
        self.batch_size = Slider("batch size", BATCH_SIZES, batch_size, [f"{size} samples" for size in BATCH_SIZES])
        self.link_speed = Slider("link speed", LINK_SPEEDS, link_speed, [f"{speed} MB/s" for speed in LINK_SPEEDS])
        self.overlap = Switch("overlap", overlap, "send while computing")
        self.measured = Measured()
        controls = [self.ranks, self.batch_size, self.link_speed, self.overlap]
        self.explorer = Explorer(
            controls, self.look, self.more, lambda: len(self.measured.missing(self.setting)), (356, 312)
        )
        self._repr_mimebundle_ = self.explorer._repr_mimebundle_

    @property
    def setting(self) -> DataParallelSetting:
        return DataParallelSetting(self.ranks.value, self.batch_size.value, self.link_speed.value, self.overlap.value)

    def look(self) -> View:
        setting = self.setting
        self.measured.run(setting.with_ranks(1))
        return draw(setting, self.measured.run(setting), self.measured.curve(setting))

    def more(self) -> View | None:
        """One more point of the curve."""
        missing = self.measured.missing(self.setting)
        if not missing:
            return None
        self.measured.run(missing[0])
        return self.look()
