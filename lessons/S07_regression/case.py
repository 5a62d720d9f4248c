"""S7. A hybrid job on four nodes has become slower: which mechanism has regressed?"""

from __future__ import annotations

from course_lib.classroom.scenarios.jobs.faults import Incident
from course_lib.classroom.scenarios.jobs.job import Job
from course_lib.ranks import Link

CASE = Incident(
    "S7",
    Job(dp=2, pp=2, tp=2, micro_batches=8, between=Link(2e-3, 1.2e6)),
    ("in_turn", "few", "uneven", "link", "throttled", "loader", "overlap"),
)
