"""S6. A run that was lost, on devices that were half idle: what went wrong, and how should it run again?"""

from __future__ import annotations

from course_lib.classroom import journal
from course_lib.classroom.questions.outcome import Feedback, Outcome
from course_lib.classroom.scenarios.jobs.faults import Incident
from course_lib.classroom.scenarios.jobs.job import LAYERS, Job
from course_lib.classroom.scenarios.jobs.step import step
from course_lib.figures import gantt, lost_time
from course_lib.figures.axis import percent

CASE = Incident(
    "S6",
    Job(dp=2, pp=4, micro_batches=4, fixed=2.0**15),
    ("kept", "sums", "rate", "apart", "sorted", "same", "data"),
)
BUSY, MEMORY = 0.75, 16e6  # of the redesign: least share of a step; most bytes of a device


def redesign(
    dp: int = 2, pp: int = 4, micro_batches: int = 4, layers: tuple[int, ...] = (), buckets: int = 8
) -> Feedback:
    """Run a step of the same work in another plan, beside a step as it was.

    Raises ValueError for a plan that does not fit the eight devices, the 64 samples or the 16 layers.
    """
    plan = CASE.healthy.but(dp=dp, pp=pp, micro_batches=micro_batches, layers=layers, buckets=buckets)
    if dp * pp != CASE.healthy.world or 64 % (dp * micro_batches) or sum(plan.of_stages) != LAYERS:
        raise ValueError(
            "dp times pp has to be 8; dp times micro_batches has to divide 64; layers have to add up to 16"
        )
    before, after = (step(job.clocked(0)).timeline for job in (CASE.healthy, plan))
    busy = [1 - line.idle_fraction() for line in (before, after)]
    right = busy[1] >= BUSY and max(plan.memory) <= MEMORY
    said = (
        f"Devices compute for {percent(busy[0])} of a step as it was, and for {percent(busy[1])} of yours, which is "
        f"{before.makespan / after.makespan:.2f} times as fast (emulated). The fullest device needs "
        f"{max(plan.memory) / 1e6:.1f} MB, and has {MEMORY / 1e6:.0f} (modelled)."
    )
    journal.record("ran", "S6_redesign", 0, f"dp={dp} pp={pp} micro_batches={micro_batches}", right)
    pictures = (lost_time({"as it was": before, "yours": after}), gantt(after, before, title="Yours, and how it was"))
    return Feedback(
        f"{dp} replicas of {pp} stages, {micro_batches} micro-batches", Outcome(right, said, pictures=pictures)
    )
