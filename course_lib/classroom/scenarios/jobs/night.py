"""A night of a job: report after report, each with the time of its steps and with what was learned.

    time of a report     its steps, emulated once for each set of settings, times a jitter of about 1% that a seed draws
    what it learned      one step of the small training: measured

A night grows as far as it is looked at. After a change it goes on from the one before it, so no report is run twice.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf, isnan
from random import Random
from typing import NamedTuple

from course_lib.classroom.scenarios.jobs import training
from course_lib.classroom.scenarios.jobs.job import REPORT, Change, Job
from course_lib.classroom.scenarios.jobs.step import Call, step
from course_lib.classroom.scenarios.jobs.training import Learned, State

CHECKPOINT, HELD_OUT = 10, 5  # reports between two checkpoints; between two evaluations
JITTER = 0.01
SMOOTH = 4  # evaluations whose mean is compared
_LEARNED = ("rate", "master_weights", "fixed", "order", "bad", "left_out", "corrupt", "local", "seed", "changes")


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
        self.last: Change | None = job.changes[-1] if job.changes else None
        self.past = night(job.but(changes=job.changes[:-1])) if self.last else None
        self.first = self.last.at if self.last else 0
        self._own: list[Report] = []
        self._states: dict[int, State] = {} if self.last else {0: training.begin(job)}

    def report(self, number: int) -> Report:
        return self.past.report(number) if self.past and number < self.first else self._own[number - self.first]

    def reports(self, count: int) -> list[Report]:
        """The first reports; fewer if the job hangs."""
        if self.past:
            self.past.reports(self.first)
        while len(self._own) + self.first < count and not self.hung:
            self._go_on()
        return [self.report(number) for number in range(min(count, self.first + len(self._own)))]

    def by(self, seconds: float) -> list[Report]:
        """The reports that end by then."""
        reports = self.reports(self.first + 1)
        while reports[-1].begins + reports[-1].seconds < seconds and not self.hung:
            reports = self.reports(len(reports) + 10)
        return [one for one in reports if one.begins + one.seconds <= seconds]

    def state(self, number: int) -> State:
        """The state before a report. Between stored ones it is trained again."""
        if self.past and number < self.first:
            return self.past.state(number)
        stored = max((at for at in self._states if at <= number), default=None)
        state = self._start() if stored is None else self._states[stored]
        for one in range(self.first if stored is None else stored, number):
            state, _ = training.advance(state, self.job.at(one), self.report(one).step)
        return state

    def checkpoint(self, saved: int, before: int) -> State:
        """The latest checkpoint after so many steps."""
        if not saved:
            return training.begin(self.job)
        return self.end(next(n for n in reversed(range(before)) if self.report(n).step == saved - 1))

    def end(self, number: int) -> State:
        """The state after a report."""
        return self.past.end(number) if self.past and number < self.first else self.state(number + 1)

    def _start(self) -> State:
        assert self.past and self.last
        if self.last.resume is None:
            return self.past.state(self.first)
        return self.past.checkpoint(self.last.resume, self.first)

    def _next(self) -> tuple[float, int]:
        """When the next report begins, and its step."""
        number = self.first + len(self._own)
        if not number:
            return 0.0, 0
        before = self.report(number - 1)
        begins, following = before.begins + before.seconds, before.step + 1
        if self._own or not self.last:
            return begins, following
        stood = sum(one.minutes for one in self.job.changes if one.at == number)
        return begins + 60 * stood, following if self.last.resume is None else self.last.resume

    def _go_on(self) -> None:
        number = self.first + len(self._own)
        begins, at = self._next()
        job = self.job.at(number)
        clock, saves = clocked(job, at), (at + 1) % CHECKPOINT == 0
        agrees = bool(job.local) and (at + 1) % job.local == 0
        runs = [step(clock)] * (REPORT - 1)  # and one that may be longer
        runs.append(step(clock.but(together="all") if agrees else clock, saves))
        self.hung = runs[-1].hung
        if self.hung:
            return
        state = self.state(number)
        self._states = {n: s for n, s in self._states.items() if n % CHECKPOINT == 0}
        after, learned = training.advance(state, job, at)
        self._states |= {number: training.once(state), number + 1: after}
        seconds = sum(run.timeline.makespan for run in runs)
        seconds *= 1 + JITTER * Random(f"{self.job.seed} {number}").gauss(0, 1)
        held_out = training.held_out(after) if (at + 1) % HELD_OUT == 0 else None
        self._own.append(Report(begins, seconds, at, learned, held_out))


@lru_cache(maxsize=16)
def night(job: Job) -> Night:
    return Night(job)


def clocked(job: Job, at: int) -> Job:
    """What the clock sees of a job: settings that only change what it learns make no other step."""
    stuck = job.stuck if job.stuck and (job.stuck[0] == "loader" or (at + 1) % CHECKPOINT == 0) else None
    unseen = {name: getattr(Job, name) for name in _LEARNED}
    return job.but(**unseen, stuck=stuck)


def reached(reports: list[Report], planned: list[Report]) -> float:
    """The number of planned reports that teach as much as these, by the best held-out loss so far.

    Whoever has the very weights of the plan has its last loss, to the last bit.
    """
    for number, one in enumerate(planned):
        if one.learned.loss == reports[-1].learned.loss:
            return number + 1
    best = _best(reports)[-1][1]
    return next((at for at, loss in _best(planned) if loss <= best), planned[-1].step + 1)


def _best(reports: list[Report]) -> list[tuple[int, float]]:
    """The lowest mean of some evaluations up to each of them, which single ones are too noisy for."""
    seen = [(number + 1, one.held_out) for number, one in enumerate(reports) if one.held_out is not None]
    means = (
        (at, sum(loss for _, loss in seen[max(n + 1 - SMOOTH, 0) : n + 1]) / min(n + 1, SMOOTH))
        for n, (at, _) in enumerate(seen)
    )
    best, curve = inf, []
    for at, mean in means:
        best = min(best, inf if isnan(mean) else mean)
        curve.append((at, best))
    return curve
