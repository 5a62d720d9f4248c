"""An explorer of tensor parallelism: cut two matrices, and real ranks run them, forward and backward.

    | ranks        --o--  4               | what every rank did         |
    | hidden size  --o--  64              |                             |
    | cut          o----  columns, rows   |                             |
    | sequence     [ ] parallel           |                             |
    | what came of it, in words           |                             |
    | who holds what, and where something travels                       |

Devices and links are emulated. Cuts that cost more really run, and so do mistakes: their numbers are compared with
those of one process.
"""

from __future__ import annotations

from typing import NamedTuple

from course_lib.experiments.cuts import POSITIONS, WAYS, CutRun, run_cut
from course_lib.figures import gantt, who_holds_what
from course_lib.figures.axis import counted, data_size, duration, percent
from course_lib.figures.who_holds_what import count_operations
from course_lib.ranks import Link, Pace
from course_lib.widgets.controls import Slider, Switch
from course_lib.widgets.explorer import HALF, WIDTH, Explorer, View, compared

RANKS = (1, 2, 4, 8)
HIDDEN = (32, 64, 128)
FORWARD = 2e-6  # seconds for a multiplication at each position
LATENCY, BANDWIDTH = 0.0005, 1e6  # seconds; bytes per second
PACE = Pace({"forward": FORWARD, "backward": 2 * FORWARD}, Link(LATENCY, BANDWIDTH))


class TensorParallelSetting(NamedTuple):
    """What the controls say. way: one of WAYS."""

    ranks: int
    hidden: int
    way: str
    sequence_parallel: bool

    def run(self) -> CutRun:
        return run_cut(self.way, self.ranks, self.hidden, self.sequence_parallel, PACE)

    @property
    def least(self) -> float:
        """Bytes that each rank has to send: two all-reduces of the hidden states."""
        return 2 * 2 * (self.ranks - 1) / self.ranks * 4 * POSITIONS * self.hidden


def predict(run: CutRun) -> float:
    """Seconds of a run by the formula: a product takes its share of the time, twice that backward, and a ring its steps
    and its bytes.
    """
    products = 3 * FORWARD * sum(operation.work for operation in run.operations)
    rings = [way for operation in run.operations for way in (operation.forward, operation.backward) if way]
    steps = (run.timeline.world_size - 1) * sum(2 if ring == "all-reduce" else 1 for ring in rings)
    return products + steps * LATENCY + run.sent / BANDWIDTH


def look(setting: TensorParallelSetting) -> View:
    run = setting.run()
    predicted = predict(run)
    return View(
        describe(setting, run, predicted),
        gantt(run.timeline, width=HALF, title="What did every rank do?"),
        who_holds_what(run, WIDTH, "Who holds what, and what travels?"),
    )


def describe(setting: TensorParallelSetting, run: CutRun, predicted: float) -> str:
    """What came of a run, in a few sentences."""
    who = counted(setting.ranks, "rank")
    time = run.timeline.makespan
    took = f"{duration(time)} for forward and backward, {compared(time, predicted)}"
    text = f"{who}, {setting.way}, hidden size {setting.hidden}, {run.timeline.origin}: {took}"
    return f"{text}. {_price(setting, run)} {_verdict(run)}"


def _price(setting: TensorParallelSetting, run: CutRun) -> str:
    if setting.ranks == 1:
        return "One rank sends nothing."
    step, factor = run.timeline, run.sent / setting.least
    compared = "no cut needs less" if abs(factor - 1) < 0.01 else f"{factor:.1f} times what columns, rows needs"
    if factor < 0.99:
        compared = "less than what has to travel"
    counted = count_operations([op for operation in run.operations for op in (operation.forward, operation.backward)])
    busy = percent(sum(map(step.busy, range(setting.ranks))) / (setting.ranks * step.makespan))
    return f"Each sends {data_size(run.sent)} in {counted}: {compared}. It computes for {busy} of the time."


def _verdict(run: CutRun) -> str:
    if not run.wrong:
        return "All numbers are those of one process."
    return f"Wrong: {', '.join(f'{name} is off by {percent(run.off[name])}' for name in run.wrong)}."


class TensorParallelExplorer(Explorer):
    """Ranks, hidden size, how the two matrices are cut, and whether the sequence is cut, too."""

    def __init__(
        self, ranks: int = 4, hidden: int = 64, way: str = "columns, rows", sequence_parallel: bool = False
    ) -> None:
        controls = [
            Slider("ranks", RANKS, ranks),
            Slider("hidden size", HIDDEN, hidden),
            Slider("cut of A, B", tuple(WAYS), way),
            Switch("sequence", sequence_parallel, "parallel"),
        ]
        super().__init__(controls, lambda *values: [look(TensorParallelSetting(*values))], (316, 0))
