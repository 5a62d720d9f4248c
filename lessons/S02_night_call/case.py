"""S2. On call: a run misbehaves in the night. Replicas on four nodes, in mixed precision."""

from __future__ import annotations

from course_lib.classroom.scenarios.jobs.faults import Incident
from course_lib.classroom.scenarios.jobs.job import Job

CASE = Incident(
    "S2",
    Job(dp=8),
    (
        *("throttled", "link", "loader", "buckets", "overlap"),
        *("data", "corrupt", "apart", "sorted", "same", "scale"),
        *("logging", "empty", "worker", "cut", "saving"),
    ),
)
