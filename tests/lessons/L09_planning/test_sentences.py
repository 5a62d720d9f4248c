"""Proofs of sentences in the lesson on planning. Large searches are not repeated: nbval compares their output."""

from __future__ import annotations

from importlib import import_module

import pytest
from torch.utils import flop_counter

from course_lib.planner import Cluster
from lessons.L09_planning import explorer as refresh
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "planning"
numbers, shown, shows = lesson(NAME).numbers, lesson(NAME).shown, lesson(NAME).shows
CHANGES, FLOWS, PUBLISHED, TRIALS = "changes = {", "for kind, flow in", "published = {", "all_four, told"
H100, H200 = Cluster("H100-80GB"), Cluster("H200-141GB")


def variants() -> tuple[list[float], list[float]]:
    """GiB and seconds of the first plan, of each of the three changes, and of a and b together."""
    rows = [numbers(CHANGES, name)[-2:] for name in ("the first", "a: ", "b: ", "c: ", "a and b")]
    return [gib for gib, _ in rows], [seconds for _, seconds in rows]


def waits(kind: str) -> float:
    """The share of the traffic's time in which a device waits for it."""
    takes, waited = numbers(FLOWS, f"{kind} ")[-2:]
    return waited / takes


def planner_is_off(name: str) -> float:
    published, planner, *_ = numbers(PUBLISHED, name)[-4:]
    return abs(planner / published - 1)


def trials_are_as_told() -> bool:
    lines = [line for line in shown(TRIALS).splitlines() if "by this trial alone" in line]
    by_each, shipped = numbers(TRIALS, "by this trial alone")[6::7], numbers(PUBLISHED, "BLOOM")[-3]
    return min(by_each) > shipped and ["OUTSIDE" in line for line in lines] == [False, False, False, True]


PROOFS: Proofs = {
    "Far from it. A replica holds the whole model.": lambda: shows("from textwrap import fill", "It does not fit"),
    "The first stage keeps activations for the most micro-batches": lambda: shows(
        "first = estimate(", "the fullest device (pipeline rank 0)"
    ),
    "Of the three, recomputation saves the most memory and costs the most time. On balance sequence parallelism "
    "costs nothing": lambda: (
        variants()[0][3] == min(variants()[0][1:4])
        and variants()[1][3] == max(variants()[1])
        and variants()[1][2] < variants()[1][0]
    ),
    "(The last line, **a** and **b** together, saves even more, and costs nothing.)": lambda: (
        variants()[0][4] < variants()[0][3] and variants()[1][4] < variants()[1][0]
    ),
    "For tensor traffic a device waits as long as it takes: nobody can go on without the sum. Gradients travel while "
    "the backward pass goes on, so a part of their time is hidden": lambda: waits("tensor") == 1 > waits("data"),
    "With `tp=16` both points have moved towards their slopes, and down.": lambda: shows(
        "roofline(plans", "nearest to the slope is tp=16 over InfiniBand HDR"
    ),
    "The formula holds for the first two. A zero-bubble schedule beats it": lambda: shows(
        "played = simulate(",
        "gpipe  idle for 0.2727 of the time; formula 0.2727",
        "1f1b   idle for 0.2727 of the time; formula 0.2727",
        "zb_h1  idle for 0.1111",
    ),
    "the planner says beforehand, to the byte, what each of them sends": lambda: (
        len(set(numbers("predicted = estimate("))) == 1
    ),
    "The first is close, the other two are not": lambda: (
        planner_is_off("39B") < 0.05 and min(planner_is_off("MT-NLG"), planner_is_off("BLOOM")) > 0.1
    ),
    "All four trials say that this machine is slower than the catalogue's. The fourth lies outside its interval, as "
    "one in ten may.": trials_are_as_told,
    "twice as fast, six times, fifty times?": lambda: shows("slowest = max(", "6 times. The fastest is"),
    "An `H200-141GB` computes exactly as fast as an `H100-80GB`, but has more memory, and faster.": lambda: (
        H200.spec.peak == H100.spec.peak and H200.spec.bandwidth > H100.spec.bandwidth
    ),
    "Only on the slowest network.": lambda: (
        len({refresh.best(refresh.cluster("H200-141GB", network, 8)).plan for network in refresh.NETWORKS[1:]}) == 1
    ),
    "To the last parameter, FLOP and byte": lambda: (
        len(set(numbers("FlopCounterMode(", "parameters:"))) == len(set(numbers("FlopCounterMode(", "FLOPs"))) == 1
        and numbers("theirs = launch(tracked", "tracked:")[:2] == numbers("theirs = launch(tracked", "planner:")[:2]
    ),
    "`torch/utils/flop_counter.py` and `torch/distributed/_tools/mem_tracker.py`": lambda: (
        hasattr(flop_counter, "FlopCounterMode")
        and hasattr(import_module("torch.distributed._tools.mem_tracker"), "MemTracker")
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)
