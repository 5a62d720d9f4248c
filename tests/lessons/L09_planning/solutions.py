"""Solutions to the exercise on planning, as students write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import changed
from course_lib.planner import Plan
from course_lib.planner.memory import model_state
from lessons.L09_planning import checks
from lessons.L09_planning.checks import chosen, held, sent
from tests.lessons.changes import told, ways

# state_bytes


def by_the_planner(parameters: int, dp: int, tp: int, pp: int, zero: int, precision: str) -> Any:
    return model_state(-(-parameters // (tp * pp)), Plan(dp, tp, pp, zero=zero, precision=precision))


three, share = "weights, gradients, adam * (share if zero >= 1 else mine)", "-(-mine // dp)"
# Real pieces, the first of which is the largest.
cut = "-(-parameters // (tp * pp))", "len(torch.zeros(parameters, dtype=torch.bool).tensor_split(tp * pp)[0])"
of_all = "[precision]", "[precision]; weight, gradient, adam = dp * weight, dp * gradient, dp * adam"
halves = "(2, 2, 12)", "(1, 1, 6)", "(4, 4, 8)", "(2, 2, 4)"

# step_traffic

all_three, neighbors = "data, tensor, neighbors * micro_batches * message / tp", "(stage > 0) + (stage < pp - 1)"
tensor = "reductions * 2 * (tp - 1) / tp * message"
rings: tuple[str, ...] = "trips = ", "from course_lib.planner.communication import bytes_sent\n    trips = "
rings += tensor, 'reductions * bytes_sent("all_reduce", message, tp)'
by_rings = changed(sent, "by_rings", *rings)
one_by_one = tensor, "sum(2 * (tp - 1) * message / tp for _ in range(reductions))"

# choose

cuts, quickest = "(1, 2, 4, 8), (1, 2, 4), RECOMPUTE", "return min(fitting, key=lambda one: one.step_time.total).plan"
in_order = "ordered = sorted(tried, key=lambda one: one.step_time.total)"
in_order += "\n    return next(one.plan for one in ordered if one.memory.total <= 0.9 * one.capacity)"
# More memory than asked for may stay free if it costs nothing.
near = "near = [one for one in fitting if one.step_time.total <= 1.01 * min(fit.step_time.total for fit in fitting)]"
with_more_room = quickest, f"{near}\n    return min(near, key=lambda one: one.memory.total).plan"


def at_once(plan: str) -> tuple[str, str]:
    return "tried = []", f"return {plan}"


RIGHT: dict[Exercise, list[Callable[..., object]]] = {
    checks.state_bytes: [
        by_the_planner,
        *ways(
            held,
            # Rounded up once: the same as rounding after each cut.
            in_one_division=(share, "-(-parameters // (dp * tp * pp))"),
            by_cutting=cut,
            as_a_tensor=(three, f"torch.tensor([{three}])"),
        ),
    ],
    checks.step_traffic: [
        by_rings,
        *ways(
            sent,
            one_by_one=one_by_one,
            counting_neighbors=(neighbors, "sum(0 <= stage + way < pp for way in (-1, 1))"),
            as_a_tensor=(all_three, f"torch.tensor([{all_three}], dtype=torch.float64)"),
        ),
    ],
    checks.choose: ways(
        chosen,
        with_more_room=with_more_room,
        first_of_the_ordered=(quickest, in_order),
        without_what_never_wins=(cuts, '(1, 2, 4, 8), (1, 2, 4), ("none", "selective")'),
        stages_with_zero_1=("1, zero,", "1, 1 if pp > 1 else zero,"),
    ),
}

WRONG: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.state_bytes: told(
        held,
        all_in_one=("than it should have", three, f"sum(({three}))"),
        of_all_devices=("Every number that is wrong is 4 times too large", *of_all),
        in_numbers=("2 times too small", *halves),
        optimizer_first=("in the wrong places", f"return {three}", f"return ({three})[::-1]"),
    ),
    checks.step_traffic: told(
        sent,
        all_traffic=("than it should have", all_three, f"sum(({all_three}))"),
        in_bits=("8 times too large", f"return {all_three}", f"return [8 * one for one in ({all_three})]"),
        backwards=("in the wrong places", f"return {all_three}", f"return ({all_three})[::-1]"),
        without_replicas=("Every number that is wrong is 0. Wrong: 1 of the 3 elements", "(dp - 1) / dp", "0"),
    ),
    checks.choose: told(
        chosen,
        across_nodes=("Its tensor ranks lie on several nodes", *at_once("Plan(2, 16, zero=1)")),
        too_large=("One of its largest parts is parameters", *at_once("Plan(32, micro_batch=2, zero=2)")),
        too_few_devices=("makes 16, but the cluster has 32 devices", *at_once("Plan(1, 8, 2)")),
        as_a_dictionary=("a Plan is asked for, and this is of type dict", *at_once('{"dp": 32, "tp": 1, "pp": 1}')),
        small_micro_batches=("What it loses most by, beside the best: computing.", *at_once("Plan(32)")),
        long_pipeline=("What it loses most by, beside the best: the pipeline's bubble", *at_once("Plan(2, 1, 16)")),
    ),
}
