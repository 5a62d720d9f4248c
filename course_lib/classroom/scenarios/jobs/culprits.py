"""The culprits of a night, and what can be done: each is a change of a job, and no more.

A culprit draws the value of one field. `told` names the instruments that tell it from all others, the cheapest first;
`act` is what mends it, at the place that the value names. What is said of each stands in `night.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import torch

from course_lib.classroom.scenarios.jobs.job import Job
from course_lib.ranks import Link

CUT = Link(1.0, 0.5)  # a link through which nothing comes


class Culprit(NamedTuple):
    """A change of one field.

    kind: of its symptom, "slow", "learns" or "hangs".  often: shares of reports, one of which a seed chooses.
    """

    kind: str
    told: tuple[str, ...]
    act: str
    field: str
    draw: Callable[[Random, Job], Any]
    often: tuple[float, ...] = (1.0,)

    def place(self, value: Any) -> Any:
        if self.act == "setting":
            return {"saving": "patience", "stuck": where(value)}.get(self.field, self.field)
        return "" if self.act == "restart" else where(value)


def where(value: Any) -> Any:
    """The place of a fault: a device, node or shard, or how a rank is stuck."""
    return value[0] if isinstance(value, tuple) else value


def _any(*values: Any) -> Callable[[Random, Job], Any]:
    return lambda random, job: random.choice(values)


def _device(random: Random, job: Job) -> int:
    return random.randrange(job.world)


def _node(random: Random, job: Job) -> int:
    return random.randrange(job.nodes)


def _weaker(random: Random, job: Job) -> tuple[int, Link]:
    return _node(random, job), Link(job.between.latency, job.between.bandwidth * random.uniform(0.4, 0.7))


def _stuck(how: str) -> Callable[[Random, Job], Any]:
    return lambda random, job: (how, random.randrange(job.world))


PROFILE, TWICE, RECORDER = ("profile",), ("gradients", "same"), ("recorder",)
CULPRITS = {
    "throttled": Culprit(
        "slow", PROFILE, "card", "slow", lambda r, job: (_device(r, job), r.uniform(1.05, 1.3)), (1.0, 1.0, 0.6)
    ),
    "link": Culprit("slow", ("profile", "links"), "cable", "weak", _weaker, (1.0, 0.5)),
    "loader": Culprit(
        "slow", PROFILE, "node", "loading", lambda r, job: (_node(r, job), r.uniform(27, 100) * job.forward), (1.0, 0.6)
    ),
    "buckets": Culprit("slow", PROFILE, "setting", "buckets", _any(1, 2)),
    "overlap": Culprit("slow", PROFILE, "setting", "overlap", _any(False)),
    "few": Culprit("slow", PROFILE, "setting", "micro_batches", _any(2, 4)),
    "uneven": Culprit("slow", PROFILE, "setting", "layers", _any((9, 7), (10, 6), (7, 9), (6, 10))),
    "in_turn": Culprit("slow", PROFILE, "setting", "in_turn", _any(True)),
    "data": Culprit("learns", TWICE, "shard", "bad", lambda r, job: (r.randrange(job.dp), r.uniform(0.25, 0.6))),
    "corrupt": Culprit("learns", TWICE, "card", "corrupt", _device, (1.0, 0.7)),
    "apart": Culprit("learns", ("replicas",), "setting", "together", _any("none", "node")),
    "sorted": Culprit("learns", ("samples",), "setting", "order", _any("sorted")),
    "same": Culprit("learns", ("samples",), "setting", "order", _any("same")),
    "scale": Culprit("learns", ("updates",), "setting", "fixed", _any(1.25 * 2**16, 1.5 * 2**16, 2.0**17)),
    "kept": Culprit("learns", PROFILE, "setting", "master_weights", _any(False)),
    "sums": Culprit("learns", ("profile", "updates"), "setting", "sums", _any(torch.float16)),
    "rate": Culprit("learns", ("updates",), "setting", "rate", lambda r, job: r.uniform(0.01, 0.03)),
    "batch": Culprit("slow", PROFILE, "setting", "samples", lambda r, job: job.samples // r.choice((2, 4))),
    "logging": Culprit("hangs", RECORDER, "setting", "stuck", _stuck("logging")),
    "empty": Culprit("hangs", RECORDER, "setting", "stuck", _stuck("empty")),
    "worker": Culprit("hangs", RECORDER, "restart", "stuck", _stuck("loader")),
    "cut": Culprit("hangs", ("recorder", "links"), "cable", "weak", lambda r, job: (_node(r, job), CUT)),
    "saving": Culprit("hangs", RECORDER, "setting", "saving", lambda r, job: r.uniform(700, 1100)),
}
PATIENT = 3600.0  # seconds
_FIELDS = {one.field for one in CULPRITS.values() if one.act == "setting"} - {"stuck", "saving"}
SETTINGS = sorted({*_FIELDS, "patience", "logging", "empty"})


class Act(NamedTuple):
    """Something that one can do. minutes: for which the job stands still.

    mends: the fields of a job that it sets right at a place, each with the places of faults that are gone then.
    """

    minutes: int
    places: Callable[[Job], Sequence[Any]]
    mends: Callable[[Job, Any], dict[str, Sequence[Any]]]


def _at_node(job: Job, node: int) -> dict[str, Sequence[Any]]:
    devices = range(node * job.per_node, (node + 1) * job.per_node)
    return {"slow": devices, "corrupt": devices, "loading": [node], **_at_link(job, node)}


def _at_link(job: Job, node: int) -> dict[str, Sequence[Any]]:
    return {"weak": [node] if job.nodes > 2 else range(2)}  # two nodes share one way


ACTS = {
    "wait": Act(0, lambda job: [""], lambda job, place: {}),
    "restart": Act(5, lambda job: [""], lambda job, place: {"stuck": ["loader"]}),
    "setting": Act(8, lambda job: SETTINGS, lambda job, name: {"stuck": [name]}),
    "shard": Act(8, lambda job: range(job.dp), lambda job, shard: {"bad": [shard]}),
    "node": Act(20, lambda job: range(job.nodes), _at_node),
    "card": Act(10, lambda job: range(job.world), lambda job, device: {"slow": [device], "corrupt": [device]}),
    "cable": Act(10, lambda job: range(job.nodes), _at_link),
}


def mended(job: Job, planned: Job, act: str, place: Any) -> dict[str, Any]:
    """The fields that an act changes."""
    if place == "patience":
        return {place: PATIENT}
    if place in _FIELDS:
        return {place: getattr(planned, place)}
    return {field: None for field, gone in ACTS[act].mends(job, place).items() if where(getattr(job, field)) in gone}
