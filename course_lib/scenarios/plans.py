"""A case that asks for a plan: a model, a cluster, and what a plan for them must reach.

What a student decides are four questions. None has a key: the planner tries every answer, and any plan will do that
reaches the targets.

    NAME_limit     what holds it back?         each option is a change; which one helps most?
    NAME_plan      a first plan                does it reach the first targets?
    NAME_better    a better one                does it reach tighter ones, or those of another cluster?
    NAME_defend    why this one?               the plan that was chosen beside the best that a search finds

A plan that reaches its targets is ranked: those that the planner cannot tell apart from the best are as good. A seed
draws another model, device or link. All of it is modelled.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from string import Formatter
from typing import NamedTuple

from course_lib import journal
from course_lib.figures import devices, memory_by_part, plan_map, step_time_by_part
from course_lib.figures.axis import counted, memory_size
from course_lib.figures.words import plan_in_words
from course_lib.planner import Cluster, Estimate, Found, ModelSpec, estimate, explain, search
from course_lib.planner.hardware import half_width
from course_lib.questions import plan_text
from course_lib.questions.asking import Ask, choice, each, open_case, plan
from course_lib.questions.catalog import CATALOG
from course_lib.questions.outcome import Feedback, Outcome
from course_lib.questions.question import Question

ALIKE = math.exp(half_width(stacks=1, measured=1))  # so many times as long, two plans cannot be told apart
Change = str | tuple[str, Cluster]


class Target(NamedTuple):
    """What a plan must reach. is_least: else the limit is the most."""

    name: str
    measure: Callable[[Estimate], float]
    limit: float
    write: Callable[[float], str] = "{:.1%}".format
    is_least: bool = False

    def is_reached(self, one: Estimate) -> bool:
        value = self.measure(one)
        return value >= self.limit if self.is_least else value <= self.limit

    def of(self, one: Estimate) -> str:
        return f"{self}; it has {self.write(self.measure(one))}: {'reached' if self.is_reached(one) else 'missed'}"

    def __str__(self) -> str:
        return f"{self.name}: {'at least' if self.is_least else 'at most'} {self.write(self.limit)}"


@dataclass(frozen=True, eq=False)
class Task:
    """words: the model.  now: the plan as it stands, as in `plan_text`.  old: before a refresh, with that plan.

    tokens: a second, at least.  within: the share of a device's memory that a plan may need.  bubble: the share of a
    step that it may be.  waiting: of each link, the share of a step in which a device may wait for it.
    changes: of the plan as it stands, or of that and the cluster.  turns: what people often do, by name.
    """

    words: str
    model: ModelSpec
    cluster: Cluster
    batch: int
    now: str
    tokens: int
    within: float = 0.95
    bubble: float | None = None
    waiting: Mapping[str, float] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    turns: Mapping[str, str] = field(default_factory=dict)
    old: tuple[str, Cluster] | None = None

    def estimate(self, change: Change = "") -> Estimate:
        """Of the plan as it stands, with this changed."""
        text, cluster = (change, self.cluster) if isinstance(change, str) else change
        said = plan_text.pairs(self.now) | (plan_text.pairs(text) if text else {})
        changed = plan_text.parse(" ".join(f"{name}={value}" for name, value in said.items()))
        return estimate(self.model, cluster, changed, self.batch)

    @property
    def room(self) -> float:
        """Bytes of a device that a plan may need."""
        return self.within * self.cluster.spec.memory

    @property
    def targets(self) -> list[Target]:
        write = "{:,.0f}".format
        return [
            Target("memory of the fullest device", lambda one: one.memory.total, self.room, memory_size),
            Target("tokens a second", lambda one: one.tokens_per_second, self.tokens, write, is_least=True),
            *(Target("bubble", lambda one: one.bubble, share) for share in [self.bubble] if share),
            *(Target(f"waiting for {link}", partial(waiting, link), share) for link, share in self.waiting.items()),
        ]

    def missed(self, one: Estimate) -> list[str]:
        return [target.name for target in self.targets if not target.is_reached(one)]

    def loosen(self, one: Estimate) -> str:
        """What keeps a plan from its targets, and what would help."""
        parts = one.step_time.parts
        why = explain.why(self.model, one.plan, self.batch, one.memory, self.room, parts)
        losses = ["bubble"] * ("bubble" in self.missed(one))
        for link in self.waiting:
            if f"waiting for {link}" in self.missed(one):
                losses.append(max(one.flows, key=lambda name: (one.flows[name].link == link, one.flows[name].exposed)))
        remedies = (f"Too much of it is {what}: {how}." for what, how in map(explain.LOSSES.__getitem__, losses))
        return " ".join([why, *(remedy for remedy in remedies if remedy[-40:-1] not in why)])

    @cached_property
    def found(self) -> Found:
        return search(self.model, self.cluster, self.batch, self.within)

    @cached_property
    def reaching(self) -> Found:
        """The plans of the search that reach all targets."""
        return Found([one for one in self.found if not self.missed(one)], self.within)

    def rank(self, one: Estimate) -> str:
        """A plan that reaches its targets, beside the best that a search finds."""
        best, seconds = self.reaching.best, one.step_time.total
        alike = counted(len(self.reaching.tied), "plan")
        if seconds <= ALIKE * best.step_time.total:
            return f"The planner cannot tell it from the best that a search finds; {alike} are as near."
        faster = sum(other.step_time.total < seconds for other in self.reaching)
        return f"A search finds {counted(faster, 'faster plan')} that reach all targets; the best is {_brief(best)}."

    @property
    def machine(self) -> str:
        cluster = self.cluster
        nodes = f"{counted(cluster.nodes, 'node')} of {cluster.devices_per_node} {cluster.device}"
        between = f", {cluster.between} between nodes" if cluster.nodes > 1 else ""
        return (
            f"{nodes} with {memory_size(cluster.spec.memory)} each, {cluster.inside_link.name} inside a node{between}"
        )

    @property
    def fields(self) -> dict[str, object]:
        """What pages may say of it."""
        states = f"{16 * self.model.parameters / 1e9:,.0f} GB"
        return {"model": self.words, "machine": self.machine, "targets": _listed(self.targets), "states": states}


def waiting(link: str, one: Estimate) -> float:
    """The share of a step in which a device waits for a link."""
    return sum(flow.exposed for flow in one.flows.values() if flow.link == link) / one.step_time.total


def _brief(one: Estimate) -> str:
    fits = "" if one.fits else ", does not fit"
    tokens = f"{one.tokens_per_second:,.0f} tokens a second"
    return f"{plan_in_words(one.plan)}, in {one.plan.precision}: {memory_size(one.memory.total)}{fits}, {tokens}"


def _listed(lines: Sequence[object]) -> str:
    return "\n".join(f"- {line}" for line in lines)


@dataclass(frozen=True)
class Planning:
    """A case. tasks: its variants, each with a first task and a harder one."""

    name: str
    tasks: Sequence[tuple[Task, Task]]

    def variant(self, seed: int = 0) -> Variant:
        return Variant(self, seed)

    def questions(self) -> dict[str, Step]:
        """By name: what `questions.load` looks up."""
        steps = {
            "limit": lambda variant: choice(each(_change, variant.first.changes)),
            "plan": lambda variant: plan(_judge, lambda task: plan_text.parse(task.now)),
            "better": lambda variant: plan(_judge, lambda task: plan_text.parse(task.now)),
            "defend": lambda variant: open_case(lambda task: variant.compare()),
        }
        return {f"{self.name}_{step}": Step(self, ask, step in ("better", "defend")) for step, ask in steps.items()}


@dataclass(frozen=True)
class Step:
    """One question of a case. is_harder: about the second task."""

    case: Planning
    ask: Callable[[Variant], Ask]
    is_harder: bool

    def question(self, name: str, seed: int = 0) -> Question:
        variant = self.case.variant(seed)
        task, page = variant.then if self.is_harder else variant.first, CATALOG[name]
        page = replace(page, sections={key: text for key, text in page.sections.items() if key != "debrief"})
        said = {field for section in page.sections.values() for _, field, _, _ in Formatter().parse(section.text)}
        page = page.fill({key: value for key, value in task.fields.items() if key in said})
        return Question(name, seed, page.text, self.ask(variant)(page, task), varies=False)


@dataclass(frozen=True)
class Variant:
    """A case with one of its pairs of tasks, chosen by the seed."""

    case: Planning
    seed: int = 0

    @property
    def first(self) -> Task:
        return self.case.tasks[self.seed % len(self.case.tasks)][0]

    @property
    def then(self) -> Task:
        return self.case.tasks[self.seed % len(self.case.tasks)][1]

    def evidence(self) -> Feedback:
        """What is known before anybody decides: the job, and what the planner says of its plan."""
        task, one = self.first, self.first.estimate()
        facts = [
            f"model: {task.model.parameters / 1e9:.1f} billion parameters, {task.model.layers} layers, "
            f"sequences of {task.model.sequence:,} tokens, {task.batch} of them in a minibatch",
            f"machine: {task.machine}",
            f"the plan as it stands: {_brief(one)}",
        ]
        pictures = [memory_by_part(devices(one), one.capacity, title="The plan as it stands")]
        if task.old:
            steps = {"before": task.estimate(task.old), "now": one}
            facts.insert(
                2, f"the same plan before, on {task.old[1].devices} {task.old[1].device}: {_brief(steps['before'])}"
            )
            pictures.append(step_time_by_part(steps, title="The same plan, before and now"))
        return Feedback("", Outcome(None, _listed(facts), pictures=tuple(pictures)))

    def compare(self) -> Outcome:
        """The plan that was last decided on, and what else one might have chosen."""
        mine = self._latest()
        chosen = {**({"your plan": mine} if mine else {}), **self.then.turns}
        steps = {name: self.then.estimate(change) for name, change in chosen.items()}
        steps["best of a search"] = self.then.reaching.best
        said = "" if mine else "You have not decided on a plan yet, so here is what there is to choose from. "
        lines = [f"{name}: {_brief(one)}" for name, one in steps.items()]
        said = f"{said}Modelled:\n\n{_listed(lines)}\n\n{next(iter(steps.values())).interval}"
        return Outcome(None, said, pictures=(step_time_by_part(steps, title="What you chose among"),))

    def debrief(self, anyway: bool = False) -> Feedback:
        """What the usual turns lead to, and where it has happened. Not before a plan has reached all targets."""
        name = f"{self.case.name}_better"
        if not anyway and not any(
            (note.question, note.seed, note.right) == (name, self.seed, True) for note in journal.notes()
        ):
            return Feedback("", Outcome(None, "There is no debrief yet. First find a plan that reaches all targets."))
        lines = [self._turn(name, self.then.estimate(change)) for name, change in self.then.turns.items()]
        best = f"best of a search: {_brief(self.then.reaching.best)}"
        said = f"What plans lead to that people often choose (modelled):\n\n{_listed([*lines, best])}"
        return Feedback("", Outcome(None, said, CATALOG[f"{self.case.name}_defend"].sections["debrief"].text))

    def _turn(self, name: str, one: Estimate) -> str:
        missed = ", ".join(self.then.missed(one))
        return f"{name}: {_brief(one)}; {f'misses {missed}' if missed else 'reaches all targets'}"

    def _latest(self) -> str:
        note = journal.latest(f"{self.case.name}_better", self.seed)
        with contextlib.suppress(ValueError):  # of an older edition of the course
            return plan_text.write(self.then.estimate(note.answer).plan) if note else ""
        return ""


# What becomes of an answer


def _change(name: str, task: Task) -> Outcome:
    """Does this change help more than the others? First it has to fit, then it has to be fast."""
    steps = {each: task.estimate(change) for each, change in task.changes.items()}
    gain = {each: (one.fits, one.tokens_per_second) for each, one in steps.items()}
    one, change, now = steps[name], task.changes[name], task.estimate()
    before = {} if isinstance(change, tuple) and change[0] else {"as it stands": now}  # else nothing is as it was
    beside = {**before, "tried": one}
    said = f"Modelled. {' '.join(f'{who.capitalize()}: {_brief(step)}.' for who, step in beside.items())}"
    if all(step.fits for step in beside.values()):
        picture = step_time_by_part(beside, title="What the time of a step goes into")
    else:
        memories = {who: step.memory for who, step in beside.items()}
        picture = memory_by_part(memories, one.capacity, title="What lies in the fullest device")
    return Outcome(gain[name] == max(gain.values()), said, pictures=(picture,))


def _judge(task: Task, one: Estimate) -> Outcome:
    """Any plan that reaches the targets will do."""
    said = f"Modelled:\n\n{_listed([target.of(one) for target in task.targets])}\n\n{one.interval}"
    if task.missed(one):
        memory = memory_by_part(devices(one), task.room, title="Your plan: what each device of a pipeline holds")
        time = step_time_by_part({"your plan": one}, title="What the time of a step goes into")
        return Outcome(False, said, task.loosen(one), pictures=(memory, time))
    beside = {"your plan": one, "best of a search": task.reaching.best}
    memories = {name: step.memory for name, step in beside.items()}
    pictures = (
        memory_by_part(memories, one.capacity, title="What lies in the fullest device"),
        step_time_by_part(beside, title="What the time of a step goes into"),
        plan_map(task.found, title="Every plan, and yours", marked={"your plan": one}),
    )
    return Outcome(True, said, task.rank(one), pictures=pictures)
