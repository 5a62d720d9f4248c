"""S5. The memo: a plan for some nodes, five sections that defend it, the numbers beside them, and two choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from course_lib.classroom.questions.asking import MakeForm, choice, number, open_case, plan
from course_lib.classroom.questions.markup import bullets
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import CaseQuestion
from course_lib.classroom.questions.units import BYTES, SECONDS, SHARE, TIMES, Quantity
from course_lib.classroom.scenarios.targets import machine
from course_lib.figures import step_time_by_part
from course_lib.figures.axis import duration
from course_lib.figures.words import plan_in_words
from course_lib.planner import Estimate, estimate, search
from course_lib.planner.search import ALIKE
from lessons.S05_memo.memo import PLAN, RULES, Brief, brief, decided, demands, figures, one_node, stale

NO_PLAN = "Decide on a plan first, in the card of section 1; this is compared with it."


def _judge(case: Brief, chosen: Estimate) -> Outcome:
    asked, seconds, best = demands(case, chosen), chosen.step_time.total, _best(case)
    right = all(is_met for is_met, _ in asked)
    is_alike = right and seconds <= ALIKE * best
    against = "the planner cannot tell it from yours" if is_alike else f"yours takes {duration(seconds)}"
    said = [*(text for _, text in asked), f"The best that a search finds takes {duration(best)} a step, and {against}."]
    if old := stale(case):
        said.append(f"Written for an earlier plan, so look again at these:\n\n{bullets(old)}")
    return Outcome(right, "\n\n".join(said), "" if right else chosen.why, pictures=figures(case, chosen)[:2])


@cache
def _best(case: Brief) -> float:
    return search(case.model, case.cluster, case.batch).best.step_time.total


def _planned(run: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """A run that is called with the plan that was decided on, after the case."""

    def told(case: Brief, *answer: Any) -> Outcome:
        chosen = decided(case)
        return run(case, chosen, *answer) if chosen else Outcome(None, NO_PLAN)

    return told


def _show(figure: int, case: Brief, chosen: Estimate) -> Outcome:
    said = f"Your plan (modelled): {plan_in_words(chosen.plan)}. Only you can judge the text."
    return Outcome(None, said, pictures=(figures(case, chosen)[figure],))


# Eight numbers


NUMBERS: dict[str, tuple[Quantity, Callable[[Brief, Estimate], float]]] = {
    "S5_state": (BYTES, lambda case, chosen: 16 * case.model.parameters),
    "S5_need": (BYTES, lambda case, chosen: chosen.memory.total),
    "S5_sent": (BYTES, lambda case, chosen: chosen.flows["data"].bytes if "data" in chosen.flows else 0),
    "S5_speed_up": (TIMES, lambda case, chosen: one_node(case).step_time.total / chosen.step_time.total),
    "S5_bubble": (SHARE, lambda case, chosen: chosen.bubble),
    "S5_naive": (SHARE, lambda case, chosen: 1 - 1 / (chosen.plan.pp if chosen.plan.pp > 1 else 4)),
    "S5_wide": (BYTES, lambda case, chosen: _wide(case, chosen)),
    "S5_lost": (SECONDS, lambda case, chosen: _lost(case, chosen)),
}


def _wide(case: Brief, chosen: Estimate) -> float:
    wide = replace(chosen.plan, precision="fp32")
    return estimate(case.model, case.cluster, wide, case.batch).memory.activations


def _lost(case: Brief, chosen: Estimate) -> float:
    """Seconds by which a step is longer than with ideal scaling."""
    return chosen.step_time.total - one_node(case).step_time.total / case.cluster.nodes


def _measure(name: str, case: Brief, chosen: Estimate) -> Outcome:
    said = f"Compared with the planner's for your plan: {plan_in_words(chosen.plan)}."
    return Outcome(None, said, measured=NUMBERS[name][1](case, chosen))


# The bottleneck, and what to try first

LOSSES = {
    "gradients": ("data", "waiting for gradients and parameters of other replicas"),
    "messages": ("pipeline", "waiting for messages between stages"),
    "bubble": ("bubble", "the bubble"),
    "tensor": ("tensor", "traffic of tensor ranks"),
    "computing": ("compute", "computing itself"),
}
CHANGES = "overlap", "schedule", "tensor", "network", "batch"


def _blame(loss: str, case: Brief, chosen: Estimate) -> Outcome:
    """Compare what a part of the step has grown by; parts nearer than plans can be told apart count as equal."""
    before, ideal, now = one_node(case).step_time.parts, case.cluster.nodes, chosen.step_time.parts
    grown = {name: now[part] - before[part] / ideal for name, (part, _) in LOSSES.items()}
    listed = "; ".join(f"{LOSSES[name][1]}: {seconds:+.2f} s" for name, seconds in grown.items())
    said = f"Modelled, for your plan: a step takes {duration(_lost(case, chosen))} longer than ideal. {listed}."
    return Outcome(ALIKE * grown[loss] >= max(grown.values()), said, pictures=(figures(case, chosen)[1],))


def _gain(change: str, case: Brief, before: Estimate) -> tuple[float, Estimate | None]:
    """The gain in tokens a second after a change; -1 if there can be no such plan, or it does not fit."""
    cluster, chosen = case.cluster, before.plan
    plans = {
        "overlap": replace(chosen, overlap=("data", "tensor", "pipeline")),
        "schedule": replace(chosen, schedule="zb_h1", virtual_stages=1),
        "tensor": replace(chosen, tp=2 * chosen.tp, dp=max(1, chosen.dp // 2)),
    }
    faster = replace(cluster, nics_per_node=4 * (cluster.nics_per_node or cluster.devices_per_node))
    cluster, batch = faster if change == "network" else cluster, case.batch * (1 + (change == "batch"))
    try:
        after = estimate(case.model, cluster, plans.get(change, chosen), batch)
    except ValueError:
        return -1.0, None
    return (after.tokens_per_second / before.tokens_per_second - 1, after) if after.fits else (-1.0, None)


def _mitigate(change: str, case: Brief, before: Estimate) -> Outcome:
    gain, after = _gain(change, case, before)
    if change not in RULES[case.rule][1] or after is None:
        why = (
            "with your plan this is not possible, or it does not fit any more"
            if after is None
            else "the brief does not allow it"
        )
        return Outcome(False, f"Modelled: {why}.")
    best = max(_gain(name, case, before)[0] for name in RULES[case.rule][1])
    tokens = f"{before.tokens_per_second:,.0f} tokens a second before, {after.tokens_per_second:,.0f} after"
    said = (
        f"Modelled, for your plan: {tokens}, {gain:+.1%}. Of the changes that are allowed, the best gains {best:+.1%}."
    )
    picture = step_time_by_part({"before": before, "after": after}, title="A step")
    return Outcome(0 < best <= ALIKE * gain, said, pictures=(picture,))


def _facts(case: Brief) -> dict[str, object]:
    return {"case": case, "machine": machine, "rule": RULES[case.rule][0]}


FIGURES = {"S5_memory": 0, "S5_gradients": 2, "S5_pipeline": 1, "S5_precision": 0, "S5_advice": 1}  # of each section
FORMS: dict[str, MakeForm] = {
    PLAN: plan(_judge),
    **{name: open_case(_planned(partial(_show, figure))) for name, figure in FIGURES.items()},
    **{name: number(of, _planned(partial(_measure, name)), tolerance=0.02) for name, (of, _) in NUMBERS.items()},
    "S5_bottleneck": choice({loss: _planned(partial(_blame, loss)) for loss in LOSSES}),
    "S5_mitigation": choice({change: _planned(partial(_mitigate, change)) for change in CHANGES}),
}
QUESTIONS = {name: CaseQuestion(brief, form, _facts) for name, form in FORMS.items()}
