"""The sentences of the lesson on planning, with their proofs. Large searches run in nbval only, which compares them."""

from __future__ import annotations

from functools import cache

import pytest
from torch.distributed._tools import mem_tracker
from torch.utils import flop_counter

from course_lib.planner import Cluster, ModelSpec, Plan, estimate, search
from course_lib.planner.estimate import Estimate
from lessons.L09_planning import explorer as refresh
from lessons.L09_planning.questions import BATCH, MODEL
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "planning"
numbers, shows = lesson(NAME).numbers, lesson(NAME).shows
A100 = Cluster("A100-80GB", nodes=8, between="InfiniBand HDR")
H100, H200 = (Cluster(name, nodes=8, between="InfiniBand HDR") for name in ("H100-80GB", "H200-141GB"))
CHANGES, FLOWS, TRIALS = "changes = {", "for kind, flow in", "all_four = jean_zay"
SINGLE = ("a: ZeRO-1", "b: sequence parallelism", "c: full recomputation")


def variant(name: str) -> list[float]:
    """GiB and seconds of a variant of the first plan."""
    return numbers(CHANGES, f"{name}  ")[-2:]


def flow(kind: str) -> list[float]:
    """The numbers of a flow: GB, seconds, and the exposed seconds."""
    row = numbers(FLOWS, f"{kind}  ")
    return [row[0], *row[-2:]]


def trial(row: int) -> list[float]:
    """The prediction from one measured step: seconds, and percent of the peak that matrix products reach."""
    line = lesson(NAME).shown(TRIALS).splitlines()[row]
    return [float(line.split(": ")[1].split(" s")[0]), float(line.split(" at ")[1].split("%")[0])]


def refreshed(what: str) -> list[float]:
    """The numbers of a refresh: dp, tp, pp, seconds and GiB."""
    return numbers("refreshed = {", what)[-5:]


def found() -> list[float]:
    """The numbers of all plans, of those that fit, and of those on the front."""
    return numbers("len(found.pareto)")


@cache
def carried_over() -> Estimate:
    """The estimate on H100 of the best plan for A100."""
    return estimate(MODEL, H100, search(MODEL, A100, BATCH).best.plan, BATCH)


@cache
def planned_anew() -> Estimate:
    return search(MODEL, H100, BATCH).best


def counted_alike() -> bool:
    """Whether PyTorch's and the planner's parameters and FLOPs agree."""
    of_parameters, of_flops = (numbers("FlopCounterMode(", what) for what in ("parameters:", "FLOPs for a sample:"))
    narayanan = ModelSpec(layers=48, hidden=8192, heads=64, sequence=2048, vocab=51200)
    return of_parameters == [narayanan.parameters] * 2 and of_flops == [narayanan.step_flops(1)] * 2


def tracked_alike() -> bool:
    """Whether the bytes of PyTorch's tracker and of the planner agree, except for counters."""
    cell = "launch(tracked"
    parameters, gradients, state = numbers(cell, "tracked:")
    return numbers(cell, "planner:") == [parameters, gradients, state - 4 * 37]


SLOWEST, FASTEST = refresh.NETWORKS[0], refresh.NETWORKS[-1]


def anew(device: str, network: str, nodes: int = 8) -> Estimate:
    """The explorer's best plan for a refresh."""
    return refresh.best(refresh.cluster(device, network, nodes))


def mesh(one: Estimate) -> tuple[int, int, int]:
    return one.plan.dp, one.plan.tp, one.plan.pp


def longer_on_the_slowest(device: str) -> float:
    return anew(device, SLOWEST).step_time.total / anew(device, FASTEST).step_time.total - 1


def few_percent(on: Cluster) -> float:
    """The share by which a step with the explorer's best plan takes longer than with a search's."""
    return refresh.best(on).step_time.total / search(MODEL, on, BATCH).best.step_time.total - 1


def gives_away(device: str, network: str) -> float:
    """The factor by which a step of eight nodes takes longer with the old plan."""
    old = refresh.old_plan(refresh.cluster(device, network, 8))
    return old.step_time.total / anew(device, network).step_time.total


PROOFS: Proofs = {
    # The answers to the tasks of the explorer.
    "It still has four stages, but half as many tensor ranks are enough, and there are twice as many replicas. So each "
    "device holds twice as much of every layer: 120 GiB in place of 68.": lambda: (
        (mesh(refresh.best(refresh.OLD)), mesh(anew("H200-141GB", FASTEST))) == ((4, 4, 4), (8, 2, 4))
        and round(anew("H200-141GB", FASTEST).memory.total / 2**30) == 120
        and round(refresh.best(refresh.OLD).memory.total / 2**30) == 68
    ),
    "Only on the slowest network. There it turns to eight stages and half as many replicas, so that each device has "
    "half as many gradients to send.": lambda: (
        mesh(anew("H200-141GB", SLOWEST)) == (4, 2, 8)
        and {mesh(anew("H200-141GB", network)) for network in refresh.NETWORKS[1:]} == {(8, 2, 4)}
    ),
    "A100: a step takes 4% longer than on the fastest network, with B200 19%.": lambda: (
        (longer := {device: longer_on_the_slowest(device) for device in refresh.DEVICES})
        and min(longer, key=lambda device: longer[device]) == "A100-80GB"
        and [f"{longer[device]:.0%}" for device in ("A100-80GB", "B200-180GB")] == ["4%", "19%"]
    ),
    "On four nodes of A100 or H100 the old plan does not fit. On eight nodes of H200 with InfiniBand it gives away a "
    "tenth.": lambda: (
        not any(
            refresh.old_plan(refresh.cluster(device, network, 4)).fits
            for device in ("A100-80GB", "H100-80GB")
            for network in refresh.NETWORKS
        )
        and {f"{gives_away('H200-141GB', network):.1f}" for network in refresh.NETWORKS[2:]} == {"1.1"}
    ),
    "You have 8 nodes of 8 A100 each, and a model of 70 billion parameters, in the shape of Llama 3": lambda: (
        A100.devices == 64
        and 70e9 < MODEL.parameters < 71e9
        and (MODEL.layers, MODEL.hidden, MODEL.ffn_hidden, MODEL.heads, MODEL.kv_heads) == (80, 8192, 28672, 64, 8)
    ),
    "The bracket below the end of each bar says where 90% of such steps would end.": lambda: (
        "90% of such steps take" in estimate(MODEL, A100, Plan(dp=2, tp=8, pp=4), BATCH).interval
    ),
    "(The model allows 16. It has 64 heads, but only 8 of keys and values, so two tensor ranks hold the same ones.)": (
        lambda: (MODEL.heads % 16, 16 // (MODEL.kv_heads or 1)) == (0, 2)
    ),
    "With `tp=16` both points have moved towards their slopes, and down.": lambda: shows(
        "roofline(plans", "nearest to the slope is tp=16 over InfiniBand HDR"
    ),
    "105.22 s were published.": lambda: "2048, 105.22)" in lesson(NAME).code("published = {"),
    "A minibatch now has 2,048 samples: 256 would be too few for so many devices.": lambda: (
        BATCH == 256 < 1024 and "global_batch=2048" in lesson(NAME).code("found = search(")
    ),
    "On this cluster planning anew finds hardly anything better: one percent, which nobody could tell apart.": lambda: (
        0.005 < 1 - planned_anew().step_time.total / carried_over().step_time.total < 0.015
        and planned_anew().step_time.low < carried_over().step_time.total
    ),
    "With room for twice as much of each layer on a device, half as many tensor ranks are enough, and twice as many "
    "replicas share the samples: that saves a tenth of each step.": lambda: (
        refreshed("same plan")[:3] == [4, 4, 4]
        and refreshed("planned anew")[:3] == [8, 2, 4]
        and round(1 - refreshed("planned anew")[3] / refreshed("same plan")[3], 1) == 0.1
    ),
    "even the 39 billion parameters of section 4 run on your computer": lambda: (
        round(numbers("FlopCounterMode(", "parameters:")[0] / 1e9) == 39
    ),
    "To the last parameter, FLOP and byte, but for Adam's 37 counters of steps, one for each parameter, with 4 bytes "
    "each.": lambda: counted_alike() and tracked_alike(),
    "`torch/utils/flop_counter.py` and `torch/distributed/_tools/mem_tracker.py`": lambda: (
        hasattr(flop_counter, "FlopCounterMode") and hasattr(mem_tracker, "MemTracker")
    ),
    "Far from it. A replica holds the whole model.": lambda: not estimate(MODEL, A100, Plan(dp=64), BATCH).fits,
    "The first stage keeps activations for the most micro-batches": lambda: shows(
        "first = estimate(", "the fullest device (pipeline rank 0)"
    ),
    "Of the three, recomputation saves the most memory and costs the most time.": lambda: (
        variant("c: full recomputation")[0] == min(variant(name)[0] for name in SINGLE)
        and variant("c: full recomputation")[1] == max(variant(name)[1] for name in SINGLE)
    ),
    "Sequence parallelism costs nothing in all": lambda: (
        variant("b: sequence parallelism")[1] < variant("the first plan")[1]
    ),
    "(The last line, **a** and **b** together, saves even more, and costs nothing.)": lambda: (
        variant("a and b")[0] < variant("c: full recomputation")[0]
        and variant("a and b")[1] < variant("the first plan")[1]
    ),
    "two schedules, and micro-batches of up to four samples. A whole search may find one that is a few percent "
    "faster.)": lambda: (
        {plan.schedule for plan in refresh.worth_a_try(refresh.OLD)} == {"1f1b", "zb_h1"}
        and max(plan.micro_batch for plan in refresh.worth_a_try(refresh.OLD)) == 4
        and 0.02 < few_percent(refresh.cluster("A100-80GB", "InfiniBand HDR", 4)) < 0.05
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
    "The formula holds for the first two. A zero-bubble schedule beats it": lambda: (
        shows("played = simulate(", "gpipe  idle for 0.2727", "1f1b   idle for 0.2727", "zb_h1  idle for 0.1111")
        and round(3 / 11, 4) == 0.2727
    ),
    "the planner says beforehand, to the byte, what each of them sends": lambda: (
        len(set(numbers("predicted = estimate("))) == 1
    ),
    "The first is close, the other two are not": lambda: (
        shows("published = {", "published  14.45 s; planner  14.8 s")
        and shows("published = {", "published   60.1 s; planner  51.4 s", "published 105.22 s; planner  92.1 s")
    ),
    "All four say that this machine is slower than the catalogue's.": lambda: all(
        trial(row)[1] < 100 * A100.spec.matmul for row in range(4)
    ),
    "The first one, which is the most like the final plan, comes closest": lambda: (
        min(range(4), key=lambda row: abs(trial(row)[0] - 105.22)) == 0
    ),
    "together they give a narrower interval": lambda: (
        shows(TRIALS, "take 92.2 s to 124 s") and shows("published = {", "75.0 to 113.2 s") and 124 / 92.2 < 113.2 / 75
    ),
    "if the steps agree much better with another than the catalogue's; these four do not": lambda: shows(
        TRIALS, "take 92.2 s to 124 s"
    ),  # with the catalogue's network, as tests/planner/test_calibrate.py says
    "twice as fast, seven times, fifty times?": lambda: shows("slowest = max(", "7 times. The fastest is"),
    "Of thousands of legal plans, less than one in a hundred is worth choosing from": lambda: (
        found()[0] > 1000 and found()[2] < found()[0] / 100
    ),
    "An H200 computes exactly as fast as an H100, but has more memory, and faster: 141 GB in place of 80.": lambda: (
        H200.spec.peak == H100.spec.peak and H200.spec.bandwidth > H100.spec.bandwidth
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
