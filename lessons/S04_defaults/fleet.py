"""Defaults for many teams (S4): a policy makes a plan for any team, and is tried on a dozen models and clusters.

    def policy(model, cluster, global_batch):
        return Plan(dp=cluster.devices)

    from lessons.S04_defaults import fleet
    fleet.trial(policy)             where it fits, and its time beside the best plan's; the worst first

The fleet is in fleet.json, the larger models in the shapes of Llama 3 (Llama Team 2024, table 3). Its
best plans are the results of `search`; a test searches again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from math import inf, isfinite
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from course_lib.classroom import journal
from course_lib.classroom.questions import plan_text
from course_lib.figures.words import plan_in_words
from course_lib.planner import Cluster, ModelSpec, Plan, estimate

Policy = Callable[[ModelSpec, Cluster, int], Any]
COLUMNS = "model and cluster", "times the best", "plan (modelled)"
GOOD, FAIR = 1.1, 1.5  # the time of a good plan, and of a fair one, over the best plan's


class Pair(NamedTuple):
    """A model on a cluster, and the fastest plan there."""

    model: ModelSpec
    cluster: Cluster
    batch: int
    best: Plan


FLEET = {
    name: Pair(ModelSpec(**of["model"]), Cluster(**of["cluster"]), of["batch"], plan_text.parse(of["best"]))
    for name, of in json.loads(Path(__file__).with_name("fleet.json").read_text(encoding="utf-8")).items()
}


class Trial(NamedTuple):
    """One plan of a policy. times: its step time over the best plan's; infinite if it does not run.

    said: the plan, or its flaw.
    """

    pair: str
    times: float
    said: str


@dataclass(frozen=True)
class Trials:
    """All trials of a policy, the worst first; a notebook shows them as a table."""

    trials: list[Trial]

    @property
    def running(self) -> list[Trial]:
        return [one for one in self.trials if isfinite(one.times)]

    @property
    def typical(self) -> float:
        """The geometric mean of the times of the plans that run."""
        return geometric_mean([one.times for one in self.running]) if self.running else inf

    def __str__(self) -> str:
        good = sum(one.times <= GOOD for one in self.running)
        said = f"It runs on {len(self.running)} of {len(self.trials)}."
        if not self.running:
            return said
        typical = f"it takes {self.typical:.2f} times as long as the best plan in the mean"
        return f"{said} Where it runs, {typical}, and at most {GOOD} times as long on {good}."

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        rows = [
            (one.pair, f"{one.times:.2f}" if isfinite(one.times) else "does not run", one.said) for one in self.trials
        ]
        cells = ("".join(f"<td style='text-align:left'>{escape(cell)}</td>" for cell in row) for row in rows)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        head = "".join(f"<th style='text-align:left'>{name}</th>" for name in COLUMNS)
        html = f"<p>{escape(str(self))}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return {"text/plain": "\n".join([str(self), *map("  ".join, rows)]), "text/html": html}


def trial(policy: Policy) -> Trials:
    """Try a student's policy, and keep the result in the journal; right if no plan is slower than FAIR."""
    found = tried(policy)
    with suppress(OSError):  # such as a folder without permission to write
        journal.record("ran", "S4_policy", 0, str(found), found.trials[0].times <= FAIR)
    return found


def tried(policy: Policy) -> Trials:
    """Ask the policy for a plan for each model and cluster; an error that it raises becomes a sentence."""
    found = (Trial(name, *_try(policy, *pair)) for name, pair in FLEET.items())
    return Trials(sorted(found, key=lambda one: -one.times))


def _try(policy: Policy, model: ModelSpec, cluster: Cluster, batch: int, best: Plan) -> tuple[float, str]:
    """The plan's time over the best plan's, and the plan in words, or its flaw."""
    try:
        plan = policy(model, cluster, batch)
    except Exception as error:
        return inf, f"The policy raised {type(error).__name__}: {error}"
    if not isinstance(plan, Plan):
        return inf, f"A Plan is asked for, and this is of type {type(plan).__name__}."
    try:
        found = estimate(model, cluster, plan, batch)
    except (ValueError, TypeError) as error:
        return inf, f"There can be no such plan: {error}"
    if not found.fits:
        return inf, f"{plan_in_words(plan)}. {found.why}"
    return found.step_time.total / estimate(model, cluster, best, batch).step_time.total, plan_in_words(plan)
