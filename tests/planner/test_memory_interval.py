"""The interval of memory against published observations: what ran is not refused, what did not is not promised."""

from __future__ import annotations

import math
import statistics

import pytest

from benchmarks import _published as published
from course_lib.planner import memory
from course_lib.planner.hardware import NINETY_PERCENT
from tests.planner.memory_observations import GiB, Observation, measured, outcomes

MEASURED, OUTCOMES = measured(), outcomes()
SOURCES = sorted({one.source for one in MEASURED})


def outside(one: Observation) -> float:
    """How far a figure is outside of what lean and plain software need, in logarithms; 0 inside."""
    found, n_bytes = one.memory, one.n_bytes
    if one.kind == "nvidia-smi":
        n_bytes -= memory.DRIVER + found.libraries
    if one.kind != "allocated":
        n_bytes /= 1 + memory.HOLES
    return max(0.0, math.log(n_bytes / (found.tensors + found.plain)), math.log(found.tensors / n_bytes))


def spread(without: str = "") -> float:
    """The half width of the interval by all sources but one, each with the same weight."""
    squares = {source: [outside(one) ** 2 for one in MEASURED if one.source == source] for source in SOURCES}
    means = [statistics.mean(found) for source, found in squares.items() if source != without]
    return NINETY_PERCENT * math.sqrt(statistics.mean(means))


def test_the_interval_is_as_wide_as_published_figures_say() -> None:
    assert abs(memory.SPREAD - spread()) < 0.005
    assert len(MEASURED) == 28


def test_nine_in_ten_figures_lie_in_it_and_nearly_as_many_when_their_source_is_left_out() -> None:
    assert statistics.mean(outside(one) <= memory.SPREAD for one in MEASURED) >= 0.9
    left_out = [outside(one) <= spread(one.source) for one in MEASURED]
    assert 0.85 <= statistics.mean(left_out) < 1


def test_what_an_allocator_counts_is_met_to_three_percent_in_the_mean() -> None:
    """Megatron's kernels are the lean ones; a sum of tensors has no constant to fit."""
    errors = [abs(one.memory.tensors / one.n_bytes - 1) for one in MEASURED if one.kind == "allocated"]
    assert len(errors) == 15
    assert statistics.mean(errors) < 0.015
    assert max(errors) < 0.04


def test_plain_software_is_met_to_two_percent_where_logits_are_most_of_it() -> None:
    long = [one for one in MEASURED if one.source == "torchtitan" and one.model.sequence > 8192]
    assert len(long) == 4
    for one in long:
        assert one.memory.tensors + one.memory.plain == pytest.approx(one.n_bytes, rel=0.03)


def sixteen_bits(*quantities: str) -> list[published.Row]:
    """Rows without those of sources that keep activations in 8 bits or on the host, which the planner does not know."""
    return [row for row in published.rows_of(*quantities) if not row["id"].startswith(("bridge", "dgxc"))]


def test_nothing_that_ran_is_refused() -> None:
    ran = [one for one in OUTCOMES if one.kind == "ran"]
    assert [one for one in ran if one.memory.fit(one.n_bytes) == "does not fit"] == []
    assert len(ran) == 28
    rows = sixteen_bits("step time", "memory")
    assert [row["id"] for row in rows if published.predict(row).fit == "does not fit"] == []


def test_nothing_that_ran_out_of_memory_fits() -> None:
    too_large = [one for one in OUTCOMES if one.kind == "out of memory"]
    assert [one for one in too_large if one.memory.fit(one.n_bytes) == "fits"] == []
    assert len(too_large) == 6
    assert {one.memory.fit(one.n_bytes) for one in too_large} == {"may fit", "does not fit"}


def test_most_published_runs_fit_for_certain() -> None:
    fits = [published.predict(row).fits for row in sixteen_bits("step time")]
    assert statistics.mean(fits) > 0.8


def test_an_interval_around_a_capacity_may_fit() -> None:
    found = OUTCOMES[0].memory
    assert found.low < found.total < found.high
    assert found.fit(found.high) == "fits"
    assert found.fit(found.high - 1) == found.fit(found.low) == "may fit"
    assert found.fit(found.low - 1) == "does not fit"
    assert found.low > GiB
