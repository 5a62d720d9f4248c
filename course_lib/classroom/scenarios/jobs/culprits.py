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

Fields = dict[str, Any]
CUT = Link(1.0, 0.5)  # a link through which nothing comes


class Culprit(NamedTuple):
    """A change of one field.

    kind: of its symptom, "slow", "learns", "breaks" or "hangs".  often: shares of reports, one of which a seed chooses.
    """

    kind: str
    told: tuple[str, ...]
    act: str
    field: str
    draw: Callable[[Random, Job], Any]
    often: tuple[float, ...] = (1.0,)

    def place(self, value: Any) -> Any:
        if self.act == "setting":
            return "patience" if self.field == "saving" else value[0] if self.field == "stuck" else self.field
        return "" if self.act == "restart" else value[0] if isinstance(value, tuple) else value


def _any(*values: Any) -> Callable[[Random, Job], Any]:
    return lambda random, job: random.choice(values)


def _device(random: Random, job: Job) -> int:
    return job.device(random.randrange(job.world))


def _weaker(random: Random, job: Job) -> tuple[int, Link]:
    return random.choice(job.nodes), Link(job.between.latency, job.between.bandwidth * random.uniform(0.4, 0.62))


def _stuck(how: str) -> Callable[[Random, Job], Any]:
    return lambda random, job: (how, random.randrange(job.world))


PROFILE, TWICE, RECORDER = ("profile",), ("gradients", "same"), ("recorder",)
CULPRITS = {
    "throttled": Culprit(
        "slow", PROFILE, "card", "slow", lambda r, job: (_device(r, job), r.uniform(1.05, 1.3)), (1.0, 1.0, 0.6)
    ),
    "link": Culprit("slow", ("profile", "links"), "cable", "weak", _weaker, (1.0, 0.5)),
    "loader": Culprit(
        "slow", PROFILE, "node", "loading", lambda r, job: (r.choice(job.nodes), r.uniform(0.8, 3.0)), (1.0, 0.6)
    ),
    "buckets": Culprit("slow", PROFILE, "setting", "buckets", _any(1, 2)),
    "overlap": Culprit("slow", PROFILE, "setting", "overlap", _any(False)),
    "few": Culprit("slow", PROFILE, "setting", "micro_batches", _any(2, 4)),
    "uneven": Culprit("slow", PROFILE, "setting", "layers", _any((9, 7), (10, 6), (7, 9), (6, 10))),
    "in_turn": Culprit("slow", ("placement",), "setting", "in_turn", _any(True)),
    "data": Culprit("learns", TWICE, "shard", "bad", lambda r, job: (r.randrange(job.dp), r.uniform(0.3, 0.6))),
    "corrupt": Culprit("learns", TWICE, "card", "corrupt", _device, (1.0, 0.7)),
    "apart": Culprit("learns", ("replicas",), "setting", "together", _any("none", "node")),
    "sorted": Culprit("learns", ("samples",), "setting", "order", _any("sorted")),
    "same": Culprit("learns", ("samples",), "setting", "order", _any("same")),
    "scale": Culprit("learns", ("scale",), "setting", "fixed", _any(2.0**17, 2.0**18)),
    "kept": Culprit("breaks", (), "setting", "master_weights", _any(False)),
    "sums": Culprit("learns", ("profile", "scale"), "setting", "sums", _any(torch.float16)),
    "rate": Culprit("learns", ("updates",), "setting", "rate", _any(0.02, 0.03, 0.04)),
    "batch": Culprit("slow", PROFILE, "setting", "samples", _any(16)),
    "logging": Culprit("hangs", RECORDER, "setting", "stuck", _stuck("logging")),
    "empty": Culprit("hangs", RECORDER, "setting", "stuck", _stuck("empty")),
    "worker": Culprit("hangs", RECORDER, "restart", "stuck", _stuck("loader")),
    "cut": Culprit("hangs", ("recorder", "links"), "node", "weak", lambda r, job: (r.choice(job.nodes), CUT)),
    "saving": Culprit("hangs", RECORDER, "setting", "saving", lambda r, job: r.uniform(700, 1100)),
}
PATIENT = 3600.0  # seconds
_FIELDS = {one.field for one in CULPRITS.values() if one.act == "setting"} - {"stuck", "saving"}
SETTINGS = sorted({*_FIELDS, "patience", "logging", "empty"})


class Act(NamedTuple):
    """Something that one can do. minutes: for which the job stands still.

    fields: what becomes of a job, called with it, with the planned one and with a place.
    """

    minutes: int
    places: Callable[[Job], Sequence[Any]]
    fields: Callable[[Job, Job, Any], Fields]


def _without(field: str, job: Job, place: Any) -> Fields:
    """Without a fault, if it is at this place."""
    value = getattr(job, field)
    at = value[0] if isinstance(value, tuple) else value
    return {field: None if at == place else value}


def _cable(job: Job, planned: Job, node: int) -> Fields:
    return {"weak": None} if len(job.nodes) == 2 else _without("weak", job, node)  # two nodes share one way


def _node(job: Job, planned: Job, node: int) -> Fields:
    spare = min({*range(len(job.nodes) + 1)} - {*job.nodes})
    return {"nodes": tuple(spare if one == node else one for one in job.nodes)}


def _set_back(job: Job, planned: Job, name: str) -> Fields:
    if name in ("logging", "empty"):
        return _without("stuck", job, name)
    return {name: PATIENT if name == "patience" else getattr(planned, name)}


ACTS = {
    "wait": Act(0, lambda job: [""], lambda job, planned, place: {}),
    "restart": Act(5, lambda job: [""], lambda job, planned, place: _without("stuck", job, "loader")),
    "setting": Act(8, lambda job: SETTINGS, _set_back),
    "shard": Act(8, lambda job: range(job.dp), lambda job, planned, shard: {"left_out": shard}),
    "node": Act(10, lambda job: job.nodes, _node),
    "card": Act(
        20,
        lambda job: sorted(map(job.device, range(job.world))),
        lambda job, planned, device: _without("slow", job, device) | _without("corrupt", job, device),
    ),
    "cable": Act(20, lambda job: job.nodes, _cable),
}
