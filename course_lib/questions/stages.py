"""Questions about a model that lies on several devices, layer after layer (Q7, Q11)."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist

from course_lib.experiments.events import SECONDS, fill_and_drain, run_events
from course_lib.figures import Picture, gantt
from course_lib.figures.axis import percent
from course_lib.model import GPTConfig, TinyGPT
from course_lib.questions.asking import choice, each
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.ranks import Link, Pace, launch
from course_lib.timeline import Timeline

ROUNDING = 1e-9  # of sums of times


# Q7. The whole batch passes through the stages


SLOW = Pace(SECONDS, Link(0.002))


def _through(stages: int, pace: Pace = SLOW) -> Timeline:
    return run_events(fill_and_drain(stages, 1), stages, pace=pace)


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


class Strategy(NamedTuple):
    """What is done about idle units. pieces: micro-batches; work: of the whole batch on one unit."""

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
    "cut": Strategy(pieces=4),
}


def _activity(strategy: str, units: int) -> Outcome:
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
    "Q7": Family(
        4,
        choice({"links": _free_links, "copies": _held_by_stage, "turns": _who_works, "uneven": _busiest}),
        lambda random: random.choice([3, 5, 6]),
        lambda stages: {"stages": stages, "others": stages - 1},
    ),
    "Q11": Family(
        8, choice(each(_activity, STRATEGIES)), lambda random: random.choice([4, 6]), lambda units: {"units": units}
    ),
}
