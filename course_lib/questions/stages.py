"""Questions about a model that lies on several devices, layer after layer (Q7, Q11), and the program that runs them.

An order of events becomes a program: each device, a rank, does its own events in the order in which they stand. An
event waits for the message it needs and sends one to whoever needs its result; a message is a micro-batch's number.

    F1@0    forward of micro-batch 1 on device 0      needs F1 of the device before
    B1@0    backward of micro-batch 1 on device 0     needs B1 of the device after, and F1 of the same device

The devices' time is emulated, and nothing else is: an order that cannot be done gets stuck for real.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.figures import Picture, gantt
from course_lib.figures.axis import percent
from course_lib.model import GPTConfig, TinyGPT
from course_lib.questions.forms import Choice, Form, Option
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.ranks import Link, Pace, launch
from course_lib.timeline import Timeline, compute

ROUNDING = 1e-9  # of sums of times
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
        return f"{self}: {direction} of micro-batch {self.micro_batch} on device {self.device}"


def play(order: Sequence[Event], devices: int, work: float = 1.0, pace: Pace | None = None) -> Timeline:
    """Run an order. work: of one event, in units of SECONDS.

    Raises RankFailed and Deadlock, as the ranks do.
    """
    return launch(_play, devices, (list(order), work), pace=pace or Pace(SECONDS)).timeline


def _play(rank: int, order: list[Event], work: float) -> None:
    last = dist.get_world_size() - 1
    sent: list[tuple[Tensor, dist.Work | None]] = []
    done: set[Event] = set()
    arrived: set[tuple[int, int]] = set()
    for event in (event for event in order if event.device == rank):
        forward, k = event.op == "F", event.micro_batch
        if not forward and Event("F", k, rank) not in done:
            raise LookupError(f"device {rank} cannot do {event}: it has not done {Event('F', k, rank)} yet")
        source, target = (rank - 1, rank + 1) if forward else (rank + 1, rank - 1)
        while 0 <= source <= last and (source, k) not in arrived:
            message = torch.empty(1)
            dist.recv(message, source)
            arrived.add((source, int(message)))
        with compute("forward" if forward else "backward", micro_batch=k, stage=rank, work=work):
            done.add(event)
        if Event(event.op, k, target) in order:
            message = torch.tensor([float(k)])
            sent.append((message, dist.isend(message, target)))
    for _, sending in sent:
        if sending is not None:
            sending.wait()


def until_stuck(order: Sequence[Event]) -> list[Event]:
    """The events of an order that are done before the devices wait for each other, or all of them."""
    done: list[Event] = []
    left = list(order)
    while ready := [event for event in left if _is_next(event, left) and _has_input(event, order, done)]:
        done.append(ready[0])
        left.remove(ready[0])
    return done


def _is_next(event: Event, left: list[Event]) -> bool:
    return event == next(other for other in left if other.device == event.device)


def _has_input(event: Event, order: Sequence[Event], done: list[Event]) -> bool:
    source = event._replace(device=event.device + (-1 if event.op == "F" else 1))
    return source not in order or source in done


def fill_and_drain(devices: int, micro_batches: int) -> list[Event]:
    """All forward passes, then all backward passes, the last micro-batch first (Huang et al. 2019, "GPipe")."""
    forwards = [Event("F", k, device) for k in range(micro_batches) for device in range(devices)]
    backwards = [Event("B", k, device) for k in reversed(range(micro_batches)) for device in reversed(range(devices))]
    return forwards + backwards


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
    copies = "Each device holds its own layers and no others. That is the very point of it: memory is what is gained."
    uneven = "The stages are equally large, and every device computes for the same time."
    return text, Choice(
        (
            Option("sending activations from device to device takes most time", partial(_free_links, stages), links),
            Option("every device has to hold the whole model", partial(_held_by_stage, stages), copies),
            Option(f"at any moment one device works, and {stages - 1} wait", partial(_who_works, stages), turns),
            Option("the last device has far more to compute than the others", partial(_busiest, stages), uneven),
        )
    )


SLOW = Pace(SECONDS, Link(0.002))


def _through(stages: int, pace: Pace = SLOW) -> Timeline:
    return play(fill_and_drain(stages, 1), stages, pace=pace)


def _active(timeline: Timeline) -> float:
    """How many devices are working at a time, on average."""
    return (1 - timeline.idle_fraction()) * timeline.world_size


def _who_works(stages: int) -> Outcome:
    timeline = _through(stages)
    right = _active(timeline) < 1 + ROUNDING  # messages leave moments in which nobody works
    said = (
        f"On average {'no more than one' if right else 'more than one'} of {stages} devices was working: they were "
        f"idle for {percent(timeline.idle_fraction())} of their time."
    )
    return Outcome(right, said, shown=right, pictures=(_turns(timeline),))


def _free_links(stages: int) -> Outcome:
    with_links, without = _through(stages), _through(stages, Pace(SECONDS, Link()))
    saved = 1 - without.makespan / with_links.makespan
    right = saved > 0.5
    said = f"Tried with links that cost nothing: that saves {percent(saved)} of the time."
    picture = gantt(with_links, without, title="With links, and below it with links that cost nothing")
    return Outcome(right, said, shown=not right, pictures=(picture,))


def _busiest(stages: int) -> Outcome:
    timeline = _through(stages)
    busy = [timeline.busy(rank) for rank in range(stages)]
    right = busy[-1] > min(busy) + ROUNDING
    said = (
        f"The last device computes {'longer than' if right else 'as long as'} the others. "
        f"Milliseconds of computing, by device: {', '.join(f'{1000 * seconds:.0f}' for seconds in busy)}."
    )
    return Outcome(right, said, shown=not right, pictures=(_turns(timeline),))


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


# Q11. Eight units, one active at any moment


def _draw_units(random: Random) -> int:
    return random.choice([4, 6])


def _ask_strategy(units: int) -> tuple[str, Form]:
    text = (
        f"A model is spread over {units} units, layer after layer. You look at them during training, and at any moment "
        "one of them is active. Which strategy helps most?"
    )
    cut = (
        "Micro-batches let a unit start the next piece while the one before travels on, so most units are active most "
        "of the time. The more pieces, the shorter the idle beginning and end."
    )
    links = "The units do not wait for the links, they wait for each other."
    faster = "Every step is shorter, and still one unit works while all others wait: most of the new speed is unused."
    larger = "Each unit works longer in its turn, and each waits longer for the others. Nothing overlaps."
    return text, Choice(
        (
            Option("faster links between the units", partial(_activity, units, "links"), links),
            Option("units of twice the speed", partial(_activity, units, "faster"), faster),
            Option("a batch of twice the size", partial(_activity, units, "larger"), larger),
            Option("cut the batch into micro-batches that follow each other", partial(_activity, units, "cut"), cut),
        )
    )


class Strategy(NamedTuple):
    """What is done about idle units. pieces: micro-batches; work: of the whole batch on one unit."""

    pieces: int = 1
    work: float = 2.0
    speed: float = 1.0
    latency: float = 0.002

    def run(self, units: int) -> Timeline:
        pace = Pace({kind: seconds / self.speed for kind, seconds in SECONDS.items()}, Link(self.latency))
        return play(fill_and_drain(units, self.pieces), units, self.work / self.pieces, pace)


STRATEGIES = {
    "links": Strategy(latency=0.0),
    "faster": Strategy(speed=2.0),
    "larger": Strategy(work=4.0),
    "cut": Strategy(pieces=4),
}


def _activity(units: int, strategy: str) -> Outcome:
    """How many units are active on average, before and with a strategy."""
    before, after = Strategy().run(units), STRATEGIES[strategy].run(units)
    was, now = map(_active, (before, after))
    right = now > 1 + ROUNDING
    said = (
        f"Tried: {'more than one unit is' if right else 'still no more than one unit is'} active at a time. "
        f"On average it was {was:.2f} of {units} units before, and {now:.2f} with it."
    )
    picture = gantt(before, after, title="As it is, and below it with this strategy")
    return Outcome(right, said, shown=right == (strategy == "cut"), pictures=(picture,))


QUESTIONS: dict[str, Family] = {
    "Q7": Family(4, _ask_inefficiency, _draw_stages),
    "Q11": Family(8, _ask_strategy, _draw_units),
}
