"""The time of a pipeline in closed form; `simulate` plays the same schedules action by action.

Each micro-batch takes t seconds on a rank, forward F, input gradient B and weight gradient W together. The slowest
rank is busy for m t_max; its waiting time is the bubble:

    naive              all other ranks' t, m times
    gpipe, 1f1b        all other ranks' t: fill and drain                       (p - 1) t if they are equal
    interleaved_1f1b   a v-th of that, as the first of v stages is reached v times sooner
    zb_h1, zb_h2       (p - 1) (F + B - W), (p - 1) (F + B - 2 W): weight gradients fill the gaps
    zbv                (p - 1) (max(F, B) - W)
    dualpipev          (p - 1) (F&B + B - 3 W) on half as many stages, where B is the whole backward (at most)

Narayanan et al. 2021, section 2.2; Qi et al. 2024, "Zero Bubble Pipeline Parallelism", table 2 (zb_h1 and zb_h2; zbv
as `simulate` plays it); DeepSeek-AI, DualPipe (README). None of them is ever below zero.
"""

from __future__ import annotations

from typing import NamedTuple

from course_lib.planner.spec import Plan


class Work(NamedTuple):
    """Seconds of one micro-batch on one pipeline rank, all of its stages together."""

    forward: float
    backward: float
    weight_grad: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight_grad


def bubble_seconds(plan: Plan, n_micro_batches: int, slowest: Work, others: float) -> float:
    """Seconds that the slowest rank waits because of the schedule alone, transfers not counted.

    others: one micro-batch's seconds on all other ranks together.
    """
    p, v, (f, b, w) = plan.pp, plan.virtual_stages, slowest
    return {
        "naive": n_micro_batches * others,
        "gpipe": others,
        "1f1b": others,
        "interleaved_1f1b": others / v,
        "zb_h1": (p - 1) * max(f + b - w, b),
        "zb_h2": (p - 1) * max(f + b - 2 * w, 0.0),
        "zbv": (p - 1) * max(b - w, f - w, 0.0),
        "dualpipev": (p - 1) * (f + b + max(f, b) - w) / v,
    }[plan.schedule]


def exposed_messages(plan: Plan, n_micro_batches: int, lead: float = 0.0) -> float:
    """The number of message times that the slowest rank waits for.

    With asynchronous sends, a message still delays a rank that needs it at once: in 1f1b every rank, every time. With
    blocking sends, two ranks meet for each message, after each forward and each backward, as in Megatron-LM.

    lead: by how many message times a micro-batch takes longer on the last rank, with its logits, than on the others.
    It has a neighbor on one side only, so where it sets the pace, the others' messages happen meanwhile. All of this is
    exact for 1f1b; with blocking sends, other schedules are assumed to behave alike.
    """
    p, v, m = plan.pp, plan.virtual_stages, n_micro_batches
    if p == 1:
        return 0
    if "pipeline" not in plan.overlap and plan.schedule != "naive":
        return (2 * v - 1) * m + 2 * p - 3 + max(m - 2, 0) * max(0.0, 1 - lead) * (p > 2)
    return {
        "naive": 2 * (p - 1) * m,
        "gpipe": 2 * (p - 1),
        "1f1b": 2 * (p - 1) + (2 * (p - 1) * m / p - 2) * max(0.0, 1 - lead / 2),
        "interleaved_1f1b": 2 * p * v - 2,
        "zb_h1": 4 * (p - 1),
        "zb_h2": 2 * (p - 1),
        "zbv": 6 * p - 8,
        "dualpipev": 4 * (p - 1),
    }[plan.schedule]


def in_flight(plan: Plan, rank: int, n_micro_batches: int) -> int:
    """The most micro-batches whose activations a rank holds at once, counted once for each of its stages."""
    p, v = plan.pp, plan.virtual_stages
    limit = {
        "naive": 1,
        "gpipe": n_micro_batches,
        "1f1b": p - rank,
        "interleaved_1f1b": (v - 1) * p + 2 * (p - 1 - rank) + 1,
        "zb_h1": p,
        "zb_h2": 2 * p - 1,
        "zbv": 2 * p,
        "dualpipev": 2 * p + 1,
    }[plan.schedule]
    return min(limit, v * n_micro_batches)
