"""What the lesson on planning says is so. Searches are not run again: nbval compares what the lesson shows of them."""

from __future__ import annotations

import pytest

from course_lib.planner import Cluster, Plan, estimate
from course_lib.questions.strategies import BATCH, MODEL
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "planning"
numbers, shows = lesson(NAME).numbers, lesson(NAME).shows
A100 = Cluster("A100-80GB", nodes=8, between="InfiniBand HDR")
H100, H200 = (Cluster(name, nodes=8, between="InfiniBand HDR") for name in ("H100-80GB", "H200-141GB"))
CHANGES, FLOWS, TRIALS = "changes = {", "for kind, flow in", "trials = ["
SINGLE = ("a  ZeRO-1", "b  sequence parallelism", "c  full recomputation")


def variant(name: str) -> list[float]:
    """GiB and seconds of a variant of the first plan."""
    return numbers(CHANGES, f"{name}  ")[-2:]


def flow(kind: str) -> list[float]:
    """GB, seconds, and those of them that a device waits."""
    row = numbers(FLOWS, f"{kind}  ")
    return [row[0], *row[-2:]]


def trial(row: int) -> list[float]:
    """Seconds that one measured step alone foretells, and percent of the peak that it says matrix products reach."""
    line = lesson(NAME).shown(TRIALS).splitlines()[row]
    return [float(line.split(": ")[1].split(" s")[0]), float(line.split(" at ")[1].split("%")[0])]


def refreshed(what: str) -> list[float]:
    """dp, tp, pp, seconds and GiB."""
    return numbers("refreshed = {", what)[-5:]


def found() -> list[float]:
    """All plans, those that fit, those on the front."""
    return numbers("len(found.pareto)")


PROOFS: Proofs = {
    "Far from it. A replica holds the whole model.": lambda: not estimate(MODEL, A100, Plan(dp=64), BATCH).fits,
    "The first stage keeps activations for the most micro-batches": lambda: shows(
        "first = estimate(", "the fullest device (pipeline rank 0)"
    ),
    "Recomputation saves the most memory and costs the most time.": lambda: (
        variant("c  full recomputation")[0] == min(variant(name)[0] for name in SINGLE)
        and variant("c  full recomputation")[1] == max(variant(name)[1] for name in SINGLE)
    ),
    "Sequence parallelism costs nothing in all": lambda: (
        variant("b  sequence parallelism")[1] < variant("the first plan")[1]
    ),
    "between nodes there is a network, a twelfth as fast": lambda: (
        A100.inside_link.bandwidth == 12 * A100.between_link.bandwidth
    ),
    "Nearly all bytes are those of tensor parallelism, and here they stay inside a node.": lambda: (
        flow("tensor")[0] > 100 * (flow("pipeline")[0] + flow("data")[0]) and shows(FLOWS, "over NVLink 3       takes")
    ),
    "For tensor traffic a device waits as long as it takes: nobody can go on without the sum. Gradients travel while "
    "the backward pass goes on, so a part of their time is hidden": lambda: (
        flow("tensor")[1] == flow("tensor")[2] and flow("data")[1] > flow("data")[2]
    ),
    "It has 64 heads, but only 8 of keys and values": lambda: (MODEL.heads, MODEL.kv_heads) == (64, 8),
    "The formula holds for the first two. A zero-bubble schedule beats it": lambda: (
        shows("played = simulate(", "gpipe  idle for 0.2727", "1f1b   idle for 0.2727", "zb_h1  idle for 0.1111")
        and round(3 / 11, 4) == 0.2727
    ),
    "the planner says beforehand, to the byte, what each of them sends": lambda: (
        len(set(numbers("predicted = estimate("))) == 1
    ),
    "The first is close, the other two are not": lambda: (
        shows("published = {", "published   14.4 s; planner   14.8 s")
        and shows("published = {", "published   60.1 s; planner   51.5 s", "published  105.2 s; planner   91.9 s")
    ),
    "All four say that this machine is slower than the catalogue's.": lambda: all(
        trial(row)[1] < 100 * A100.spec.matmul for row in range(4)
    ),
    "The first one, which is the most like the final plan, comes closest": lambda: (
        min(range(4), key=lambda row: abs(trial(row)[0] - 105.22)) == 0
    ),
    "together they give a narrower interval": lambda: (
        shows(TRIALS, "take 91.6 s to 123 s")
        and shows("published = {", "take 74.8 s to 113 s")
        and 123 / 91.6 < 113 / 74.8
    ),
    "twice as fast, seven times, fifty times?": lambda: shows("slowest = max(", "7 times. The fastest is"),
    "Of thousands of legal plans, less than one in a hundred is worth choosing from": lambda: (
        found()[0] > 1000 and found()[2] < found()[0] / 100
    ),
    "Devices got faster by more than their memory and links did": lambda: (
        H100.spec.peak["bf16"] / A100.spec.peak["bf16"]
        > max(H100.spec.bandwidth / A100.spec.bandwidth, H100.inside_link.bandwidth / A100.inside_link.bandwidth)
    ),
    "An H200 computes exactly as fast as an H100, but has more memory, and faster: 141 GB in place of 80.": lambda: (
        H200.spec.peak == H100.spec.peak and H200.spec.bandwidth > H100.spec.bandwidth
    ),
    "half as many tensor ranks are enough, and twice as many replicas share the samples": lambda: (
        refreshed("same plan")[:3] == [4, 4, 4] and refreshed("planned anew")[:3] == [8, 2, 4]
    ),
    "that saves a tenth of each step": lambda: (
        round(1 - refreshed("planned anew")[3] / refreshed("same plan")[3], 1) == 0.1
    ),
    "Faster devices gain less than their peak, unless memory and links keep up.": lambda: (
        estimate(MODEL, A100, Plan(dp=4, tp=4, pp=4, zero=1, sequence_parallel=True), BATCH).step_time.total
        / estimate(MODEL, H100, Plan(dp=4, tp=4, pp=4, zero=1, sequence_parallel=True), BATCH).step_time.total
        < H100.spec.peak["bf16"] / A100.spec.peak["bf16"]
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)
