"""A case with a fault: a healthy job, its possible faults, and the possible changes.

A student answers four questions, one after the other. None has a key: each option is tried on the job.

    NAME_symptom    what is different from last week?            the job's own reports, now and then
    NAME_suspect    what could look like this?                   a healthy job with that fault: does it report the same?
    NAME_measure    which measurement would tell them apart?     read with each remaining suspect: does it differ?
    NAME_change     what do you change?                          the job with that change: is it as it was?

A case asks the questions that have a page, which lists their options. Between them the student measures, which costs
minutes of the cluster. A seed draws another culprit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isnan
from random import Random
from typing import Any

from course_lib.classroom import journal
from course_lib.classroom.questions.asking import MakeForm, choice, each
from course_lib.classroom.questions.catalog import case_of, pages
from course_lib.classroom.questions.forms import Form
from course_lib.classroom.questions.markup import bullets
from course_lib.classroom.questions.outcome import Feedback, Outcome
from course_lib.classroom.questions.prose import Page, Section, items
from course_lib.classroom.scenarios.case import CaseQuestion, debrief
from course_lib.classroom.scenarios.jobs.instruments import INSTRUMENTS, signals, throughput
from course_lib.classroom.scenarios.jobs.job import Job
from course_lib.classroom.scenarios.jobs.replay import replay
from course_lib.classroom.scenarios.jobs.training import train
from course_lib.figures import Picture, loss_curves, lost_time
from course_lib.figures.axis import counted

Changes = Mapping[str, Any]
SLOWER, LESS = 0.97, 0.07  # of the samples per second, a share; of the loss, a rise
SLIGHTLY = 0.9  # share of the first loss
A_CHANGE = 30  # minutes of the cluster: stop, change, start again from the checkpoint
SYMPTOMS = {
    "slower": (True, "well"),
    "less": (False, "less"),
    "nothing": (False, "nothing"),
    "broken": (False, "broken"),
    "neither": (False, "well"),
}
LINES, SETTINGS = 5, 3  # lines of the log and changed settings that a student sees


@dataclass(frozen=True)
class Fault:
    """A case. culprits: by name, functions that draw a fault's changes to the job.  repairs: changes, by name."""

    name: str
    healthy: Job
    culprits: Mapping[str, Callable[[Random], Changes]]
    repairs: Mapping[str, Changes]

    def variant(self, seed: int = 0) -> Incident:
        return Incident(self, seed)

    def questions(self) -> dict[str, CaseQuestion]:
        """The case's questions by name, for `questions.load`."""
        tried = {"symptom": _see, "suspect": _suspect, "measure": _plan_to_measure, "change": _change}
        steps = {f"{self.name}_{step}": CaseQuestion(self.variant, _options(run)) for step, run in tried.items()}
        return {name: step for name, step in steps.items() if name in pages()}


def _options(run: Callable[[str, Incident], Outcome]) -> MakeForm:
    """A form with the options of the page, each tried by `run`."""

    def make(page: Page, variant: Incident) -> Form:
        names = [heading.removeprefix("option: ") for heading in page.sections if heading]
        return choice(each(run, names))(page, variant)

    return make


@dataclass(frozen=True)
class Incident:
    """A case with one of its culprits, drawn by the seed."""

    case: Fault
    seed: int = 0

    @cached_property
    def culprit(self) -> str:
        culprits = list(self.case.culprits)
        round_, place = divmod(self.seed, len(culprits))  # each culprit comes once before any comes again
        return Random(f"{self.case.name} {round_}").sample(culprits, len(culprits))[place]

    @cached_property
    def job(self) -> Job:
        return self.suspected(self.culprit)

    def suspected(self, culprit: str) -> Job:
        """The healthy job with this culprit's fault."""
        return self.case.healthy.but(**self.case.culprits[culprit](Random(self.seed)))

    def evidence(self) -> Feedback:
        """The evidence for the engineer on call: reports, memory, configuration, changed settings, the log."""
        jobs = {"last week": self.case.healthy, "now": self.job}
        memory = (f"{when}: {', '.join(f'{size / 1e6:.1f}' for size in job.memory)} MB" for when, job in jobs.items())
        said = {
            "The job's reports": [f"{when}: {signals(job)}" for when, job in jobs.items()],
            "Memory of ranks 0 to 7 (modelled)": memory,
            "Last week's configuration": self.case.healthy.configuration,
            "Settings that were changed since": self._settings(),
            "From the log": sorted(Random(self.seed).sample(items(self._sections["log"].text), LINES)),
        }
        text = "\n\n".join(f"{what}:\n\n{bullets(lines)}" for what, lines in said.items())
        pictures = throughput(jobs), _losses(jobs)
        return Feedback("", Outcome(None, text, pictures=pictures), title="What everybody sees")

    def _settings(self) -> list[str]:
        """Changed settings: harmless ones, and the culprit's, if it is a setting."""
        said, random = self._sections, Random(self.seed)
        own = [items(said[key].text)[0] for key in [f"setting: {self.culprit}"] if key in said]
        lines = [*own, *random.sample(items(said["settings"].text), SETTINGS)][:SETTINGS]
        return random.sample(lines, SETTINGS)

    def measure(self, name: str) -> Feedback:
        """Use an instrument; only the first use costs minutes.

        Raises ValueError for an unknown instrument.
        """
        if name not in INSTRUMENTS:
            raise ValueError(f"name={name!r} is no instrument; choose one of {', '.join(INSTRUMENTS)}")
        if name not in self.paid():
            journal.record("measured", self.case.name, self.seed, name)
        one, found = INSTRUMENTS[name], INSTRUMENTS[name].read(self.job)
        facts = bullets(f"{what}: {fact}" for what, fact in found.facts.items())
        return Feedback("", Outcome(None, facts, pictures=found.pictures), title=one.title)

    def paid(self) -> list[str]:
        """The instruments that were used, in order."""
        return [note.answer for note in self._notes("measured", self.case.name)]

    def bill(self) -> str:
        """The cost so far of measuring and trying, in words."""
        used, tried = self.paid(), len(self._notes("ran", f"{self.case.name}_change"))
        minutes = sum(INSTRUMENTS[name].minutes for name in used) + A_CHANGE * tried
        what_for = f"{counted(len(used), 'measurement')} and {counted(tried, 'change')}"
        return f"{counted(minutes, 'minute')} of the cluster, for {what_for}."

    def debrief(self, anyway: bool = False) -> Feedback:
        """The debrief: the culprit, and the result of every change."""
        return debrief(f"{self.case.name}_change", self.seed, "find a change that helps", self._told, anyway)

    def _told(self) -> Feedback:
        options = pages()[f"{self.case.name}_change"].sections
        tried = (f"{_first(options[f'option: {r}'])}: {signals(self.repaired(r))}" for r in self.case.repairs)
        led_to = f"What each change leads to, for {A_CHANGE} minutes:\n\n{bullets(tried)}"
        what, _, how = self._sections[f"culprit: {self.culprit}"].text.partition("\n\n")
        said = f"{how}\n\nYour bill: {self.bill()}\n\n{led_to}"
        incident = self._sections["incident"].text
        return Feedback("", Outcome(None, said, incident), title=f"It was {what}.")

    def called(self, culprit: str) -> str:
        """A culprit in words."""
        return _first(self._sections[f"culprit: {culprit}"])

    def repaired(self, name: str) -> Job:
        return self.job.but(**self.case.repairs[name])

    def symptoms(self, job: Job) -> tuple[bool, str]:
        """Whether a job is slower than the healthy one, and how it learns."""
        now, before = signals(job), signals(self.case.healthy)
        learns = {
            "broken": isnan(now.loss),
            "nothing": now.loss > SLIGHTLY * train(job.recipe)[0].losses[0],
            "less": now.loss > before.loss + LESS,
            "well": True,
        }
        slower = now.samples_per_second < SLOWER * before.samples_per_second
        return slower, next(how for how, is_so in learns.items() if is_so)

    def left(self) -> list[str]:
        """The culprits with the same symptoms as the job."""
        seen = self.symptoms(self.job)
        return [culprit for culprit in self.case.culprits if self.symptoms(self.suspected(culprit)) == seen]

    @property
    def _sections(self) -> dict[str, Section]:
        """The sections of the case's page."""
        return case_of(f"{self.case.name}_change").sections

    def _notes(self, what: str, name: str) -> list[journal.Note]:
        return [note for note in journal.notes() if (note.what, note.question, note.seed) == (what, name, self.seed)]


def _first(section: Section) -> str:
    return section.text.partition("\n\n")[0]


# Trying an option


def _see(symptom: str, variant: Incident) -> Outcome:
    now, before = signals(variant.job), signals(variant.case.healthy)
    right = variant.symptoms(variant.job) == SYMPTOMS[symptom]
    return Outcome(right, f"Last week: {before}. Now: {now}.")


def _suspect(culprit: str, variant: Incident) -> Outcome:
    suspected = variant.suspected(culprit)
    right = variant.symptoms(suspected) == variant.symptoms(variant.job)
    said = (
        f"Tried on the job of last week, with nothing but this wrong: {signals(suspected)}. "
        f"The job now: {signals(variant.job)}. {'It could be this.' if right else 'So it is not this.'}"
    )
    jobs = {"last week": variant.case.healthy, "with this wrong": suspected, "now": variant.job}
    return Outcome(right, said, pictures=(_losses(jobs),))


def _plan_to_measure(name: str, variant: Incident) -> Outcome:
    """Compare an instrument's readings for the remaining suspects; a single one is compared with a healthy job."""
    one, left = INSTRUMENTS[name], variant.left()
    jobs = {variant.called(culprit): variant.suspected(culprit) for culprit in left}
    jobs |= {"nothing at all": variant.case.healthy} if len(left) == 1 else {}
    different = len({tuple(one.read(job).facts.items()) for job in jobs.values()})
    readings = counted(different, "different reading") if different > 1 else "the same reading"
    said = (
        f"It could be {' or '.join(jobs)}. Tried with each of them, this measurement gives {readings}, and costs "
        f"{counted(one.minutes, 'minute')}."
    )
    return Outcome(different > 1, said)


def _change(repair: str, variant: Incident) -> Outcome:
    jobs = {"last week": variant.case.healthy, "now": variant.job, "changed": variant.repaired(repair)}
    said = " ".join(f"{name.capitalize()}: {signals(job)}." for name, job in jobs.items())
    steps = {name: replay(job) for name, job in jobs.items()}
    pictures = lost_time(steps, title="Where the time goes"), _losses(jobs)
    return Outcome(variant.symptoms(jobs["changed"]) == SYMPTOMS["neither"], said, pictures=pictures)


# The pictures


def _losses(jobs: Mapping[str, Job]) -> Picture:
    """The loss of rank 0 in each job."""
    return loss_curves({name: train(job.recipe)[0].losses for name, job in jobs.items()}, title="The loss")
