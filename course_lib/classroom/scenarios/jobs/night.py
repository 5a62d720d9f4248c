"""A night of a job: report after report, each with the time of its steps and with what was learned.

    time of a report     its steps, emulated once for each set of settings, times a jitter of about 1% that a seed draws
    what it learned      one step of the small training: measured

A night grows as far as it is looked at. After a change it goes on from the one before it, so no report is run twice.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from random import Random
from statistics import fmean
from typing import NamedTuple

from course_lib.classroom.scenarios.jobs import training
from course_lib.classroom.scenarios.jobs.job import CHECKPOINT, REPORT, Job
from course_lib.classroom.scenarios.jobs.step import Call, step
from course_lib.classroom.scenarios.jobs.training import Learned, State

HELD_OUT = 5  # reports between two evaluations
JITTER = 0.01
SMOOTH = 4  # evaluations whose mean is compared


class Report(NamedTuple):
    """One report. begins, seconds: of emulated time.  step: of the training, from 0."""

    begins: float
    seconds: float
    step: int
    learned: Learned
    held_out: float | None


class Night:
    """The reports of a job. hung: the last calls of its ranks, if it has stopped."""

    def __init__(self, job: Job) -> None:
        self.job, self.hung = job, tuple[Call, ...]()
        self._reports, self._states = list[Report](), [training.begin()]
        if job.changes:
            last, past = job.changes[-1], night(job.but(changes=job.changes[:-1]))
            self._reports = past.reports(last.at)
            self._states = past._states[: last.at + 1]
            if last.resume is not None:
                self._states[-1] = past.checkpoint(last.resume, last.at)

    def reports(self, count: int) -> list[Report]:
        """The first reports; fewer if the job hangs."""
        while len(self._reports) < count and not self.hung:
            self._go_on()
        return self._reports[:count]

    def by(self, seconds: float) -> list[Report]:
        """The reports that end by then."""
        while self._ends < seconds and not self.hung:
            self._go_on()
        return [one for one in self._reports if one.begins + one.seconds <= seconds]

    def state(self, number: int) -> State:
        """The state before a report."""
        self.reports(number)
        return self._states[number]

    def checkpoint(self, saved: int, before: int) -> State:
        """The latest checkpoint after so many steps."""
        if not saved:
            return training.begin()
        return self._states[1 + next(n for n in reversed(range(before)) if self._reports[n].step == saved - 1)]

    @property
    def _ends(self) -> float:
        return self._reports[-1].begins + self._reports[-1].seconds if self._reports else 0.0

    def _go_on(self) -> None:
        number = len(self._reports)
        new = [change for change in self.job.changes if change.at == number]
        at = self._reports[-1].step + 1 if number else 0
        at = next((change.resume for change in reversed(new) if change.resume is not None), at)
        job = self.job.at(number)
        clock, run = job.clocked(at), step(job.clocked(at))
        last = step(clock.but(together="all")) if training.agrees_on_weights(job, at) else run
        self.hung = last.hung
        if self.hung:
            return
        state, learned = training.advance(self._states[number], job.trained, at)
        seconds = (REPORT - 1) * run.timeline.makespan + last.timeline.makespan
        seconds += job.saving if (at + 1) % CHECKPOINT == 0 else 0.0
        seconds *= 1 + JITTER * Random(f"{self.job.seed} {number}").gauss(0, 1)
        held_out = training.held_out(state) if (at + 1) % HELD_OUT == 0 else None
        begins = self._ends + 60 * sum(change.minutes for change in new)
        self._states.append(state)
        self._reports.append(Report(begins, seconds, at, learned, held_out))


@lru_cache(maxsize=16)
def night(job: Job) -> Night:
    return Night(job)


def reached(reports: list[Report], planned: list[Report]) -> float:
    """The number of planned reports that teach as much as these, by the best held-out loss so far.

    Whoever has the very weights of the plan has its last loss, to the last bit.
    """
    for number, one in enumerate(planned):
        if one.learned.loss == reports[-1].learned.loss:
            return number + 1
    best = _best(reports)[-1]
    return next((HELD_OUT * (n + 1) for n, loss in enumerate(_best(planned)) if loss <= best), planned[-1].step + 1)


def _best(reports: list[Report]) -> list[float]:
    """The lowest mean of some evaluations up to each of them, which single ones are too noisy for."""
    seen = [one.held_out for one in reports if one.held_out is not None]
    means = (fmean(seen[max(n + 1 - SMOOTH, 0) : n + 1]) for n in range(len(seen)))
    return list(accumulate(means, min))
