"""Pace and Link: their times, and arguments that make no sense. The passing of time is in test_clock."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from course_lib import Link, Pace, launch


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(latency=-1.0), "latency=-1.0"),
        (lambda: Link(bandwidth=0), "bandwidth=0"),
        (lambda: Pace(device=-0.1), "device=-0.1"),
        (lambda: Pace(device={"sideways": 1.0}), "'sideways'.*forward, backward"),
        (lambda: Pace(link=0.001), "link=0.001 must be a Link"),  # type: ignore[arg-type]
        (lambda: Pace(devices_per_node=0), "devices_per_node=0"),
        (lambda: Pace(nodes=0), "nodes=0 must be a whole number of at least 1"),
        (lambda: Pace(nodes=-1), "nodes=-1"),
        (lambda: Pace(nodes=2.5), r"nodes=2\.5"),  # type: ignore[arg-type]
        (lambda: Pace(nodes=True), "nodes=True"),
        (lambda: Pace(device=math.inf), "device=inf"),
        (lambda: Pace(device={"forward": math.nan}), "device.*=nan"),
        (lambda: Pace(slow={1: math.inf}), r"slow\[1\]=inf"),
        (lambda: Pace(slow={1.5: 2}), r"a rank in slow=1\.5"),  # type: ignore[dict-item]
        (lambda: Pace(slow={-1: 2}), "a rank in slow=-1"),
        (lambda: Link(latency=math.inf), "latency=inf"),
        (lambda: launch(print, 2, pace=Pace(slow={9: 2, 1: 3})), "names rank 9, but the ranks are 0 to 1"),
    ],
)
def test_a_pace_that_makes_no_sense_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_launch_wants_a_pace_and_says_which_kind_of_thing_it_got() -> None:
    with pytest.raises(TypeError, match=r"pace=0\.02 must be a Pace"):
        launch(print, 1, pace=0.02)  # type: ignore[arg-type]


def test_a_link_adds_latency_and_bytes_over_bandwidth() -> None:
    assert Link(latency=0.5, bandwidth=100.0).seconds(50) == 1.0
    assert Link().seconds(10**12) == 0.0


@pytest.mark.parametrize(
    ("device", "seconds"),
    [({"backward": 0.02, "weight_grad": 0.01}, 0.06), ({"backward": 0.02}, 0.04), ({"weight_grad": 0.01}, None)],
)
def test_what_a_mark_includes_takes_its_own_time_too(device: dict[str, float], seconds: float | None) -> None:
    assert Pace(device).compute_seconds("backward", 2.0, "weight_grad") == pytest.approx(seconds)


def test_one_number_for_all_kinds_counts_once() -> None:
    assert Pace(0.02).compute_seconds("backward", 2.0, "weight_grad") == 0.04
