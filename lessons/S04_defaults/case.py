"""S4. Defaults for many teams: a default that does not fit, and the one that is the worst to get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from course_lib.classroom.questions.asking import choice, each, open_case
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Seeded
from course_lib.figures.axis import counted
from course_lib.planner import Cluster, ModelSpec, Plan, estimate
from lessons.S04_defaults.fleet import FLEET, Policy, Trials, trial

# A default that does not fit


def _default(model: ModelSpec, cluster: Cluster, batch: int, **more: Any) -> Plan:
    precision = "bf16" if "bf16" in cluster.spec.peak else "fp16"
    return Plan(**{"dp": cluster.devices, "zero": 1, "precision": precision, **more})


def _fits(model: ModelSpec, cluster: Cluster, plan: Plan, batch: int) -> bool:
    try:
        return estimate(model, cluster, plan, batch).fits
    except ValueError:
        return False


def _plans_by_cost(model: ModelSpec, cluster: Cluster, batch: int) -> Iterator[Plan]:
    """Plans, from changes that cost nothing to the change that costs most; larger micro-batches first."""
    cp = max(1, model.sequence // 16_384)
    for tp, pp in ((1, 1), (2, 1), (2, 2), (4, 2), (2, 4), (4, 4), (8, 1), (8, 4)):
        cut = {"tp": tp, "pp": pp, "cp": cp, "dp": cluster.devices // (tp * pp * cp), "sequence_parallel": tp > 1}
        for recompute, micro_batch in product(("none", "selective"), (4, 2, 1)):
            more = {"recompute": recompute, "micro_batch": micro_batch, "schedule": "zb_h1" if pp > 1 else "1f1b"}
            with suppress(ValueError):  # such as no device for a replica
                yield _default(model, cluster, batch, **cut, **more)


def _first_that_fits(model: ModelSpec, cluster: Cluster, batch: int) -> Plan:
    return next(plan for plan in _plans_by_cost(model, cluster, batch) if _fits(model, cluster, plan, batch))


def _again_if_need_be(model: ModelSpec, cluster: Cluster, batch: int) -> Plan:
    plan = _default(model, cluster, batch)
    return plan if _fits(model, cluster, plan, batch) else replace(plan, recompute="full")


UNFIT: dict[str, Policy] = {
    "as_it_is": _default,
    "smallest": partial(_default, zero=3, recompute="full"),
    "again": _again_if_need_be,
    "ladder": _first_that_fits,
}


def _try(name: str) -> Outcome:
    found = {one: trial(policy) for one, policy in UNFIT.items()}
    best = max(found, key=lambda one: (len(found[one].running), -found[one].score))
    stopped = [one.pair for one in found[name].trials if one not in found[name].running]
    where = f" It does not run for: {'; '.join(stopped)}." if stopped else ""
    return Outcome(name == best, f"Modelled: {found[name]}{where}", shown=(name == best) == (name == "ladder"))


# The default that is the worst to get wrong

WRONG: dict[str, dict[str, Any]] = {
    "node": {"sequence_parallel": True, "pp": 1, "cp": 1, "schedule": "1f1b", "virtual_stages": 1, "zero": 1},
    "again": {"recompute": "full"},
    "micro": {"micro_batch": 1},
    "zero": {"zero": 3},
}


def _with(name: str) -> Trials:
    """Trials of every pair's best plan, with one thing set to a default."""
    of = {(pair.model, pair.cluster): pair.best for pair in FLEET.values()}

    def policy(model: ModelSpec, cluster: Cluster, batch: int) -> Plan:
        wide: dict[str, Any] = {"tp": cluster.devices_per_node, "dp": cluster.nodes} if name == "node" else {}
        return replace(of[model, cluster], **WRONG[name], **wide)

    return trial(policy)


def _get_wrong(name: str) -> Outcome:
    found = {one: _with(one) for one in WRONG}
    costly = max(found, key=lambda one: found[one].score)
    said = (
        f"Modelled: the best plans of all {counted(len(FLEET), 'pair')}, with this alone set otherwise. {found[name]}"
    )
    return Outcome(name == costly, said, shown=(name == costly) == (name == "node"))


# The page about the defaults


def _compare_policies() -> Outcome:
    lines = "; ".join(
        f"{words}: {trial(UNFIT[name])}"
        for name, words in {"smallest": "always the smallest plan", "ladder": "the cheapest change that fits"}.items()
    )
    return Outcome(None, f"Two defaults on the fleet (modelled). {lines}")


QUESTIONS: dict[str, Seeded] = {
    "S4_unfit": Seeded(None, choice(each(_try, UNFIT))),
    "S4_costly": Seeded(None, choice(each(_get_wrong, WRONG))),
    "S4_page": Seeded(None, open_case(_compare_policies)),
}
