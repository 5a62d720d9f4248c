"""A task for a plan: a model, a cluster, and targets to compare the planner's estimate with.

Any plan that reaches them is right. Plans that the planner cannot tell from the best are as good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import NamedTuple

from course_lib.classroom.questions import plan_text
from course_lib.figures.axis import counted, memory_size
from course_lib.figures.words import plan_in_words
from course_lib.planner import Cluster, Estimate, Found, ModelSpec, estimate, explain, search
from course_lib.planner.search import ALIKE

_search = cache(search)  # both tasks of a case may search the same plans
Change = str | tuple[str, Cluster]


class Target(NamedTuple):
    """A target. is_least: whether the limit is the least, else the most."""

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
class PlanTask:
    """A task for a plan, which has to be fast: to reach this share of the speed of the best that reaches the rest.

    words: the model.  now: the present plan, as in `plan_text`.  goal: in a sentence or two.

    within: the share of a device's memory that it may need, with any software.  bubble: the largest share of a step.
    waiting: for each link, the largest share of a step in which a device waits for it.
    changes: of the present plan, or of the plan and the cluster.  turns: what people often do, by name.
    old: the plan, or plan and cluster, before a refresh.
    shown: the cluster of the evidence, where the first question asks which cluster it should be.
    """

    words: str
    model: ModelSpec
    cluster: Cluster
    batch: int
    now: str
    share: float = 1 / ALIKE
    goal: str = ""
    within: float = 1.0
    bubble: float = 1.0
    waiting: Mapping[str, float] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    turns: Mapping[str, str] = field(default_factory=dict)
    old: Change | None = None
    shown: Cluster | None = None

    def estimate(self, change: Change = "") -> Estimate:
        """The estimate of the present plan with a change."""
        text, cluster = (change, self.cluster) if isinstance(change, str) else change
        said = plan_text.pairs(self.now) | (plan_text.pairs(text) if text else {})
        plan = plan_text.parse(" ".join(f"{name}={value}" for name, value in said.items()))
        return estimate(self.model, cluster, plan, self.batch)

    @property
    def room(self) -> float:
        """The bytes of a device that a plan may need."""
        return self.within * self.cluster.spec.memory

    @cached_property
    def targets(self) -> list[Target]:
        most = max(one.tokens_per_second for one in found(self) if all(limit.is_reached(one) for limit in self._limits))
        least = float(f"{0.995 * self.share * most:.2e}")  # three digits, rounded down
        fast = Target("tokens a second", lambda one: one.tokens_per_second, least, "{:,.0f}".format, is_least=True)
        return [*self._limits, fast]

    @property
    def _limits(self) -> list[Target]:
        """The targets that do not depend on other plans."""
        return [
            Target("memory, with any software", lambda one: one.memory.high, self.room, memory_size),
            *([Target("bubble", lambda one: one.bubble, self.bubble)] if self.bubble < 1 else []),
            *(Target(f"waiting for {link}", partial(waiting, link), share) for link, share in self.waiting.items()),
        ]

    def missed(self, one: Estimate) -> list[str]:
        return [target.name for target in self.targets if not target.is_reached(one)]

    def loosen(self, one: Estimate) -> str:
        """Sentences about what binds a plan, and what would help."""
        return explain.why(one.plan, one.memory, self.room, one.step_time.parts)

    def rank(self, one: Estimate) -> str:
        """Compare a plan that reaches its targets with the best that a search finds."""
        all_reaching, seconds = reaching(self), one.step_time.total
        best = all_reaching.best
        if seconds <= ALIKE * best.step_time.total:
            n = counted(len(all_reaching.tied), "plan")
            return f"The planner cannot tell it from the best that a search finds: {n} that reach all are as near."
        faster = counted(sum(other.step_time.total < seconds for other in all_reaching), "faster plan")
        return f"A search finds {faster} that reach all targets, too; the best is {brief(best)}."


def found(task: PlanTask) -> Found:
    return _search(task.model, task.cluster, task.batch, task.within)


@cache
def reaching(task: PlanTask) -> Found:
    """The plans of the search that reach all targets."""
    return Found([one for one in found(task) if not task.missed(one)], task.within)


def machine(cluster: Cluster) -> str:
    between = f", {cluster.between} between nodes" if cluster.nodes > 1 else ""
    each = f"{cluster.devices_per_node} {cluster.device} with {memory_size(cluster.spec.memory)} each"
    return f"{counted(cluster.nodes, 'node')} of {each}, {cluster.inside_link.name} inside a node{between}"


def waiting(link: str, one: Estimate) -> float:
    """The share of a step in which a device waits for a link."""
    return sum(flow.exposed for flow in one.flows.values() if flow.link == link) / one.step_time.total


def brief(one: Estimate) -> str:
    need = memory_size(one.memory.total) + f", {one.fit}" * (not one.fits)
    return f"{plan_in_words(one.plan)}, in {one.plan.precision}: {need}, {one.tokens_per_second:,.0f} tokens a second"
