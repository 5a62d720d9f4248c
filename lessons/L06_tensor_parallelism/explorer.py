"""An explorer of tensor parallelism: cut two matrices, and real ranks run them, forward and backward.

    | ranks        --o--  4               | the timeline of all ranks   |
    | hidden size  --o--  64              |                             |
    | cut          o----  columns, rows   |                             |
    | sequence     [ ] parallel           |                             |
    | the result, in words                |                             |
    | the share of each rank, and all communication                     |

Devices and links are emulated. Costlier cuts and mistakes really run, too: all results are compared with those of
one process.
"""

from __future__ import annotations

from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import HALF, WIDTH, Explorer, View, compared
from course_lib.figures import gantt
from course_lib.figures.axis import counted, data_size, duration, percent
from course_lib.ranks import Link, Pace
from lessons.L06_tensor_parallelism.figure import count_operations, who_holds_what
from lessons.L06_tensor_parallelism.runs import POSITIONS, WAYS, CutRun, run_cut

RANKS = (1, 2, 4, 8)
HIDDEN = (32, 64, 128)
FORWARD = 2e-6  # seconds per multiplication and position
USUAL = 0.1  # seconds on the axis of time
LATENCY, BANDWIDTH = 0.0005, 1e6  # seconds; bytes per second
PACE = Pace({"forward": FORWARD, "backward": 2 * FORWARD}, Link(LATENCY, BANDWIDTH))


def predict(run: CutRun) -> float:
    """Predict the seconds of a run: products divided among the ranks, twice as long backward, and each ring's steps and
    bytes.
    """
    products = 3 * FORWARD * sum(operation.work for operation in run.operations)
    rings = [way for operation in run.operations for way in (operation.forward, operation.backward) if way]
    steps = (run.timeline.world_size - 1) * sum(2 if ring == "all-reduce" else 1 for ring in rings)
    return products + steps * LATENCY + run.sent / BANDWIDTH


def look(ranks: int, hidden: int, way: str, sequence_parallel: bool) -> View:
    run = run_cut(way, ranks, hidden, sequence_parallel, PACE)
    what = f"{counted(ranks, 'rank')}, {way}, hidden size {hidden}, {run.timeline.origin}"
    return View(
        f"{what}: {_time(run)}. {_price(run, hidden)} {_verdict(run)}",
        gantt(run.timeline, width=HALF, title="What did every rank do?", usual=USUAL),
        who_holds_what(run, WIDTH, "Who holds what, and what travels?"),
    )


def _time(run: CutRun) -> str:
    seconds = run.timeline.makespan
    return f"{duration(seconds)} for forward and backward, {compared(seconds, predict(run))}"


def _price(run: CutRun, hidden: int) -> str:
    step, ranks = run.timeline, run.timeline.world_size
    if ranks == 1:
        return "One rank sends nothing."
    least = 2 * 2 * (ranks - 1) / ranks * 4 * POSITIONS * hidden  # bytes: two all-reduces of the hidden states
    factor = run.sent / least
    beside = "no cut needs less" if abs(factor - 1) < 0.01 else f"{factor:.1f} times what columns, rows needs"
    if factor < 0.99:
        beside = "less than what has to travel"
    operations = count_operations(
        [op for operation in run.operations for op in (operation.forward, operation.backward)]
    )
    busy = percent(sum(map(step.busy, range(ranks))) / (ranks * step.makespan))
    return f"Each sends {data_size(run.sent)} in {operations}: {beside}. It computes for {busy} of the time."


def _verdict(run: CutRun) -> str:
    if not run.wrong:
        return "All numbers are those of one process."
    return f"Wrong: {', '.join(f'{name} is off by {percent(run.off[name])}' for name in run.wrong)}."


class TensorParallelExplorer(Explorer):
    """An explorer of ranks, hidden size, the cut of the two matrices, and sequence parallelism."""

    def __init__(
        self, ranks: int = 4, hidden: int = 64, way: str = "columns, rows", sequence_parallel: bool = False
    ) -> None:
        controls = [
            Slider("ranks", RANKS, ranks),
            Slider("hidden size", HIDDEN, hidden),
            Slider("cut of A, B", tuple(WAYS), way),
            Slider("sequence", (False, True), sequence_parallel, ("whole", "parallel")),
        ]
        super().__init__(controls, lambda *values: [look(*values)], (316, 356))
