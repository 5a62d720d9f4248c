"""S2. On call: a run misbehaves in the night. Replicas on two machines, in mixed precision."""

from __future__ import annotations

from course_lib.classroom.scenarios.jobs.faults import Fault
from course_lib.classroom.scenarios.jobs.job import BETWEEN, DEVICES, Job
from course_lib.classroom.scenarios.jobs.training import RANKS
from course_lib.ranks import Link

CASE = Fault(
    "S2",
    Job(dp=8),
    culprits={
        "device": lambda random: {"slow": (random.randrange(DEVICES), random.choice([1.4, 1.6, 1.8]))},
        "link": lambda random: {"between": Link(BETWEEN.latency, random.choice([8e6, 10e6, 12e6]))},
        "one_bucket": lambda random: {"buckets": 1},
        "data": lambda random: {"bad_rank": random.randrange(RANKS)},
        "apart": lambda random: {"together": False},
    },
    repairs={
        "device": {"slow": None},
        "link": {"between": BETWEEN},
        "buckets": {"buckets": 8},
        "data": {"bad_rank": None},
        "together": {"together": True},
        "rate": {"rate": 1e-3},
        "scale": {"scale": 2.0**10},
    },
)
QUESTIONS = CASE.questions()
