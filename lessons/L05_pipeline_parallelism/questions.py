"""Questions about pipelines: who does what at a moment (Q10), how many work at a time (Q11), the best order (Q8)."""

from __future__ import annotations

from math import isclose
from random import Random
from typing import NamedTuple

from course_lib.classroom.questions.asking import choice, each, open_case, ordering
from course_lib.classroom.questions.markup import bullets
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Seeded
from course_lib.classroom.runs.events import (
    ROUNDING,
    SECONDS,
    Grid,
    active,
    fill_and_drain,
    name_of,
    read,
    run_batch,
    run_events,
    until_stuck,
)
from course_lib.figures import gantt, held_activations
from course_lib.figures.axis import percent
from course_lib.ranks import Deadlock, Link, Pace, RankFailed
from course_lib.timeline import Span, Timeline

# Q10. S3 has just finished MB1


class Moment(NamedTuple):
    """The moment when a stage has just finished the forward pass of a micro-batch. Stages and micro-batches from 1."""

    stages: int
    stage: int
    micro_batch: int

    @property
    def next_of_first(self) -> int:
        """The micro-batch that the first stage works on at this moment, from 1."""
        return self.micro_batch + self.stage


def _claims(case: Moment) -> dict[str, tuple[str, int | None]]:
    """Each option's claim: the kind of S1's work at this moment, and its micro-batch, from 0."""
    return {
        "waits": ("wait", None),
        "next": ("forward", case.micro_batch),
        "now": ("forward", case.next_of_first - 1),
        "back": ("backward", case.micro_batch - 1),
        "before": ("forward", case.next_of_first - 2),
    }


def _read_off(option: str, case: Moment) -> Outcome:
    """Find in the trace of a real pipeline when S1 does the claimed work, and its work at this moment."""
    timeline = run_events(fill_and_drain(case.stages, case.next_of_first + 2), case.stages)
    finished = _find(timeline, case.stage - 1, "forward", case.micro_batch - 1).end
    claimed = _find(timeline, 0, *_claims(case)[option])
    now = finished + ROUNDING  # spans that end then are over, spans that begin then have begun
    right = claimed.start <= now < claimed.end
    when = "just then" if right else "later" if claimed.start > now else "earlier"
    doing = next(span for span in timeline.of(0) if span.start <= now < span.end and not span.background)
    found = {"case": case, "doing": _words(doing), "when": when}
    picture = gantt(timeline, title="S1 is rank 0; MB1 is micro-batch 0")
    return Outcome(right, found=found, shown=right == (option == "now"), pictures=(picture,))


def _find(timeline: Timeline, rank: int, kind: str, micro_batch: int | None) -> Span:
    """The first foreground span of a rank with this kind and micro-batch."""
    spans = (span for span in timeline.of(rank) if not span.background)
    return next(span for span in spans if span.kind == kind and span.micro_batch == micro_batch)


def _words(span: Span) -> str:
    return "waiting" if span.micro_batch is None else f"the {span.kind} pass of MB{span.micro_batch + 1}"


# Q11. Eight units, one active at any moment


class Strategy(NamedTuple):
    """A strategy against idle units. pieces: micro-batches; work: of the whole batch on one unit."""

    pieces: int = 1
    work: float = 2.0
    speed: float = 1.0
    latency: float = 0.002

    def run(self, units: int) -> Timeline:
        pace = Pace({kind: seconds / self.speed for kind, seconds in SECONDS.items()}, Link(self.latency))
        return run_events(fill_and_drain(units, self.pieces), units, self.work / self.pieces, pace)


STRATEGIES = {
    "links": Strategy(latency=0.0),
    "faster": Strategy(speed=2.0),
    "larger": Strategy(work=4.0),
    "cut": Strategy(pieces=32),
}


def _activity(strategy: str, units: int) -> Outcome:
    """Compare the average number of active units before and with a strategy."""
    before, after = Strategy().run(units), STRATEGIES[strategy].run(units)
    was, now = map(active, (before, after))
    right = now > 1 + ROUNDING
    found = {"right": right, "was": was, "units": units, "now": now}
    picture = gantt(before, after, title="As it is, and below it with this strategy")
    return Outcome(right, found=found, shown=right == (strategy == "cut"), pictures=(picture,))


# Q8. The order that keeps both busiest


def _fields_of_grid(case: Grid) -> dict[str, object]:
    events = fill_and_drain(case.devices, case.micro_batches)
    Random(case.devices * 10 + case.micro_batches).shuffle(events)
    way = {"F": "forward", "B": "backward"}
    lines = (f"{name_of(one)}: {way[one.op]} of micro-batch {one.micro_batch} on device {one.stage}" for one in events)
    return {"case": case, "events": bullets(lines)}


def _measure_idle(case: Grid, names: tuple[str, ...]) -> Outcome:
    events = list(map(read, names))
    try:
        timeline = run_events(events, case.devices)
    except Deadlock as error:
        done = run_events(until_stuck(events, case.devices), case.devices)
        picture = gantt(done, title="What was done before the devices got stuck")
        return Outcome(False, why="stuck", found={"error": error.message}, pictures=(picture,))
    except RankFailed:  # in several devices at once, any of which may be the first to say so
        mine = sorted(events, key=lambda event: event.stage)
        early = next(one for n, one in enumerate(mine) if one.op == "B" and one._replace(op="F") in mine[n:])
        return Outcome(False, why="no_forward", found={"early": name_of(early)})
    best = run_events(fill_and_drain(case.devices, case.micro_batches), case.devices)
    idle = timeline.idle_fraction()
    right = idle < case.least_idle + ROUNDING
    found = {"idle": idle, "least": case.least_idle}
    picture = gantt(timeline, best, title="Your order, and below it a best one")
    return Outcome(right, why="right" if right else "waits", found=found, pictures=(picture,))


# Pipeline efficiency

FEW, MANY = Grid(4, 2), Grid(4, 8)


def _pipelines() -> Outcome:
    few, many = (run_events(fill_and_drain(*one), one.devices, 1 / one.micro_batches) for one in (FEW, MANY))
    idle = [timeline.idle_fraction() for timeline in (few, many)]
    right = all(map(isclose, idle, [FEW.least_idle, MANY.least_idle]))
    pictures = (gantt(few, title="Few micro-batches"), gantt(many, title="More micro-batches"))
    return Outcome(None, found={"idle": idle}, shown=right, pictures=pictures)


# How pipelining improves utilization

CUT = Grid(4, 8)


def _gain() -> Outcome:
    whole, cut = run_batch("naive", CUT.devices, 1), run_batch("gpipe", *CUT)
    busy = [1 - timeline.idle_fraction() for timeline in (whole, cut)]
    right = all(map(isclose, busy, [1 / CUT.devices, CUT.most_busy]))
    found = {"busy": busy, "times": whole.makespan / cut.makespan}
    picture = gantt(cut, whole, title="In 8 micro-batches, and below it the whole batch")
    return Outcome(None, found=found, shown=right, pictures=(picture,))


# Optimizing a large model's training pipeline

LAYERS, SAMPLES = 48, 64
BEFORE, AFTER, FEWER = Grid(8, 8), Grid(8, 32), Grid(8, 16)


def _tuned() -> Outcome:
    steps = [run_batch("gpipe", 4, 4), run_batch("1f1b", 4, 16), run_batch("interleaved_1f1b", 4, 16, 2)]
    names = ("gpipe, 4 micro-batches", "1f1b, 16 micro-batches", "interleaved_1f1b, 16 micro-batches")
    # Micro-batches differ in size between the steps, so count held activations as shares of the batch.
    most = [max(one.most for one in held_activations(step)) / m for step, m in zip(steps, (4, 16, 16), strict=True)]
    lines = (
        f"{name}: idle {percent(step.idle_fraction())}, holds at most {percent(share)} of the batch's activations"
        for name, step, share in zip(names, steps, most, strict=True)
    )
    picture = gantt(steps[-1], steps[0], title="Interleaved with 16 micro-batches, and below it gpipe with 4")
    return Outcome(None, found={"lines": "; ".join(lines)}, pictures=(picture,))


GRIDS = [Grid(2, 2), Grid(2, 3), Grid(3, 2)]
QUESTIONS: dict[str, Seeded] = {
    "Q11": Seeded(8, choice(each(_activity, STRATEGIES)), (4, 6), lambda units: {"units": units}),
    "Q8": Seeded(GRIDS[0], ordering(_measure_idle, lambda name: read(name).stage), GRIDS, _fields_of_grid),
    "Q10": Seeded(
        Moment(4, 3, 1),
        choice(each(_read_off, ("waits", "next", "now", "back", "before"))),
        [Moment(stages, stage, k) for stages in (4, 5) for stage in range(3, stages + 1) for k in (1, 2)],
        lambda case: {"case": case},
    ),
    "pipeline_efficiency": Seeded(None, open_case(_pipelines)),
    "pipelining_gain": Seeded(None, open_case(_gain)),
    "tune_a_pipeline": Seeded(None, open_case(_tuned)),
    "optimize_stages": Seeded(None, open_case(_gain)),
}
