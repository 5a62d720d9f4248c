"""Questions about micro-batches that flow through a pipeline: which order is best (Q8), who does what when (Q10)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random

from course_lib.experiments.events import Event, fill_and_drain, play, until_stuck
from course_lib.figures import gantt
from course_lib.figures.axis import percent
from course_lib.questions.forms import Choice, Form, Option, Ordering
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.questions.stages import ROUNDING
from course_lib.ranks import Deadlock, RankFailed
from course_lib.timeline import Span, Timeline

# Q8. The order that keeps both busiest


@dataclass(frozen=True)
class Grid:
    """So many devices in a row, so many micro-batches through all of them."""

    devices: int
    micro_batches: int

    @property
    def least_idle(self) -> float:
        """The share of time that no order can avoid: (p - 1) / (m + p - 1)."""
        return (self.devices - 1) / (self.micro_batches + self.devices - 1)


def _draw_grid(random: Random) -> Grid:
    return Grid(*random.choice([(2, 2), (2, 3), (3, 2)]))


def _ask_busiest(case: Grid) -> tuple[str, Form]:
    events = fill_and_drain(case.devices, case.micro_batches)
    Random(case.devices * 10 + case.micro_batches).shuffle(events)
    text = (
        f"A model is cut into {case.devices} stages, one on each of {case.devices} devices in a row, and a minibatch "
        f"into {case.micro_batches} micro-batches. A backward pass takes twice as long as a forward pass. Put the "
        "events in an order that keeps the devices as busy as can be. Each device does its own events in the order in "
        "which they stand in your list; where two devices are free, both work at once."
    )
    parts = f"{case.devices - 1} of {case.micro_batches + case.devices - 1} parts of the time"
    why = f"{_BUSY} That is {parts}, {percent(case.least_idle)}, and no order can do with less."
    return text, Ordering({str(event): event.words for event in events}, partial(_measure_idle, case), why)


def _measure_idle(case: Grid, names: tuple[str, ...]) -> Outcome:
    order = [Event.read(name) for name in names]
    try:
        timeline = play(order, case.devices)
    except Deadlock as error:
        return _stuck(case, order, error)
    except RankFailed as error:
        return Outcome(False, f"It cannot be run: {error.__cause__}.", "A backward pass needs its own forward pass.")
    best = play(fill_and_drain(case.devices, case.micro_batches), case.devices)
    idle = timeline.idle_fraction()
    right = idle < case.least_idle + ROUNDING
    said = "No order keeps the devices busier." if right else "It runs, but the devices are idle longer than need be."
    why = _BUSY if right else "Look for a device that waits although it has something else to do: do that earlier."
    said += f" Idle: {percent(idle)} of the devices' time; no order can have less than {percent(case.least_idle)}."
    picture = gantt(timeline, best, title="Your order, and below it a best one")
    return Outcome(right, said, why, pictures=(picture,))


_BUSY = (
    "A device passes a micro-batch on and starts the next one at once. What stays idle is the beginning and the end."
)


def _stuck(case: Grid, order: list[Event], error: Deadlock) -> Outcome:
    done = play(until_stuck(order), case.devices)
    why = "Each of them waits for something that another one was told to do only later."
    picture = gantt(done, title="What was done before the devices got stuck")
    said = f"The devices are stuck for good. {error.message}"
    return Outcome(False, said, why, pictures=(picture,))


# Q10. S3 has just finished MB1


@dataclass(frozen=True)
class Moment:
    """When a stage of a pipeline has just finished the forward pass of a micro-batch. Both count from 1."""

    stages: int
    stage: int
    micro_batch: int

    @property
    def next_of_first(self) -> int:
        """The micro-batch that the first stage has come to, from 1."""
        return self.micro_batch + self.stage


def _draw_moment(random: Random) -> Moment:
    stages = random.choice([4, 5])
    return Moment(stages, random.randrange(3, stages + 1), random.choice([1, 2]))


def _ask_moment(case: Moment) -> tuple[str, Form]:
    here, k, then = f"S{case.stage}", case.micro_batch, case.next_of_first
    text = (
        f"Stages S1 to S{case.stages} form a pipeline, and micro-batches MB1, MB2 and so on flow through it, each "
        f"equally long on each stage. {here} has just finished the forward pass of MB{k}. What is S1 doing?"
    )
    right = (
        f"MB{k} left S1 {case.stage - 1} turns before {here} was done with it, and S1 has not waited since: in each "
        "turn it has passed on one more micro-batch. That is the whole idea of a pipeline."
    )
    return text, Choice(
        (
            Option(
                "it waits until a gradient comes back",
                partial(_read_off, case, "wait", None),
                "S1 does wait, but later: as long as there are micro-batches to send on, it has something to do.",
            ),
            Option(
                f"it computes the forward pass of MB{k + 1}",
                partial(_read_off, case, "forward", k),
                f"That was {case.stage - 1} turns ago: S1 went on to MB{k + 1} as soon as it had passed on MB{k}.",
            ),
            Option(f"it begins the forward pass of MB{then}", partial(_read_off, case, "forward", then - 1), right),
            Option(
                f"it computes the backward pass of MB{k}",
                partial(_read_off, case, "backward", k - 1),
                "No gradient can be back yet: the last stage has to see a micro-batch before one sets out.",
            ),
        )
    )


def _read_off(case: Moment, kind: str, micro_batch: int | None) -> Outcome:
    """Look in the trace of a real pipeline when S1 does this, and what the other stage does then."""
    micro_batches = case.next_of_first + 2
    order = fill_and_drain(case.stages, micro_batches)
    timeline = play(order, case.stages)
    finished = _find(timeline, case.stage - 1, "forward", case.micro_batch - 1).end
    claimed = _find(timeline, 0, kind, micro_batch)
    now = finished + ROUNDING  # what ends then is over, and what begins then has begun
    right = claimed.start <= now < claimed.end
    when = "just then" if right else "later" if claimed.start > now else "earlier"
    doing = next(span for span in timeline.of(0) if span.start <= now < span.end and not span.background)
    said = (
        f"Read off the trace: when S{case.stage} has finished MB{case.micro_batch}, S1 is busy with {_words(doing)}. "
        f"What you said, it does {when}."
    )
    picture = gantt(timeline, title="S1 is rank 0; MB1 is micro-batch 0")
    return Outcome(right, said, shown=right == (micro_batch == case.next_of_first - 1), pictures=(picture,))


def _find(timeline: Timeline, rank: int, kind: str, micro_batch: int | None) -> Span:
    """The first span of this kind, and micro-batch, in the foreground of a rank."""
    spans = (span for span in timeline.of(rank) if not span.background)
    return next(span for span in spans if span.kind == kind and span.micro_batch == micro_batch)


def _words(span: Span) -> str:
    return "waiting" if span.micro_batch is None else f"the {span.kind} pass of MB{span.micro_batch + 1}"


QUESTIONS: dict[str, Family] = {
    "Q8": Family(Grid(2, 2), _ask_busiest, _draw_grid),
    "Q10": Family(Moment(4, 3, 1), _ask_moment, _draw_moment),
}
