"""An explorer of a hardware refresh.

    | devices  ----o  B200-180GB          | the memory by part: before,        |
    | network  --o--  InfiniBand HDR      | with the old plan, with a new one  |
    | nodes    o----  4 x 8 devices       |                                    |
    | the worth of the new cluster, in words                                   |
    | the time of a step by part, in all three                                 |

The old cluster is 8 nodes of 8 A100, and the old plan is the fastest one on it. A new plan is the best of those worth a
try: one-forward-one-backward or zero-bubble pipelines, small micro-batches, ZeRO-1 or ZeRO-3, sequence parallelism
wherever there is tensor parallelism. They are a tenth of the plans that `search` tries, so the answer comes at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import HALF, WIDTH, Explorer, View
from course_lib.figures import memory_by_part, step_time_by_part
from course_lib.figures.axis import duration
from course_lib.figures.words import plan_in_words
from course_lib.planner import Cluster, Estimate, Plan, estimate
from course_lib.planner.memory import FITS
from course_lib.planner.search import ALIKE, legal_plans
from lessons.L09_planning.questions import BATCH, MODEL

DEVICES = ("A100-80GB", "H100-80GB", "H200-141GB", "B200-180GB")
NETWORKS = ("Ethernet 25", "Ethernet 100", "InfiniBand HDR", "InfiniBand NDR")
NODES = (4, 8, 16)


@lru_cache(maxsize=64)
def cluster(device: str, network: str, nodes: int) -> Cluster:
    return Cluster(device, nodes, between=network)


OLD = cluster("A100-80GB", "InfiniBand HDR", 8)


def worth_a_try(on: Cluster) -> Iterator[Plan]:
    """The plans among which the explorer chooses."""
    for plan in legal_plans(MODEL, on, BATCH, "bf16"):
        is_plain = plan.schedule in ("1f1b", "zb_h1") and plan.micro_batch <= 4
        if is_plain and (plan.zero in (1, 3) or plan.dp == 1) and plan.sequence_parallel == (plan.tp > 1):
            yield plan


@lru_cache(maxsize=64)
def best(on: Cluster) -> Estimate:
    """The fastest plan worth a try that fits, or else that may fit; if none does, the smallest."""
    estimates = [estimate(MODEL, on, plan, BATCH) for plan in worth_a_try(on)]
    return min(estimates, key=_rank)


def _rank(one: Estimate) -> tuple[int, float, float]:
    return FITS.index(one.fit), one.memory.total * (one.fit == "does not fit"), one.step_time.total


def old_plan(on: Cluster) -> Estimate:
    """The old cluster's best plan on another cluster, with as many replicas as its devices make."""
    plan = best(OLD).plan
    return estimate(MODEL, on, replace(plan, dp=on.devices // (plan.tp * plan.pp)), BATCH)


def draw(device: str, network: str, nodes: int) -> View:
    """Draw the explorer at this setting."""
    new = cluster(device, network, nodes)
    three = {"before": best(OLD), "old plan": old_plan(new), "best plan": best(new)}
    memory = {name: one.memory for name, one in three.items()}
    return View(
        describe(three["before"], three["old plan"], three["best plan"]),
        memory_by_part(memory, three["best plan"].capacity, HALF, "What lies in the fullest device"),
        step_time_by_part(three, WIDTH, f"A step on {new.devices} {device} with {network}"),
    )


def describe(before: Estimate, old: Estimate, new: Estimate) -> str:
    """Say in two or three sentences how much faster the refresh is, and with which plan."""
    plan = plan_in_words(new.plan)
    if new.fit == "does not fit":
        return f"No plan fits. The smallest is {plan}. {new.why}"
    low, middle, high = (duration(one) for one in (new.step_time.low, new.step_time.total, new.step_time.high))
    which = "The best plan that fits" if new.fits else "The best plan"
    text = f"{which} takes {middle} a step ({low} to {high}), {_times(before, new)}: {plan}."
    if not old.fits:
        return f"{text} The old plan {old.fit}."
    if old.step_time.total / new.step_time.total < ALIKE:
        return f"{text} The old plan cannot be told apart from it."
    return f"{text} With the old plan it would be {_times(before, old)}."


def _times(before: Estimate, after: Estimate) -> str:
    return f"{before.step_time.total / after.step_time.total:.2f} times as fast as before"


def refresh_explorer(device: str = "B200-180GB", network: str = "InfiniBand HDR", nodes: int = 4) -> Explorer:
    """An explorer with three controls, two or three sentences and two pictures; everything is modelled."""
    controls = [
        Slider("devices", DEVICES, device),
        Slider("network", NETWORKS, network),
        Slider("nodes", NODES, nodes, [f"{n} x 8 devices" for n in NODES]),
    ]
    return Explorer(controls, lambda *values: [draw(*values)])
