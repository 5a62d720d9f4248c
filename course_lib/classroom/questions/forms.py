"""The ways to answer a question: choose, give a number, put in order, plan, write.

Each form reads an answer (typed by a student, or kept in a file), puts it in words, and runs it. No form holds a key:
the run says whether an answer is right.

    read(given)    the answer in its one written form; ValueError, saying what would work, if it is no answer
    words(answer)  the answer in words
    run(answer)    an Outcome
    reveal()       the outcomes of all that can be run without an answer, for a room; not of an order or a plan
    why            the explanation of each answer, for pages that run nothing
    lines          the options or events, as they are shown
    example        an answer, to show how one is written
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isnan
from string import ascii_lowercase
from typing import Any

from course_lib.classroom.questions import plan_text, units
from course_lib.classroom.questions.markup import bullets
from course_lib.classroom.questions.outcome import Outcome
from course_lib.figures.words import plan_in_words
from course_lib.planner import Cluster, Estimate, ModelSpec, Plan, estimate
from course_lib.planner.spec import PLANNED, RECOMPUTE, divisors


@dataclass(frozen=True)
class Option:
    """One of several answers. run: its experiment.  why: the meaning of what the experiment shows."""

    text: str
    run: Callable[[], Outcome]
    why: str


@dataclass(frozen=True)
class Choice:
    """Options, called a, b, c and so on."""

    options: tuple[Option, ...]
    example = "a"

    @property
    def letters(self) -> str:
        return ascii_lowercase[: len(self.options)]

    @property
    def lines(self) -> list[str]:
        return [f"{letter}  {option.text}" for letter, option in zip(self.letters, self.options, strict=True)]

    def read(self, given: Any) -> str:
        letter = str(given).strip().lower()
        if len(letter) != 1 or letter not in self.letters:
            raise ValueError(f"answer={given!r} is not an option; choose one of {', '.join(self.letters)}")
        return letter

    def words(self, answer: str) -> str:
        return f"{answer}, {self._option(answer).text}"

    def run(self, answer: str) -> Outcome:
        option = self._option(answer)
        return replace(option.run(), why=option.why)

    def reveal(self) -> list[tuple[str, Outcome]]:
        return [(self.words(letter), self.run(letter)) for letter in self.letters]

    @property
    def why(self) -> str:
        return "\n\n".join(f"{self.words(letter)}: {self._option(letter).why}" for letter in self.letters)

    def _option(self, letter: str) -> Option:
        return self.options[self.letters.index(letter)]


@dataclass(frozen=True)
class Number:
    """A number with its unit.

    measure: runs it and reads the number off.  why: how to find it.  slips: factors by which an answer may be off,
        beside those of units.  tolerance: the share of the measured value by which an answer may differ.
    """

    quantity: units.Quantity
    measure: Callable[[], Outcome]
    why: str
    slips: tuple[units.Slip, ...] = ()
    tolerance: float = 0.01
    lines = ()

    @property
    def example(self) -> str:
        return self.quantity.example

    def read(self, given: Any) -> str:
        text = str(given).strip()
        units.parse(text, self.quantity)
        return text

    def words(self, answer: str) -> str:
        return answer

    def run(self, answer: str) -> Outcome:
        outcome, given = self.measure(), units.parse(answer, self.quantity)
        if isnan(outcome.measured):
            return outcome
        right = units.is_close(given, outcome.measured, self.tolerance)
        slip = "" if right else units.explain(given, outcome.measured, self.quantity, self.slips, self.tolerance)
        return replace(outcome, right=right, why=f"{slip}\n\n{self.why}" if slip else self.why)

    def reveal(self) -> list[tuple[str, Outcome]]:
        return [("", replace(self.measure(), why=self.why))]


@dataclass(frozen=True)
class Ordering:
    """Events to put in order; the order is a program, and `execute` runs it.

    events: the text of each event by its name, in the order in which they are shown at first.
    why: the rule that a right order respects. An outcome may have a meaning of its own, below what happened.
    worker: who does an event; what comes of an order depends on each worker's own events alone.
    """

    events: dict[str, str]
    execute: Callable[[tuple[str, ...]], Outcome]
    why: str
    worker: Callable[[str], int] = lambda event: 0

    @property
    def lines(self) -> list[str]:
        return list(self.events.values())

    @property
    def example(self) -> str:
        return " ".join(self.events)

    def read(self, given: Any) -> list[str]:
        names = given.split() if isinstance(given, str) else list(given)
        if sorted(names) != sorted(self.events):
            raise ValueError(f"answer={given!r} has to name each of these once: {' '.join(self.events)}")
        return names

    def words(self, answer: Sequence[str]) -> str:
        return " → ".join(answer)

    def run(self, answer: Sequence[str]) -> Outcome:
        outcome = self.execute(tuple(answer))
        happened, _, meaning = outcome.happened.partition("\n\n")
        return replace(outcome, happened=happened, why=meaning or self.why)


@dataclass(frozen=True)
class FreeText:
    """A few sentences, to be compared with a model answer by the student.

    experiment: a run to compare the text with.  checklist: the points of a good answer.
    """

    experiment: Callable[[], Outcome]
    model_answer: str
    checklist: tuple[str, ...]
    example, lines = "...", ()

    def read(self, given: Any) -> str:
        text = str(given).strip()
        if not text:
            raise ValueError("answer is empty; write a sentence or two first, then compare")
        return text

    def words(self, answer: str) -> str:
        return f"“{answer}”"

    def run(self, answer: str) -> Outcome:
        return replace(self.experiment(), right=None, why=self.why)

    def reveal(self) -> list[tuple[str, Outcome]]:
        return [("", self.run(""))]

    @property
    def compared(self) -> str:
        """The model answer that an answer is compared with."""
        return f"A good answer: {self.model_answer}"

    @property
    def why(self) -> str:
        return f"{self.compared}\n\nDoes yours say this?\n\n{bullets(self.checklist)}"


@dataclass(frozen=True)
class PlanForm:
    """A plan for this model, cluster and batch, written as in `plan_text`.

    judge: tries a plan.  why: the reasons for a right plan.  start: the first plan shown.
    """

    model: ModelSpec
    cluster: Cluster
    global_batch: int
    judge: Callable[[Estimate], Outcome]
    why: str
    start: Plan

    @property
    def choices(self) -> dict[str, list[str]]:
        """The fields to decide, and the values to choose from. Any other field of a plan can be written, too."""
        devices, layers = divisors(self.cluster.devices), self.model.layers
        each = sorted({v for whole in (layers, layers + 2) for v in divisors(whole) if v <= layers // 2})
        listed = {
            **dict.fromkeys(("dp", "tp", "pp"), devices),
            "micro_batch": divisors(self.global_batch),
            "schedule": PLANNED,
            "virtual_stages": each,
            "zero": range(4),
            "recompute": RECOMPUTE,
            "sequence_parallel": (False, True),
            "precision": self.cluster.spec.peak,
        }
        return {name: [str(value) for value in values] for name, values in listed.items()}

    @property
    def lines(self) -> list[str]:
        return [f"{name}: {', '.join(values)}" for name, values in self.choices.items()]

    @property
    def example(self) -> str:
        return plan_text.write(self.start)

    def read(self, given: Any) -> str:
        plan = given if isinstance(given, Plan) else plan_text.parse(str(given))
        self.estimate(plan)
        return plan_text.write(plan)

    def words(self, answer: str) -> str:
        plan = plan_text.parse(answer)
        return f"{plan_in_words(plan)}, in {plan.precision}"

    def run(self, answer: str) -> Outcome:
        outcome = self.judge(self.estimate(plan_text.parse(answer)))
        return replace(outcome, why="\n\n".join(filter(None, [outcome.why, self.why if outcome.right else ""])))

    def estimate(self, plan: Plan) -> Estimate:
        """Estimate a plan. Raises ValueError, saying what to change, for a plan that is impossible here."""
        return estimate(self.model, self.cluster, plan, self.global_batch)


Form = Choice | Number | Ordering | PlanForm | FreeText
