"""S6. A run that diverged, on devices that were half idle: what went wrong, and how should it run again?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from course_lib.classroom.questions.asking import choice, each
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Seeded
from course_lib.classroom.scenarios.jobs.faults import Fault
from course_lib.classroom.scenarios.jobs.job import Job
from course_lib.classroom.scenarios.jobs.replay import replay
from course_lib.figures import gantt, lost_time
from course_lib.figures.axis import percent

CASE = Fault(
    "S6",
    Job(dp=2, pp=4, micro_batches=4).but(dynamic=False),
    culprits={
        "kept": lambda random: {"master_weights": False},
        "sums": lambda random: {"sums": torch.float16},
        "rate": lambda random: {"rate": random.choice([0.03, 0.04])},
        "apart": lambda random: {"together": False},
    },
    repairs={
        "kept": {"master_weights": True},
        "sums": {"sums": torch.float32},
        "rate": {"rate": 3e-3},
        "together": {"together": True},
        "dynamic": {"dynamic": True},
        "smaller": {"scale": 2.0**10},
    },
)

# How to run it again: the same work, without the idle time

REDESIGNS: dict[str, dict[str, Any]] = {
    "more": {"micro_batches": 16},
    "shorter": {"dp": 4, "pp": 2, "micro_batches": 8},
    "buckets": {"buckets": 1},
    "uneven": {"layers": (5, 4, 4, 3)},
    "one": {"micro_batches": 1},
}
BUSY = 0.75


def _redesign(name: str) -> Outcome:
    before, after = (replay(job) for job in (CASE.healthy, replace(CASE.healthy, **REDESIGNS[name])))
    busy = [1 - step.idle_fraction() for step in (before, after)]
    said = (
        f"Devices compute for {percent(busy[0])} of a step as it was, and for {percent(busy[1])} of the new one, which "
        f"is {before.makespan / after.makespan:.2f} times as fast (emulated)."
    )
    times = lost_time({"as it was": before, "the new one": after})
    both = gantt(after, before, title="The new one, and below it how it was")
    return Outcome(busy[1] > BUSY, said, pictures=(times, both))


QUESTIONS = {**CASE.questions(), "S6_redesign": Seeded(None, choice(each(_redesign, REDESIGNS)))}
