"""S8. One job across two clusters: make it stable, and then fast."""

from __future__ import annotations

from typing import Any

from course_lib.classroom.questions.asking import choice, each
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Seeded
from course_lib.classroom.scenarios.jobs.faults import Incident
from course_lib.classroom.scenarios.jobs.job import Job
from course_lib.classroom.scenarios.jobs.night import night
from course_lib.figures import loss_curves
from course_lib.ranks import Link

CLUSTERS = Job(dp=8, nodes=2, buckets=4, between=Link(0.02, 1.5e6))

CASE = Incident(
    "S8",
    CLUSTERS,
    ("link", "batch", "buckets", "throttled", "rate", "data", "corrupt", "apart", "cut", "logging", "saving"),
)

# Scaling: how should the two clusters work together?

WAYS: dict[str, dict[str, Any]] = {
    "flat": {},
    "levels": {"together": "levels"},
    "larger": {"samples": 256},
    "local": {"together": "local"},
    "alone": {"dp": 4, "nodes": 1},
}
NIGHT = 6 * 3600  # seconds


def _scale(way: str) -> Outcome:
    """Compare a way with the others by what is learned in the same time."""
    runs = {name: night(CLUSTERS.but(**fields)).by(NIGHT) for name, fields in WAYS.items()}
    ended = {name: [one.held_out for one in run if one.held_out is not None][-1] for name, run in runs.items()}
    said = "; ".join(
        f"{name}: {len(runs[name])} reports, a held-out loss of {loss:.2f}" for name, loss in ended.items()
    )
    drawn = dict.fromkeys([way, min(ended, key=lambda name: ended[name])])
    losses = loss_curves({name: [one.learned.loss for one in runs[name]] for name in drawn}, title="The loss")
    return Outcome(ended[way] <= min(ended.values()) + 0.02, f"In six hours, {said}.", pictures=(losses,))


QUESTIONS = {"S8_scaling": Seeded(None, choice(each(_scale, WAYS)))}
