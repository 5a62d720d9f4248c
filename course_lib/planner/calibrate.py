"""Calibration: one measured step on your machine improves the estimates of all others.

A catalogue cannot know how good the kernels and libraries of a machine are, and that is most of an estimate's
error: published software stacks on the same device differ by ten percent and more. One measured step tells.

    cluster = calibrate(model, cluster, plan, global_batch, measured_seconds)
    cluster = calibrate(model, cluster, another_plan, ...)                        and so on

It sets the fraction of the peak that matrix products reach, so that all measured steps are right on average.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from course_lib.planner.estimate import estimate
from course_lib.planner.hardware import Cluster
from course_lib.planner.spec import ModelSpec, Plan

SLOWEST, FASTEST = 0.02, 1.25  # of the peak; clocks above those of the data sheet make more than 1


class MeasuredStep(NamedTuple):
    """One measured step."""

    model: ModelSpec
    plan: Plan
    global_batch: int
    seconds: float

    def off(self, cluster: Cluster) -> float:
        """The error of the estimate: how much longer the step took, as a difference of logarithms."""
        expected = estimate(self.model, cluster, self.plan, self.global_batch).step_time.total
        return math.log(self.seconds / expected)


def calibrate(model: ModelSpec, cluster: Cluster, plan: Plan, global_batch: int, measured_seconds: float) -> Cluster:
    """The cluster fitted to this step: further estimates on it are those of your machine, in a narrower interval.

    measured_seconds: a typical step, for instance the median of some after the first few.

    Raises ValueError for a plan that cannot exist there, and for a time that no such machine could need.
    """
    if not measured_seconds > 0:
        raise ValueError(f"measured_seconds={measured_seconds} is no time of a step; give seconds above 0")
    steps = (*cluster.measured, MeasuredStep(model, plan, global_batch, measured_seconds))
    return replace(fitted(cluster, steps), measured=steps)


def fitted(cluster: Cluster, steps: tuple[MeasuredStep, ...]) -> Cluster:
    """The cluster with the matmul fraction that makes the steps right on average."""

    def mean_off(matmul: float) -> float:
        one = replace(cluster, matmul=matmul)
        return sum(step.off(one) for step in steps) / len(steps)

    matmul = fraction_for(mean_off)
    if not 1.001 * SLOWEST < matmul < 0.999 * FASTEST:
        speed = f"needs matrix products at {matmul:.0%} of the peak of {cluster.device}, or beyond"
        advice = "give seconds of one whole step of a large model and its plan"
        raise ValueError(f"measured_seconds={steps[-1].seconds:g} {speed}; {advice}")
    return replace(cluster, matmul=matmul)


def fraction_for(rises: Callable[[float], float]) -> float:
    """The matmul fraction at which an increasing function is zero."""
    low, high = SLOWEST, FASTEST
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if rises(middle) > 0 else (middle, high)
    return (low + high) / 2
