"""S5. The memo: a plan for 32 GPUs, four sections that defend it, its bottleneck, and the change to try first."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

from course_lib.classroom.questions.asking import choice, each, plan, prose
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Seeded
from course_lib.figures import step_time_by_part
from course_lib.figures.axis import duration
from course_lib.planner import Estimate, Plan, estimate, search
from lessons.S05_memo.memo import CASE, NO_PLAN, PLAN, Brief, decided, demands, figures, one_node, read_section

NEARLY = 0.85  # of the largest: parts that the planner cannot tell apart
FIGURES = {"S5_memory": 0, "S5_pipeline": 1, "S5_precision": 0}  # the figure of each section


def _judge(case: Brief, chosen: Estimate) -> Outcome:
    asked, seconds, (best, alike) = demands(case, chosen), chosen.step_time.total, _best(case)
    right = all(is_met for is_met, _ in asked)
    is_alike = right and seconds <= alike
    against = "the planner cannot tell it from yours" if is_alike else f"yours takes {duration(seconds)}"
    said = [*(text for _, text in asked), f"The best that a search finds takes {duration(best)} a step, and {against}."]
    return Outcome(right, "\n\n".join(said), "" if right else chosen.why, pictures=figures(chosen)[:2])


@cache
def _best(case: Brief) -> tuple[float, float]:
    """Step times in seconds: of the best plan, and of the slowest plan that the planner cannot tell from it."""
    found = search(case.model, case.cluster, case.batch)
    return found.best.step_time.total, max(one.step_time.total for one in found.tied)


# The bottleneck

LOSSES = {
    "gradients": ("data", "waiting for gradients and parameters of other replicas"),
    "messages": ("pipeline", "waiting for messages between stages"),
    "bubble": ("bubble", "the bubble"),
    "tensor": ("tensor", "traffic of tensor ranks"),
    "computing": ("compute", "computing itself"),
}


def _grown(step: Estimate) -> dict[str, float]:
    """Seconds by which each part of a step is longer than with ideal scaling."""
    before, ideal = one_node().step_time.parts, CASE.cluster.nodes
    return {name: step.step_time.parts[part] - before[part] / ideal for name, (part, _) in LOSSES.items()}


def _blame(loss: str, case: Brief) -> Outcome:
    if (step := decided()) is None:
        return Outcome(None, NO_PLAN)
    grown, lost = _grown(step), step.step_time.total - one_node().step_time.total / case.cluster.nodes
    listed = "; ".join(f"{LOSSES[name][1]}: {seconds:+.2f} s" for name, seconds in grown.items())
    said = (
        f"Modelled, for your plan: a step takes {duration(lost)} longer than a quarter of that on one node. {listed}."
    )
    return Outcome(grown[loss] >= NEARLY * max(grown.values()), said, pictures=(figures(step)[1],))


# What to try first

CHANGES: dict[str, dict[str, Any]] = {
    "overlap": {"overlap": ("data", "tensor", "pipeline")},
    "schedule": {"schedule": "zb_h1", "virtual_stages": 1},
    "tensor": {},
    "network": {},
    "batch": {},
}
FREE = ("overlap", "schedule", "tensor")


def _changed(change: str, case: Brief, chosen: Plan) -> Estimate | None:
    """The estimate after a change; None if there can be no such plan, or it does not fit."""
    cluster = replace(case.cluster, between="Ethernet 100") if change == "network" else case.cluster
    changes = {"tp": 2 * chosen.tp, "dp": chosen.dp // 2} if change == "tensor" else CHANGES[change]
    try:
        found = estimate(case.model, cluster, replace(chosen, **changes), case.batch * (1 + (change == "batch")))
    except ValueError:
        return None
    return found if found.fits else None


def _gain(before: Estimate, after: Estimate | None) -> float:
    return after.tokens_per_second / before.tokens_per_second - 1 if after else -1.0


def _mitigate(change: str, case: Brief) -> Outcome:
    if (before := decided()) is None:
        return Outcome(None, NO_PLAN)
    after = _changed(change, case, before.plan)
    if after is None:
        return Outcome(False, "Modelled: with your plan this is not possible, or it does not fit any more.")
    best = max(_gain(before, _changed(name, case, before.plan)) for name in FREE)
    right = change in FREE and 0 < NEARLY * best <= _gain(before, after)
    tokens = f"{before.tokens_per_second:,.0f} tokens a second before, {after.tokens_per_second:,.0f} after"
    said = f"Modelled, for your plan: {tokens}, {_gain(before, after):+.1%}."
    said += f" Of the changes that cost nothing, the best gains {best:+.1%}."
    return Outcome(right, said, pictures=(step_time_by_part({"before": before, "after": after}, title="A step"),))


QUESTIONS: dict[str, Seeded] = {
    PLAN: Seeded(CASE, plan(_judge)),
    **{name: Seeded(CASE, prose(partial(read_section, figure))) for name, figure in FIGURES.items()},
    "S5_gradients": Seeded(CASE, prose(partial(read_section, 2))),
    "S5_bottleneck": Seeded(CASE, choice(each(_blame, LOSSES))),
    "S5_mitigation": Seeded(CASE, choice(each(_mitigate, CHANGES))),
}
