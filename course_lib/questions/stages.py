"""Questions about stages and micro-batches (Q7, Q8, Q10, Q11).

An order of events becomes a program: each device, a rank, does its own events in the order in which they stand. An
event waits for the message it needs and sends one to whoever needs its result; a message is a micro-batch's number.

    F1@0    forward of micro-batch 1 on device 0      needs F1 of the device before
    B1@0    backward of micro-batch 1 on device 0     needs B1 of the device after, and F1 of the same device

The devices' time is paced, and nothing else is: an order that cannot be done gets stuck for real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import NamedTuple

import torch
import torch.distributed as dist

from course_lib.figures import Picture, gantt
from course_lib.figures.axis import percent
from course_lib.model import GPTConfig, TinyGPT
from course_lib.questions.forms import Choice, Form, Option, Ordering
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.ranks import Deadlock, Link, Pace, RankFailed, launch
from course_lib.timeline import Span, Timeline, compute

SECONDS = {"forward": 0.03, "backward": 0.06}  # for one unit of work on one device


class Event(NamedTuple):
    """op: "F" or "B"."""

    op: str
    micro_batch: int
    device: int

    @classmethod
    def read(cls, name: str) -> Event:
        micro_batch, device = name[1:].split("@")
        return cls(name[0], int(micro_batch), int(device))

    def __str__(self) -> str:
        return f"{self.op}{self.micro_batch}@{self.device}"

    @property
    def words(self) -> str:
        direction = "forward" if self.op == "F" else "backward"
        return f"{direction} of micro-batch {self.micro_batch} on device {self.device}"


def play(order: Sequence[Event], devices: int, work: float = 1.0, pace: Pace | None = None) -> Timeline:
    """Run an order. work: of one event, in units of SECONDS.

    Raises RankFailed and Deadlock, as the ranks do.
    """
    return launch(_play, devices, (list(order), work), pace=pace or Pace(SECONDS)).timeline


def _play(rank: int, order: list[Event], work: float) -> None:
    last, sent = dist.get_world_size() - 1, []
    done: set[Event] = set()
    arrived: set[tuple[int, int]] = set()
    for event in (event for event in order if event.device == rank):
        forward, k, _ = event.op == "F", event.micro_batch, event.device
        if not forward and Event("F", k, rank) not in done:
            raise LookupError(f"device {rank} cannot do {event}: it has not done {Event('F', k, rank)} yet")
        source, target = (rank - 1, rank + 1) if forward else (rank + 1, rank - 1)
        while 0 <= source <= last and (source, k) not in arrived:
            message = torch.empty(1)
            dist.recv(message, source)
            arrived.add((source, int(message)))
        with compute("forward" if forward else "backward", micro_batch=k, stage=rank, work=work):
            done.add(event)
        if 0 <= target <= last:
            sent.append(dist.isend(torch.tensor([float(k)]), target))
    for message_on_its_way in sent:
        message_on_its_way.wait()


def fill_and_drain(devices: int, micro_batches: int) -> list[Event]:
    """All forward passes, then all backward passes, the last micro-batch first (Huang et al. 2019, "GPipe")."""
    forwards = [Event("F", k, device) for k in range(micro_batches) for device in range(devices)]
    backwards = [Event("B", k, device) for k in reversed(range(micro_batches)) for device in reversed(range(devices))]
    return forwards + backwards


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


NEARLY = 0.04  # a paced run's idle share is that close to theory; the next better order is farther away


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
    why = (
        "A device passes a micro-batch on and starts the next one at once. What stays idle is the beginning, until the "
        "first micro-batch has reached the last device, and the end: "
        f"{case.devices - 1} of {case.micro_batches + case.devices - 1} parts of the time, {percent(case.least_idle)}."
    )
    return text, Ordering({str(event): event.words for event in events}, partial(_measure_idle, case), why)


def _measure_idle(case: Grid, names: tuple[str, ...]) -> Outcome:
    order = [Event.read(name) for name in names]
    try:
        timeline = play(order, case.devices)
    except Deadlock as error:
        why = "Each of them waits for something that another one was told to do only later."
        return Outcome(False, "Nobody can move: the devices are stuck for good.", why, measured=(error.message,))
    except RankFailed as error:
        return Outcome(False, f"It cannot be run: {error.__cause__}.", "A backward pass needs its own forward pass.")
    best = play(fill_and_drain(case.devices, case.micro_batches), case.devices)
    idle = timeline.idle_fraction()
    right = idle < case.least_idle + NEARLY
    said = "No order keeps the devices busier." if right else "It runs, but the devices are idle longer than need be."
    why = (
        "A device passes a micro-batch on and starts the next one at once; what stays idle is the beginning and the end."
        if right
        else "Look for a device that waits while it had something else to do: that event should have come earlier."
    )
    measured = f"Idle: {percent(idle)} of the devices' time; no order can have less than {percent(case.least_idle)}."
    return Outcome(
        right,
        said,
        why,
        measured=(measured,),
        pictures=(gantt(timeline, best, title="Your order, and below it a best one"),),
    )


# Q7. The whole batch passes through the stages


def _draw_stages(random: Random) -> int:
    return random.choice([3, 5, 6])


def _ask_inefficiency(stages: int) -> tuple[str, Form]:
    text = (
        f"The layers of a model are cut into {stages} stages, one on each of {stages} devices. A whole batch passes "
        "through them: forward from the first device to the last, backward from the last to the first. What is the "
        "inefficiency?"
    )
    turns = (
        f"While one device works, the {stages - 1} others wait for it, so {stages} devices are as fast as one. The "
        "remedy is to cut the batch into micro-batches, and that is what a pipeline does."
    )
    links = "Only one message passes each link in each direction. Links that cost nothing change next to nothing."
    copies = f"Each device holds its own layers and no others. That is the very point of it: memory is what {stages} devices gain."
    uneven = "The stages are equally large, and every device computes for the same time."
    return text, Choice(
        (
            Option(
                "sending activations from device to device takes most of the time", partial(_free_links, stages), links
            ),
            Option("every device has to hold the whole model", partial(_held_by_stage, stages), copies),
            Option(f"at any moment one device works, and {stages - 1} wait", partial(_who_works, stages), turns),
            Option("the last device has far more to compute than the others", partial(_busiest, stages), uneven),
        )
    )


SLOW = Pace(SECONDS, Link(0.002))


def _directionthrough(stages: int, pace: Pace = SLOW) -> Timeline:
    return play(fill_and_drain(stages, 1), stages, pace=pace)


def _who_works(stages: int) -> Outcome:
    timeline = _directionthrough(stages)
    idle = timeline.idle_fraction()
    right = idle > 0.9 * (1 - 1 / stages)
    said = f"On average {'one' if right else 'more than one'} of {stages} devices was working."
    measured = f"The devices were idle for {percent(idle)} of their time."
    return Outcome(right, said, shown=right, measured=(measured,), pictures=(_turns(timeline),))


def _free_links(stages: int) -> Outcome:
    with_links, without = _directionthrough(stages), _directionthrough(stages, Pace(SECONDS, Link()))
    saved = 1 - without.makespan / with_links.makespan
    right = saved > 0.5
    said = f"Tried with links that cost nothing: the step becomes {'much' if right else 'hardly'} shorter."
    measured = f"It saves {percent(max(saved, 0))} of the time."
    picture = gantt(with_links, without, title="With links, and below it with links that cost nothing")
    return Outcome(right, said, shown=not right, measured=(measured,), pictures=(picture,))


def _busiest(stages: int) -> Outcome:
    timeline = _directionthrough(stages)
    busy = [timeline.busy(rank) for rank in range(stages)]
    right = busy[-1] > 1.5 * min(busy)
    said = f"The last device computes {'longer than' if right else 'as long as'} the others."
    measured = f"Milliseconds of computing, by device: {', '.join(f'{1000 * seconds:.0f}' for seconds in busy)}."
    return Outcome(right, said, shown=not right, measured=(measured,), pictures=(_turns(timeline),))


def _held_by_stage(stages: int) -> Outcome:
    held = launch(_stage_parameters, stages).results
    whole = sum(held)
    right = max(held) == whole
    said = f"Parameters by device: {', '.join(f'{count:,}' for count in held)}; the whole model has {whole:,}."
    return Outcome(right, said, shown=not right)


def _stage_parameters(rank: int) -> int:
    """The number of parameters on this rank: one block of the model for each rank."""
    blocks = TinyGPT(GPTConfig(layers=dist.get_world_size() - 2, hidden=32)).blocks
    return sum(parameter.numel() for parameter in blocks[rank].parameters())


def _turns(timeline: Timeline) -> Picture:
    return gantt(timeline, title="One batch passes through the stages and back")


# Q10. S3 has just finished MB1


@dataclass(frozen=True)
class Moment:
    """A pipeline at the moment when one stage has just finished the forward pass of a micro-batch; both count from 1."""

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
        f"Stages S1 to S{case.stages} form a pipeline, and micro-batches MB1, MB2 and so on flow through it, all equally "
        f"long. {here} has just finished the forward pass of MB{k}. What is S1 doing?"
    )
    right = (
        f"MB{k} came from S1 {case.stage - 1} turns before {here} was done with it, and S1 has not waited since: it has "
        f"passed on one more micro-batch in each turn. That nobody waits for the others is the whole idea."
    )
    return text, Choice(
        (
            Option("it waits until a gradient comes back", partial(_read_off, case, "wait", None), _NOT_YET),
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


_NOT_YET = "S1 does wait, but later: as long as there are micro-batches left to send on, it has something to do."


def _read_off(case: Moment, kind: str, micro_batch: int | None) -> Outcome:
    """Look in the trace of a real pipeline when S1 does this, and what the other stage does then."""
    timeline = play(fill_and_drain(case.stages, case.next_of_first + 2), case.stages)
    finished = _find(timeline, case.stage - 1, "forward", case.micro_batch - 1).end
    claimed = _find(timeline, 0, kind, micro_batch)
    # A hair after the moment, so that what ends then is over and what begins then has begun.
    now = finished + SECONDS["forward"] / 4
    right = claimed.start <= now < claimed.end
    order = "just then" if right else "later" if claimed.start > now else "earlier"
    doing = next((span for span in timeline.of(0) if span.start <= now < span.end), None)
    what = (
        f"the {doing.kind} pass of MB{doing.micro_batch + 1}" if doing and doing.micro_batch is not None else "nothing"
    )
    said = (
        f"Read off the trace: when S{case.stage} has finished MB{case.micro_batch}, S1 is computing {what}. "
        f"It does what you said {order}."
    )
    picture = gantt(timeline, title="S1 is rank 0; MB1 is micro-batch 0")
    return Outcome(right, said, shown=right == (micro_batch == case.next_of_first - 1), pictures=(picture,))


def _find(timeline: Timeline, rank: int, kind: str, micro_batch: int | None) -> Span:
    """The first span of this kind, and micro-batch, on a rank."""
    return next(span for span in timeline.of(rank) if span.kind == kind and span.micro_batch == micro_batch)


# Q11. Eight units, one active at any moment


def _draw_units(random: Random) -> int:
    return random.choice([4, 6])


def _ask_strategy(units: int) -> tuple[str, Form]:
    text = (
        f"A model is spread over {units} units, layer after layer. You look at them during training, and at any moment "
        "one of them is active. Which strategy helps most?"
    )
    pipeline = (
        "Micro-batches let a unit start the next piece while the one before travels on, so most units are active most "
        "of the time. The more pieces, the shorter the idle beginning and end."
    )
    links = "The units do not wait for the links, they wait for each other."
    faster = (
        "Every step is shorter, and still one unit works while the others wait: you pay for speed that is not used."
    )
    larger = "Each unit works longer in its turn, and each waits longer for the others. Nothing overlaps."
    return text, Choice(
        (
            Option("faster links between the units", partial(_activity, units, "links"), links),
            Option("units of twice the speed", partial(_activity, units, "faster"), faster),
            Option("a batch of twice the size", partial(_activity, units, "larger"), larger),
            Option(
                "cut the batch into micro-batches that follow each other", partial(_activity, units, "cut"), pipeline
            ),
        )
    )


def _activity(units: int, strategy: str) -> Outcome:
    """How many units are active on average, before and with a strategy."""
    whole, halved = Pace(SECONDS, Link(0.002)), {kind: seconds / 2 for kind, seconds in SECONDS.items()}
    before = play(fill_and_drain(units, 1), units, 2.0, whole)
    after = {
        "links": lambda: play(fill_and_drain(units, 1), units, 2.0, Pace(SECONDS, Link())),
        "faster": lambda: play(fill_and_drain(units, 1), units, 2.0, Pace(halved, Link(0.002))),
        "larger": lambda: play(fill_and_drain(units, 1), units, 4.0, whole),
        "cut": lambda: play(fill_and_drain(units, units), units, 2.0 / units, whole),
    }[strategy]()
    was, now = ((1 - timeline.idle_fraction()) * units for timeline in (before, after))
    right = now > 1.5 * was
    said = f"Tried: {'far more units are active at a time' if right else 'still about one unit is active at a time'}."
    measured = f"Active on average: {was:.1f} of {units} units before, {now:.1f} with it."
    picture = gantt(before, after, title="As it is, and below it with this strategy")
    return Outcome(right, said, shown=right == (strategy == "cut"), measured=(measured,), pictures=(picture,))


QUESTIONS: dict[str, Family] = {
    "Q7": Family(4, _ask_inefficiency, _draw_stages),
    "Q8": Family(Grid(2, 2), _ask_busiest, _draw_grid),
    "Q10": Family(Moment(4, 3, 1), _ask_moment, _draw_moment),
    "Q11": Family(8, _ask_strategy, _draw_units),
}
