"""S8. One job across two clusters: make it stable, and then fast."""

from __future__ import annotations

from course_lib.classroom.scenarios.jobs.faults import Fault
from course_lib.classroom.scenarios.jobs.job import Job
from course_lib.classroom.scenarios.jobs.training import RANKS
from course_lib.ranks import Link

FAR = Link(0.007, 50e6)  # between two clusters

CASE = Fault(
    "S8",
    Job(dp=8, buckets=2, between=FAR),
    culprits={
        "link": lambda random: {"between": Link(FAR.latency, random.choice([10e6, 15e6]))},
        "batch": lambda random: {"samples": 16},
        "small_buckets": lambda random: {"buckets": 16},
        "rate": lambda random: {"rate": random.choice([0.03, 0.04])},
        "data": lambda random: {"bad_rank": random.randrange(RANKS)},
        "apart": lambda random: {"together": False},
    },
    repairs={
        "link": {"between": FAR},
        "batch": {"samples": 64},
        "buckets": {"buckets": 2},
        "rate": {"rate": 3e-3},
        "data": {"bad_rank": None},
        "together": {"together": True},
        "scale": {"scale": 2.0**10},
    },
)
QUESTIONS = CASE.questions()
