"""Defaults for many teams (S4): a policy makes a plan for any team, and is tried on a dozen models and clusters.

    def policy(model, cluster, global_batch):
        return Plan(dp=cluster.devices)

    from lessons.S04_defaults import fleet
    fleet.trial(policy)             where it fits, and its time beside the best plan's; the worst first
    fleet.hand_in(policy)           the same for six pairs that are drawn now, so that nobody has seen them

A policy may ask for BUDGET estimates for each pair, in whatever way: a default is explained, a search is not.

The fleet is in fleet.json, the larger models in the shapes of Llama 3 (Llama Team 2024, table 3). Its
best plans are the results of `search`; a test searches again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from html import escape
from math import inf, isfinite
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, NamedTuple

from course_lib.classroom import journal
from course_lib.classroom.questions import plan_text
from course_lib.figures.axis import memory_size
from course_lib.figures.words import plan_in_words
from course_lib.planner import Cluster, ModelSpec, Plan, estimate, search
from course_lib.planner.estimate import unchecked_estimate

Policy = Callable[[ModelSpec, Cluster, int], Any]
COLUMNS = "model and cluster", "times the best", "plan (modelled)"
FAIR = 1.5  # the time of a fair plan over the best plan's
BUDGET, UNSEEN = 48, 6
ROOM = 0.6  # of a device's memory: the largest share of a model's state, 16 bytes a parameter, for a pair to be fair


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
    def score(self) -> float:
        """The times of the worst plan that runs."""
        return self.running[0].times if self.running else inf

    def __str__(self) -> str:
        said = f"It runs on {len(self.running)} of {len(self.trials)}."
        if not self.running:
            return said
        return f"{said} The worst that runs is {self.score:.2f} times as long as the best plan: {self.running[0].pair}."

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        rows = [
            (one.pair, f"{one.times:.2f}" if isfinite(one.times) else "does not run", one.said) for one in self.trials
        ]
        cells = ("".join(f"<td style='text-align:left'>{escape(cell)}</td>" for cell in row) for row in rows)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        head = "".join(f"<th style='text-align:left'>{name}</th>" for name in COLUMNS)
        html = f"<p>{escape(str(self))}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return {"text/plain": "\n".join([str(self), *map("  ".join, rows)]), "text/html": html}


def hand_in(policy: Policy) -> Trials:
    """Try it on pairs drawn now, and keep the result in the journal; right if no plan is slower than FAIR."""
    found = trial(policy, dict(_drawn(Random())))
    with suppress(OSError):  # such as a folder without permission to write
        journal.record("ran", "S4_policy", 0, str(found), found.trials[0].times <= FAIR)
    return found


def trial(policy: Policy, pairs: Mapping[str, Pair] = FLEET) -> Trials:
    """Ask the policy for a plan for each model and cluster; an error that it raises becomes a sentence."""
    found = (Trial(name, *_try(policy, *pair)) for name, pair in pairs.items())
    return Trials(sorted(found, key=lambda one: -one.times))


def _drawn(random: Random) -> Iterator[tuple[str, Pair]]:
    """Pairs of the fleet's models and clusters, mixed and in other sizes, whose best plan fits; by name."""
    names = set[str]()
    while len(names) < UNSEEN:
        (model, *_), (_, seen, *_) = random.choices(list(FLEET.values()), k=2)
        cluster = replace(seen, nodes=random.choice((1, 2, 4))) if seen.nodes > 1 else replace(seen, devices_per_node=8)
        model = replace(model, sequence=min(model.sequence, 8192) * random.choice((1, 1, 2)))
        batch, where = random.choice((64, 128, 256)), f"{cluster.devices} {cluster.device}, {cluster.between}"
        name = f"{model.parameters / 1e9:.1f}B, {model.sequence:,} tokens, batch {batch}, on {where}"
        if name in names or 16 * model.parameters > ROOM * cluster.devices * cluster.spec.memory:
            continue
        if (best := search(model, cluster, batch)[0]).fits:
            names.add(name)
            yield name, Pair(model, cluster, batch, best.plan)


@contextmanager
def _counted() -> Iterator[list[int]]:
    """The number of estimates made inside, also by a search: a list with this one number."""
    made, before = [0], sys.getprofile()

    def watch(frame: FrameType, event: str, _: object) -> None:
        made[0] += event == "call" and frame.f_code is unchecked_estimate.__code__

    sys.setprofile(watch)
    try:
        yield made
    finally:
        sys.setprofile(before)


def _try(policy: Policy, model: ModelSpec, cluster: Cluster, batch: int, best: Plan) -> tuple[float, str]:
    """The plan's time over the best plan's, and the plan in words, or its flaw."""
    try:
        with _counted() as made:
            plan = policy(model, cluster, batch)
    except Exception as error:
        return inf, f"The policy raised {type(error).__name__}: {error}"
    if made[0] > BUDGET:
        return inf, f"The policy asked for {made[0]:,} estimates; {BUDGET} are allowed, so try fewer plans."
    if not isinstance(plan, Plan):
        return inf, f"A Plan is asked for, and this is of type {type(plan).__name__}."
    try:
        found = estimate(model, cluster, plan, batch)
    except (ValueError, TypeError) as error:
        return inf, f"There can be no such plan: {error}"
    if not found.fits:
        low, high, there = map(memory_size, (found.memory.low, found.memory.high, found.capacity))
        largest = max(found.memory.parts, key=found.memory.parts.__getitem__)
        needs = f"It {found.fit}: {low} to {high} by the software, {largest} above all, and {there} are there."
        return inf, f"{plan_in_words(plan)}. {needs}"
    return found.step_time.total / estimate(model, cluster, best, batch).step_time.total, plan_in_words(plan)
