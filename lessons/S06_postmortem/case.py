"""S6. A run that was lost, on devices that were half idle: what went wrong, and how should it run again?"""

from __future__ import annotations

from course_lib.classroom import journal
from course_lib.classroom.questions.outcome import Feedback, Outcome
from course_lib.classroom.scenarios.jobs.faults import Incident
from course_lib.classroom.scenarios.jobs.job import Job
from course_lib.classroom.scenarios.jobs.step import step
from course_lib.figures import gantt

CASE = Incident(
    "S6",
    Job(dp=2, pp=4, micro_batches=4, fixed=2.0**15, overhead=0.5),
    ("rate", "sums", "kept", "apart", "sorted", "same", "data"),
)
FASTER, MEMORY = 1.2, 16e6  # of the redesign: times as fast, at least; bytes of a device, at most
STEPS = 10_000
HEAD = "plan       seconds  busy  MB held  doubled  MB sent  device-hours"


def redesign(dp: int = 2, pp: int = 4, micro_batches: int = 4) -> Feedback:
    """Run a step of the same work in another plan, and compare all plans that were tried so far.

    Raises ValueError for a plan that does not fit the eight devices or the 64 samples.
    """
    was, plan = CASE.healthy, _planned(dp, pp, micro_batches)
    if plan.world != was.world or plan.samples % (dp * micro_batches):
        raise ValueError("dp times pp has to be 8, and dp times micro_batches has to divide 64")
    before, after = (step(job.clocked(0)).timeline for job in (was, plan))
    faster = before.makespan / after.makespan
    right = faster >= FASTER and max(plan.memory) <= MEMORY
    journal.record("ran", "S6_redesign", 0, [dp, pp, micro_batches], right)
    answers = [note.answer for note in journal.notes() if note.question == "S6_redesign"]
    designs = (tuple(one) for one in answers if isinstance(one, list))  # not the texts of an earlier edition
    tried = dict.fromkeys([(was.dp, was.pp, was.micro_batches), *designs])
    said = (
        f"Yours is {faster:.2f} times as fast as it was, and its fullest device needs {max(plan.memory) / 1e6:.1f} MB "
        f"of {MEMORY / 1e6:.0f}. All learn the same, from the same samples. Times are emulated, memory is modelled."
    )
    table = "\n".join([HEAD, *(_row(_planned(*design)) for design in tried)])
    pictures = (gantt(after, before, title="Yours, and how it was", names=("yours", "as it was")),)
    return Feedback(_called(plan), Outcome(right, f"{said}\n\n```\n{table}\n```", pictures=pictures))


def _planned(dp: int, pp: int, micro_batches: int) -> Job:
    return CASE.healthy.but(dp=dp, pp=pp, micro_batches=micro_batches)


def _called(plan: Job) -> str:
    return f"{plan.dp} x {plan.pp}, {plan.micro_batches}"


def _row(plan: Job) -> str:
    """A plan's price and effect: a step, and the device that holds the most and the one that sends the most."""
    line, memory = step(plan.clocked(0)).timeline, max(plan.memory) / 1e6
    sent = max(map(line.bytes_sent, range(plan.world))) / 1e6
    hours = STEPS * line.makespan * plan.world / 3600
    return (
        f"{_called(plan):10}{line.makespan:8.1f}{1 - line.idle_fraction():6.0%}{memory:9.1f}"
        f"{2 * memory:9.1f}{sent:9.1f}{hours:14,.0f}"
    )
