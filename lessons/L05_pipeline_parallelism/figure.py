"""The picture of a step's time over the size of its micro-batches: a curve with a minimum, and its parts.

time |  #                        +  idle: the pipeline fills and drains     grows with the size
     |  #              +         #  overhead of every micro-batch           shrinks with the size
     |  #  #        +  +         =  computing                               always the same
     |  =  =  =  =  =  =
        1  2  4  8  16 32        size of a micro-batch; below it, samples held
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.figures.axis import TIMES, counted, duration, percent
from course_lib.figures.bars import stacked
from course_lib.figures.chart import Axis, Chart, Curve, Label, Mark, Panel, Point
from course_lib.figures.frame import MARGIN
from course_lib.figures.palette import LINES, STYLES, Look, Style
from course_lib.figures.picture import Picture, table

HEIGHT, LEFT, RIGHT = 130.0, 64.0, 16.0
PARTS: dict[str, Style] = {
    "computing": STYLES["forward"]._replace(label="computing"),
    "overhead": STYLES["optimizer"]._replace(label="overhead"),
    "idle": STYLES["wait"]._replace(label="idle"),
}
NOTES = (  # below the axis
    Label("held", -8, 33, "end", 11, is_bold=False),
    Label("samples: in a micro-batch; held: at one time; ✗: no room", MARGIN - LEFT, 52, size=11, is_bold=False),
)
NONE, RUNS = "None of them fits into memory", "all of it, emulated"
COLUMNS = (
    *("size (samples)", "computing (ms)", "overhead (ms)", "idle (ms)"),
    *("modelled (ms)", "run (ms)", "held (samples)", "fits"),
)
MEASURED = LINES[1]._replace(dash=None)


@dataclass(frozen=True)
class SizedStep:
    """A step with micro-batches of `size` samples, modelled and measured.

    computing, overhead, idle: seconds of the fullest rank, as modelled; together they are the step.
    held: samples whose activations the fullest rank holds at once.  fits: whether it has room for them.
    measured: seconds of the step's run, on the emulated clock; None before it was run.
    """

    size: int
    computing: float
    overhead: float
    idle: float
    held: int
    fits: bool = True
    measured: float | None = None

    @property
    def modelled(self) -> float:
        return self.computing + self.overhead + self.idle


def best(steps: Sequence[SizedStep]) -> SizedStep | None:
    """The step that fits and is modelled to be the shortest; None if none fits."""
    return min((step for step in steps if step.fits), key=lambda step: step.modelled, default=None)


def micro_batch_sizes(
    steps: Sequence[SizedStep], chosen: int | None = None, width: int = 560, title: str | None = None, usual: float = 0
) -> Picture:
    """Draw the time of a step over the size of its micro-batches.

    chosen: a size to highlight.  usual: seconds on the axis, see `gantt`.
    """
    legend, origins = dict[str, Look](PARTS), {"modelled"}
    if any(step.measured for step in steps):
        legend, origins = {**legend, RUNS: MEASURED}, {"modelled", "emulated"}
    chart = Chart([_panel(steps, chosen, usual)], origins, title, width, legend)
    return Picture.of(chart, _summary(steps), table(COLUMNS, map(_row, steps)))


def _panel(steps: Sequence[SizedStep], chosen: int | None, usual: float) -> Panel:
    longest = max(max(step.modelled, step.measured or 0) for step in steps)
    up, size = Axis.in_unit("time of a step", longest, TIMES, 5, usual=usual)
    places = {place + 0.5: step for place, step in enumerate(steps)}
    across = Axis("samples", 0, len(steps), list(places), lambda x: str(places[x].size), has_grid=False)
    marks: list[Mark] = []
    points = []
    for x, step in places.items():
        name, held = counted(step.size, "sample"), str(step.held) if step.fits else f"{step.held} ✗"
        marks += stacked(name, vars(step), PARTS, duration, size, x, thickness=2 / 3)
        marks.append(Point(x, 0, "", Label(held, 0, 33, "middle", is_bold=step.size == chosen)))
        if step.measured:
            points.append(Point(x, step.measured / size, f"{name}: {duration(step.measured)}, emulated"))
    marks += [Curve(RUNS, points, MEASURED)] if points else []
    marks += [Point(0, 0, "", note) for note in NOTES]
    shaded = [(x - 0.5, x + 0.5) for x, step in places.items() if step.size == chosen]
    return Panel(across, up, marks, HEIGHT, LEFT, RIGHT, head=16.0, foot=61.0, shaded=shaded)


def _summary(steps: Sequence[SizedStep]) -> str:
    shortest, fastest = min(steps, key=lambda step: step.modelled), best(steps)
    ends = "; ".join(
        f"with {counted(step.size, 'sample')} {percent(step.overhead / step.modelled)} of it is overhead and "
        f"{percent(step.idle / step.modelled)} idle"
        for step in (steps[0], steps[-1])
    )
    size = counted(shortest.size, "sample")
    sentence = f"The shortest step has micro-batches of {size}, {duration(shortest.modelled)}; {ends}"
    if fastest is shortest:
        return f"{sentence}."
    fits = f"The shortest that fits into memory has {counted(fastest.size, 'sample')}" if fastest else NONE
    return f"{sentence}. {fits}."


def _row(step: SizedStep) -> tuple[object, ...]:
    times = (1e3 * seconds for seconds in (step.computing, step.overhead, step.idle, step.modelled))
    run = "not yet" if step.measured is None else 1e3 * step.measured
    return step.size, *times, run, step.held, "yes" if step.fits else "no"
