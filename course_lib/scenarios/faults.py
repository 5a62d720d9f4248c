"""A case with a fault: a healthy job, what may be wrong with it, and what one may change.

What a student decides, step by step, is four questions. None has a key: each option is tried on the job.

    NAME_symptom    what is different from last week?            the job's own reports, now and then
    NAME_suspect    what could look like this?                   a healthy job with that wrong: does it report the same?
    NAME_measure    which measurement would tell them apart?     read with each suspect that is left: does it differ?
    NAME_change     what do you change?                          the job with that set otherwise: is it as it was?

Between them measurements are made, which cost minutes of the cluster. A seed draws another culprit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

from course_lib import journal
from course_lib.figures import Picture, loss_curves, lost_time, time_breakdown
from course_lib.figures.axis import counted, listed
from course_lib.questions.asking import choice, each
from course_lib.questions.catalog import CATALOG
from course_lib.questions.outcome import Feedback, Outcome
from course_lib.questions.prose import items
from course_lib.questions.question import Question
from course_lib.scenarios.instruments import INSTRUMENTS, signals
from course_lib.scenarios.replay import replay
from course_lib.scenarios.situation import Situation
from course_lib.scenarios.training import train

Changes = Mapping[str, Any]
SYMPTOMS = {"slower": (True, False), "worse": (False, True), "both": (True, True), "neither": (False, False)}
SLOWER, WORSE = 0.97, 0.1  # less than this share of the samples; more than so much loss
A_CHANGE = 30  # minutes of the cluster: stop, change, start again from the checkpoint
LINES, SETTINGS = 5, 3  # of the log and of changed settings that a student sees


@dataclass(frozen=True)
class Fault:
    """A case. culprits: what is wrong, by name, drawn.  repairs: what is set otherwise, by name."""

    name: str
    healthy: Situation
    culprits: Mapping[str, Callable[[Random], Changes]]
    repairs: Mapping[str, Changes]

    def variant(self, seed: int = 0) -> Variant:
        return Variant(self, seed)

    def questions(self) -> dict[str, Step]:
        """By name: what `questions.load` looks up."""
        tried = {
            "symptom": (_see, SYMPTOMS),
            "suspect": (_suspect, self.culprits),
            "measure": (_plan_to_measure, INSTRUMENTS),
            "change": (_change, self.repairs),
        }
        return {f"{self.name}_{step}": Step(self, run, tuple(names)) for step, (run, names) in tried.items()}


@dataclass(frozen=True)
class Step:
    """One question of a case. run: tries the option of a name."""

    case: Fault
    run: Callable[[str, Variant], Outcome]
    names: tuple[str, ...]

    def question(self, name: str, seed: int = 0) -> Question:
        page, variant = CATALOG[name], Variant(self.case, seed)
        asked = {heading: section for heading, section in page.sections.items() if heading.startswith("option: ")}
        form = choice(each(self.run, self.names))(replace(page, sections=asked), variant)
        return Question(name, seed, page.text, form, varies=False)  # else one card would change, and the others not


@dataclass(frozen=True)
class Variant:
    """A case with one of its culprits, drawn by the seed."""

    case: Fault
    seed: int = 0

    @cached_property
    def culprit(self) -> str:
        culprits = list(self.case.culprits)
        round_, place = divmod(self.seed, len(culprits))  # each of them once, before one comes again
        return Random(f"{self.case.name} {round_}").sample(culprits, len(culprits))[place]

    @cached_property
    def job(self) -> Situation:
        return self.suspected(self.culprit)

    def suspected(self, culprit: str) -> Situation:
        """The healthy job with this wrong."""
        return self.case.healthy.but(**self.case.culprits[culprit](Random(self.seed)))

    def evidence(self) -> Feedback:
        """What everybody sees who is called: reports, settings that were changed, the log."""
        now, before = signals(self.job), signals(self.case.healthy)
        said = (
            f"Last week: {before}. Now: {now}.\n\nSettings that were changed since:\n\n"
            f"{_listed(self._settings())}\n\nFrom the log:\n\n{_listed(self._log())}"
        )
        return Feedback("", Outcome(None, said, pictures=(_losses({"last week": self.case.healthy, "now": self.job}),)))

    def _settings(self) -> list[str]:
        """Harmless ones, and the culprit's, if it is one that somebody has set."""
        pages, random = CATALOG[f"{self.case.name}_symptom"].sections, Random(self.seed)
        own = [pages[key].text for key in [f"setting: {self.culprit}"] if key in pages]
        lines = [*own, *random.sample(items(pages["settings"].text), SETTINGS)][:SETTINGS]
        return random.sample(lines, SETTINGS)

    def _log(self) -> list[str]:
        return sorted(Random(self.seed).sample(items(CATALOG[f"{self.case.name}_symptom"].sections["log"].text), LINES))

    def measure(self, name: str) -> Feedback:
        """Use an instrument; it costs its minutes the first time.

        Raises ValueError for one that does not exist.
        """
        if name not in INSTRUMENTS:
            raise ValueError(f"name={name!r} is no instrument; choose one of {', '.join(INSTRUMENTS)}")
        if name not in self.paid():
            journal.record("measured", self.case.name, self.seed, name)
        one, found = INSTRUMENTS[name], INSTRUMENTS[name].read(self.job)
        facts = _listed(f"{what}: {fact}" for what, fact in found.facts.items())
        return Feedback("", Outcome(None, f"{one.title}:\n\n{facts}", pictures=found.pictures))

    def paid(self) -> list[str]:
        """The instruments that were used, in this order."""
        return [note.answer for note in self._notes("measured", self.case.name)]

    def bill(self) -> str:
        """What finding out and trying has cost so far."""
        used, tried = self.paid(), len(self._notes("ran", f"{self.case.name}_change"))
        minutes = sum(INSTRUMENTS[name].minutes for name in used) + A_CHANGE * tried
        what_for = f"{counted(len(used), 'measurement')} and {counted(tried, 'change')}"
        return f"{counted(minutes, 'minute')} of the cluster, for {what_for}."

    def debrief(self, anyway: bool = False) -> Feedback:
        """What it was, and what every change would have led to. Not before one has helped, or `anyway`."""
        name = f"{self.case.name}_change"
        if not anyway and not any(note.right for note in self._notes("ran", name)):
            return Feedback("", Outcome(None, "There is no debrief yet. First find a change that helps."))
        led_to = [f"{option(name, repair)}: {signals(self.repaired(repair))}" for repair in self.case.repairs]
        pages = CATALOG[name].sections
        said = f"Your bill: {self.bill()}\n\n{pages[f'culprit: {self.culprit}'].text}\n\nWhat each change leads to:"
        return Feedback("", Outcome(None, f"{said}\n\n{_listed(led_to)}", pages["incident"].text))

    def repaired(self, name: str) -> Situation:
        return self.job.but(**self.case.repairs[name])

    def symptoms(self, job: Situation) -> tuple[bool, bool]:
        """Whether a job is slower than the healthy one, and whether it learns less."""
        now, before = signals(job), signals(self.case.healthy)
        return now.samples_per_second < SLOWER * before.samples_per_second, not now.loss <= before.loss + WORSE

    def left(self) -> list[str]:
        """The culprits that look like what is seen."""
        seen = self.symptoms(self.job)
        return [culprit for culprit in self.case.culprits if self.symptoms(self.suspected(culprit)) == seen]

    def _notes(self, what: str, name: str) -> list[journal.Note]:
        return [note for note in journal.notes() if (note.what, note.question, note.seed) == (what, name, self.seed)]


# What becomes of an option


def _see(symptom: str, variant: Variant) -> Outcome:
    now, before = signals(variant.job), signals(variant.case.healthy)
    right = variant.symptoms(variant.job) == SYMPTOMS[symptom]
    return Outcome(right, f"Last week: {before}. Now: {now}.")


def _suspect(culprit: str, variant: Variant) -> Outcome:
    suspected = variant.suspected(culprit)
    right = variant.symptoms(suspected) == variant.symptoms(variant.job)
    said = (
        f"Tried on the job of last week, with nothing but this wrong: {signals(suspected)}. "
        f"The job now: {signals(variant.job)}. {'It could be this.' if right else 'So it is not this.'}"
    )
    return Outcome(right, said, pictures=(_losses({"with this wrong": suspected, "now": variant.job}),))


def _plan_to_measure(name: str, variant: Variant) -> Outcome:
    one, left = INSTRUMENTS[name], variant.left()
    read = {culprit: one.read(variant.suspected(culprit)).facts for culprit in left}
    different = len({tuple(facts.items()) for facts in read.values()})
    texts = listed([option(f"{variant.case.name}_suspect", culprit) for culprit in left])
    said = (
        f"{counted(len(left), 'suspect')} would look like what is seen: {texts}. Tried with each of them wrong, "
        f"this measurement gives {counted(different, 'different reading')}, and costs {counted(one.minutes, 'minute')}."
    )
    return Outcome(different > 1, said)


def _change(repair: str, variant: Variant) -> Outcome:
    jobs = {"last week": variant.case.healthy, "now": variant.job, "changed": variant.repaired(repair)}
    said = " ".join(f"{name.capitalize()}: {signals(job)}." for name, job in jobs.items())
    shares = {name: time_breakdown(replay(job)) for name, job in jobs.items()}
    pictures = lost_time(shares, title="Where the time goes"), _losses(jobs)
    return Outcome(not any(variant.symptoms(jobs["changed"])), said, pictures=pictures)


# What is seen


def option(question: str, name: str) -> str:
    """The text of an option, without what it leads to."""
    return CATALOG[question].sections[f"option: {name}"].text.partition("\n\n")[0]


def _listed(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _losses(jobs: Mapping[str, Situation]) -> Picture:
    """Of rank 0."""
    return loss_curves({name: train(job.recipe)[0].losses for name, job in jobs.items()}, title="The loss")
