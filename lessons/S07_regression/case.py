"""S7. A hybrid job on two machines has become slower: which mechanism has regressed?"""

from __future__ import annotations

from course_lib.classroom.scenarios.jobs.faults import Fault
from course_lib.classroom.scenarios.jobs.job import BETWEEN, DEVICES, Job
from course_lib.ranks import Link

THIN = Link(BETWEEN.latency, 10e6)

CASE = Fault(
    "S7",
    Job(dp=2, pp=2, tp=2, micro_batches=8, between=THIN),
    culprits={
        "in_turn": lambda random: {"in_turn": True},
        "few": lambda random: {"micro_batches": random.choice([1, 2])},
        "uneven": lambda random: {"layers": random.choice([(10, 6), (11, 5), (6, 10)])},
        "link": lambda random: {"between": Link(THIN.latency, random.choice([1e6, 2e6]))},
        "device": lambda random: {"slow": (random.randrange(DEVICES), random.choice([1.4, 1.6]))},
    },
    repairs={
        "in_turn": {"in_turn": False},
        "few": {"micro_batches": 8},
        "even": {"layers": ()},
        "link": {"between": THIN},
        "device": {"slow": None},
        "buckets": {"buckets": 16},
        "sixteen": {"micro_batches": 16},
    },
)
QUESTIONS = CASE.questions()
