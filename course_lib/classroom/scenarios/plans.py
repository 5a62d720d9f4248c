"""A case that asks for a plan: two tasks, the second one harder.

A student answers four questions. None has a key: the planner tries every answer, and any plan that reaches the targets
is right.

    NAME_limit     what holds it back?         each option is a change; which one helps most?
    NAME_plan      a first plan                does it reach the first targets?
    NAME_better    a better one                does it reach tighter ones, or those of another cluster?
    NAME_defend    why this one?               the plan that was chosen beside the best that a search finds

A seed draws another model, device or link. All of it is modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from course_lib.classroom import journal
from course_lib.classroom.questions import checked, load, plan_text
from course_lib.classroom.questions.asking import choice, each, open_case, plan
from course_lib.classroom.questions.catalog import case_of
from course_lib.classroom.questions.markup import bullets
from course_lib.classroom.questions.outcome import Feedback, Outcome
from course_lib.classroom.questions.question import CaseQuestion, is_for_a_room
from course_lib.classroom.scenarios.targets import PlanTask, brief, found, machine, reaching
from course_lib.figures import devices, memory_by_part, plan_map, step_time_by_part
from course_lib.planner import Estimate, estimate

NOT_YET = "There is no debrief yet."


@dataclass(frozen=True)
class Planning:
    """A case with a plan. tasks: a first and a harder one, for each of its variants."""

    name: str
    tasks: Sequence[tuple[PlanTask, PlanTask]]

    def variant(self, seed: int = 0) -> PlanCase:
        return PlanCase(self, seed, *self.tasks[checked(seed) % len(self.tasks)])

    def questions(self) -> dict[str, CaseQuestion]:
        """The case's questions by name, for `questions.load`."""
        judged = plan(_judge, lambda task: plan_text.parse(task.now))
        asked = {
            "limit": (lambda seed: self.variant(seed).first, choice(each(_change, self.tasks[0][0].changes))),
            "plan": (lambda seed: self.variant(seed).first, judged),
            "better": (lambda seed: self.variant(seed).then, judged),
        }
        steps = {f"{self.name}_{step}": CaseQuestion(about, ask, _facts) for step, (about, ask) in asked.items()}
        defend = CaseQuestion(self.variant, open_case(PlanCase.compare), lambda variant: _facts(variant.then))
        return {**steps, f"{self.name}_defend": defend}


@dataclass(frozen=True)
class PlanCase:
    """A case with one of its pairs of tasks, chosen by the seed."""

    case: Planning
    seed: int
    first: PlanTask
    then: PlanTask

    def evidence(self) -> Feedback:
        """The evidence before any decision: the job, the machine, and the cost of the present plan."""
        task = replace(self.first, cluster=self.first.shown or self.first.cluster)
        one = task.estimate()
        facts = {
            "model": f"{task.words}; {task.model.layers} layers, {task.batch} sequences in a minibatch",
            "machine": machine(task.cluster),
            "the plan as it stands": brief(one),
        }
        pictures = [memory_by_part(devices(one), one.capacity, title="What the plan as it stands needs")]
        if task.old:
            old = task.estimate(task.old)
            facts[f"before, on {old.cluster.devices} {old.cluster.device}"] = brief(old)
            pictures.append(step_time_by_part({"before": old, "now": one}, title="The same plan, before and now"))
        said = bullets(f"{what}: {fact}" for what, fact in facts.items())
        return Feedback("", Outcome(None, said, pictures=tuple(pictures)), title="What the planner says (modelled)")

    def compare(self) -> Outcome:
        """The plan of the last answer, beside other plans."""
        note, task = journal.latest(f"{self.case.name}_better", self.seed), self.then
        mine = note and estimate(task.model, task.cluster, plan_text.parse(note.answer), task.batch)
        steps = ({"your plan": mine} if mine else {}) | self._usual()
        lines = bullets(f"{name}: {brief(one)}" for name, one in steps.items())
        said = f"{mine.interval if mine else 'You have not decided on a plan yet.'} Modelled:\n\n{lines}"
        return Outcome(None, said, pictures=(step_time_by_part(steps, title="What there was to choose from"),))

    def _usual(self) -> dict[str, Estimate]:
        """The usual changes, and the best plan that a search finds."""
        turns = {name: self.then.estimate(change) for name, change in self.then.turns.items()}
        return turns | {"best of a search": reaching(self.then).best}

    def debrief(self) -> Feedback:
        """The results of the usual changes, and published cases, once the second plan was right, or in a room."""
        if not is_for_a_room() and not load(f"{self.case.name}_better", self.seed).was_right():
            return Feedback("", Outcome(None, "First find a plan that reaches all targets."), title=NOT_YET)
        missed = {name: ", ".join(self.then.missed(one)) or "nothing" for name, one in self._usual().items()}
        said = bullets(f"{name}: {brief(one)}; misses {missed[name]}" for name, one in self._usual().items())
        incident = case_of(f"{self.case.name}_defend").sections["incident"].text
        return Feedback("", Outcome(None, said, incident), title="What usual choices lead to (modelled)")


def _facts(task: PlanTask) -> dict[str, object]:
    """The names that fields of a page may use."""
    return {"task": task, "now": task.estimate().memory, "machine": machine, "bullets": bullets}


def _change(name: str, task: PlanTask) -> Outcome:
    """Try whether a change helps more than the others: first the plan has to fit, then it has to be fast."""
    steps = {other: task.estimate(change) for other, change in task.changes.items()}
    size = -1 if task.shown else 0  # where the cluster is asked for, the smallest is best
    gains = {other: (one.fits, size * one.capacity, one.tokens_per_second) for other, one in steps.items()}
    is_all_else = isinstance(task.changes[name], tuple) and task.changes[name][0]
    beside = ({} if is_all_else else {"as it stands": task.estimate()}) | {"tried": steps[name]}
    said = " ".join(f"{who.capitalize()}: {brief(one)}." for who, one in beside.items())
    if all(one.fits for one in beside.values()):
        picture = step_time_by_part(beside, title="What the time of a step goes into")
    else:
        held = {who: one.memory for who, one in beside.items()}
        picture = memory_by_part(held, steps[name].capacity, title="What lies in the fullest device")
    return Outcome(gains[name] == max(gains.values()), f"Modelled. {said}", pictures=(picture,))


def _judge(task: PlanTask, one: Estimate) -> Outcome:
    """Judge a plan: any plan that reaches the targets is right."""
    said = f"Modelled:\n\n{bullets(target.of(one) for target in task.targets)}\n\n{one.interval}"
    if task.missed(one):
        memory = memory_by_part(devices(one), one.capacity, title="What each device of a pipeline holds")
        time = step_time_by_part({"your plan": one}, title="What the time of a step goes into")
        return Outcome(False, said, task.loosen(one), pictures=(memory, time))
    beside = {"your plan": one, "best of a search": reaching(task).best}
    held = {name: step.memory for name, step in beside.items()}
    pictures = (
        memory_by_part(held, one.capacity, title="What lies in the fullest device"),
        step_time_by_part(beside, title="What the time of a step goes into"),
        plan_map(found(task), title="Plans, and yours", marked={"your plan": one}),
    )
    return Outcome(True, said, task.rank(one), pictures=pictures)
