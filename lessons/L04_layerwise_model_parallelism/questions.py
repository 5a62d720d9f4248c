"""Questions about layers on several devices: the relief of memory (Q6), and who waits for whom (Q7)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from course_lib.classroom.questions.asking import choice, each, open_case
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Seeded
from course_lib.classroom.runs.events import ROUNDING, SECONDS, active, fill_and_drain, run_events
from course_lib.classroom.runs.training import train_layers
from course_lib.figures import gantt
from course_lib.figures.axis import data_size
from course_lib.planner import Cluster, ModelSpec, Plan, estimate
from course_lib.ranks import Link, Pace

# Rationale for model partitioning

TWENTY = ModelSpec(layers=44, hidden=6144, heads=48, sequence=2048, vocab=50257, flash_attention=True)
BILLIONS = round(TWENTY.parameters / 1e9)
CUT, SHARDED = Plan(4, pp=8, schedule="naive", precision="fp32"), Plan(32, zero=3, precision="fp32")


def _partition() -> Outcome:
    ((alone, _),) = train_layers(1, 8, 4, False)
    lines = [f"{n} devices: {data_size(max(held.states for held in train_layers(n, 8, 4, True)))}" for n in (2, 4, 8)]
    cut, sharded = (estimate(TWENTY, Cluster(nodes=4), plan, 128) for plan in (CUT, SHARDED))
    found = {"alone": alone, "lines": "; ".join(lines), "cut": cut, "sharded": sharded}
    return Outcome(None, found=found, shown=cut.fits and sharded.fits)


# Q6. How does splitting layers relieve memory?


class Split(NamedTuple):
    """A model of `layers` layers on `units` units."""

    layers: int
    units: int


def _hold(option: str, case: Split) -> Outcome:
    """Split as the option says: does each unit hold only its share of what one unit would hold?"""
    is_split, dtype = option == "layers", torch.bfloat16 if option == "bits" else torch.float32
    samples = 2 * case.units if is_split else 2
    held = [one.states for one in train_layers(case.units, case.layers, samples, is_split, dtype)]
    ((whole, _),) = train_layers(1, case.layers, 2 * case.units, False)
    right = max(held) * case.units <= whole
    return Outcome(right, found={"held": max(held), "whole": whole, "units": case.units}, shown=right is is_split)


def _while_waiting(case: Split) -> Outcome:
    """Measure the bytes that a waiting unit still holds, after training."""
    held = min(one.states for one in train_layers(case.units, case.layers, 2, True))
    return Outcome(held == 0, found={"held": held}, shown=held > 0)


# Q7. The whole batch passes through the stages


def _pass_through(option: str, stages: int) -> Outcome:
    """Pass a batch through the stages and back, over links and over free links: is the option's claim true?"""
    events, links = fill_and_drain(stages, 1), (Link(0.002), Link())
    timeline, free = (run_events(events, stages, pace=Pace(SECONDS, link)) for link in links)
    held = [one.states for one in train_layers(stages, stages, 1, True)]
    busy = [timeline.busy(rank) for rank in range(stages)]
    saved, idle = 1 - free.makespan / timeline.makespan, timeline.idle_fraction()
    right = {
        "links": saved > 0.5,
        "copies": max(held) == sum(held),
        "turns": active(timeline) < 1 + ROUNDING,  # below 1, as nobody works while a message travels
        "uneven": busy[-1] > min(busy) + ROUNDING,
    }[option]
    found: dict[str, object] = {"right": right, "stages": stages, "saved": saved, "idle": idle, "whole": sum(held)}
    found |= {"held": ", ".join(map(data_size, held)), "busy": ", ".join(f"{1000 * seconds:.0f}" for seconds in busy)}
    picture = gantt(timeline, title="One batch passes through the stages and back")
    if option == "links":
        picture = gantt(timeline, free, title="With links, and below it with links that cost nothing")
    return Outcome(right, found=found, shown=right == (option == "turns"), pictures=(picture,))


QUESTIONS: dict[str, Seeded] = {
    "why_partition": Seeded(None, open_case(_partition)),
    "Q6": Seeded(
        Split(8, 4),
        choice({**each(_hold, ("layers", "samples", "bits")), "waiting": _while_waiting}),
        [Split(6, 3), Split(6, 2), Split(12, 4)],
        lambda case: {**case._asdict(), "share": case.layers // case.units},
    ),
    "Q7": Seeded(
        4,
        choice(each(_pass_through, ("links", "copies", "turns", "uneven"))),
        (3, 5, 6),
        lambda stages: {"stages": stages, "others": stages - 1},
    ),
}
