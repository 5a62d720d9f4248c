"""All numbers on cards are proved: a run or a constant fills them, or a quote names the proof.

A number is as in the lessons' prose (`tests.notebooks.numbers`). What is proved here are comparisons, and claims about
PyTorch, the planner and schedules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, lru_cache

import pytest
import torch

from course_lib.classroom.runs import events
from course_lib.mechanisms.mixed_precision import MasterWeights
from course_lib.planner import Cluster, Estimate, ModelSpec, estimate, simulate
from course_lib.planner.spec import layers_of_stages
from course_lib.schedules import SCHEDULES, messages_from, peak_in_flight
from course_lib.timeline import Timeline
from lessons.L01_one_machine_is_not_enough import questions as one_machine
from lessons.L02_data_parallelism import questions as scaling
from lessons.L03_sharded_data_parallelism import questions as sharding
from lessons.L04_layerwise_model_parallelism import questions as layerwise
from lessons.L05_pipeline_parallelism import questions as pipelines
from lessons.L06_tensor_parallelism import questions as tensor
from lessons.L06_tensor_parallelism.runs import run_cut
from lessons.L07_mixed_precision import questions as precision
from lessons.L07_mixed_precision.runs import RoundedWeights
from lessons.L08_combining_mechanisms.runs import PER_MACHINE, HybridExperiment
from lessons.L09_planning import questions as plans
from tests.lessons.asked import ASKED
from tests.notebooks.numbers import NOT_PROSE, NUMBER, SENTENCE, dots

NAMES = [name for name, page in ASKED.items() if page.room.startswith("L")]


@cache
def twice_as_fast() -> Timeline:
    """The step of eight units with everything at twice the speed."""
    return pipelines.STRATEGIES["faster"].run(8)


@lru_cache
def per_weight(dtype: torch.dtype, keeps: type[MasterWeights] | type[RoundedWeights]) -> tuple[int, ...]:
    return tuple(precision.bytes_per_weight(dtype, keeps).values())


def sixteen_bytes() -> bool:
    """Whether weight, gradient and Adam's two numbers take 16 bytes."""
    return per_weight(torch.float32, RoundedWeights) == (4, 4, 0, 8, 0)


def days(name: str) -> float:
    """Days of training on one machine."""
    cluster, plan = one_machine.MACHINES[name]
    return one_machine.TOKENS / estimate(one_machine.SEVEN, cluster, plan, 256).tokens_per_second / 86_400


def peak(device: str) -> float:
    return Cluster(device).spec.peak["bf16"]


def needed(stage: int) -> float:
    """GB on each of eight devices for a billion parameters."""
    return sharding.MemoryBudget(1, 8, 80).needed(stage)


def held(name: str, micro_batches: int, stages_each: int = 1) -> float:
    """Micro-batches whose activations the fullest of 8 devices holds, in whole devices' worth of layers."""
    return max(peak_in_flight(SCHEDULES[name](8 * stages_each, micro_batches))) / stages_each


def messages(name: str, stages: int) -> int:
    schedule = SCHEDULES[name](stages, pipelines.AFTER.micro_batches)
    return sum(len(list(messages_from(schedule, rank))) for rank in range(schedule.n_ranks))


def idle_with_a_longer_last_stage(times: float) -> float:
    seconds = [1.0] * 7 + [times]
    return simulate(SCHEDULES["gpipe"](*pipelines.BEFORE), seconds, [2 * one for one in seconds]).idle_fraction()


def sent_by_an_mlp(way: str) -> list[int]:
    """Bytes of each all-reduce on the way forward, for a rank."""
    run = run_cut(way, 2)
    return [sent for one, (sent, _) in zip(run.operations, run.traffic, strict=True) if one.forward == "all-reduce"]


def tensor_ranks_meet_four_times_a_layer() -> bool:
    return tensor.all_reduces(3, recomputes=False) == 4 * 3


@cache
def candidate(name: str) -> Estimate:
    return tensor.tried()[name]


@cache
def rung(number: int) -> Estimate:
    return list(plans._tried().values())[number]


def of_a_mesh(sizes: tuple[int, int, int], part: int) -> float:
    """The fullest rank's bytes of parameters, gradients or optimizer state, as a share of one process's."""
    experiment, alone = HybridExperiment(sizes), HybridExperiment((1, 1, 1)).predicted.held(0)
    return max(experiment.predicted.held(rank)[part] for rank in range(experiment.ranks)) / alone[part]


def replicas(nodes: int) -> Estimate:
    """The estimate of the best plan for 64 devices with more replicas, on this number of nodes."""
    best = plans.best(plans.NODES).plan
    cluster = replace(plans.NODES, nodes=nodes)
    more = replace(best, dp=cluster.devices // (best.tp * best.pp))
    return estimate(plans.MODEL, cluster, more, plans.BATCH)


def terabytes(model: ModelSpec) -> float:
    return 16 * model.parameters / 1e12


def gained(offer: str) -> float:
    first, cluster = plans.best(plans.NODES), plans.FIRST[offer]
    return first.step_time.total / plans.best(cluster).step_time.total


def slower_network(cluster: Cluster) -> bool:
    return cluster.inside_link.bandwidth == 12 * cluster.between_link.bandwidth


PROOFS: dict[str, dict[str, Callable[[], object]]] = {
    "Q5": {
        "with 80 GiB of memory": lambda: all(
            case.gib(2) < 80 < case.gib(16)
            for case in (one_machine.QUESTIONS["Q5"].first, *one_machine.QUESTIONS["Q5"].others)
        ),
        "16 bytes in all": sixteen_bytes,
    },
    "one_machine": {
        "one H100 with 80 GiB": lambda: one_machine.MACHINES["one H100"][0].device == "H100-80GB",
        "multiplies as fast": lambda: one_machine.H200.peak == Cluster("H100-80GB").spec.peak,
        "GiB, more than 80": lambda: terabytes(one_machine.SEVEN) > Cluster("H100-80GB").spec.memory / 1e12,
        "16 bytes for each parameter": sixteen_bytes,
        "real trainings use about half: more than four months": lambda: (
            4 * 30.5
            < days("one H200")
            < days("one H100")
            < 1.2 * 2 * one_machine.FLOPS / one_machine.H200.peak["bf16"] / 86_400
        ),
        "each of eight holds an eighth, and they are done in about three weeks": lambda: (
            days("each of eight H100") == pytest.approx(21, abs=3)
        ),
    },
    "bytes_sent": {
        "its gradients are numbers of 4 bytes": lambda: scaling.Gradients(1, 8).bytes == 4,
        "2 × {others} / {ranks} of {size}, less than twice the gradients": lambda: (
            scaling._count_bytes(scaling.Gradients(40_000, 4)).measured == 2 * 3 / 4 * 160_000
        ),
        "each number takes 4": lambda: torch.float32.itemsize == 4,
    },
    "Q3": {
        "devices of twice the speed": lambda: (
            scaling.REMEDIES["devices"]
            == {"seconds": scaling.Machines().seconds / 2, "update": scaling.Machines().update / 2}
        ),
    },
    "enough_stage": {
        "16 bytes for each parameter": lambda: needed(0) == 16,
        "8 bytes for each parameter. Only the optimizer's 8 bytes are shared out": lambda: needed(1) == 8 + 8 / 8,
        "it stays above half of what it was": lambda: 8 < sharding.MemoryBudget(1, 10**6, 80).needed(1) < 8.001,
        "4 bytes for each. The other 12 are shared out": lambda: needed(2) == 4 + 12 / 8,
        "All 16 bytes are shared out": lambda: needed(3) == 16 / 8,
    },
    "stage_3_sends": {
        "Stage 3 sends half as much again.": lambda: (
            sharding._sent(3, 2) == pytest.approx(1.5 * sharding._sent(1, 2), 1e-3)
        ),
    },
    "why_partition": {
        "with 80 GB each": lambda: Cluster(nodes=4).device == "A100-80GB",
        "takes 16 bytes with its gradient and Adam's two numbers": sixteen_bytes,
        "16 bytes for each parameter": sixteen_bytes,
        "which is more than 80 GB": lambda: 16 * layerwise.BILLIONS > 80,
    },
    "Q6": {
        "Numbers of 16 bits take half the room": lambda: (
            2 * sum(per_weight(torch.float16, RoundedWeights)) == sum(per_weight(torch.float32, RoundedWeights))
        ),
    },
    "Q11": {
        "everything at twice the speed": lambda: (
            pipelines.STRATEGIES["faster"] == pipelines.Strategy(speed=2 * pipelines.Strategy().speed)
        ),
        "A step takes about half as long, and still one unit works while all others wait.": lambda: (
            twice_as_fast().makespan == pytest.approx(0.5 * pipelines.Strategy().run(8).makespan, rel=0.05)
            and events.active(twice_as_fast()) == pytest.approx(1, rel=0.05)
        ),
        "a batch of twice the size": lambda: (
            pipelines.STRATEGIES["larger"] == pipelines.Strategy(work=2 * pipelines.Strategy().work)
        ),
    },
    "Q8": {
        "A backward pass takes twice as long as a forward pass.": lambda: (
            events.SECONDS["backward"] == 2 * events.SECONDS["forward"]
        ),
    },
    "tune_a_pipeline": {
        "idle for more than half of the time, the last device computes longer than the others": lambda: (
            idle_with_a_longer_last_stage(1) < 1 / 2 < idle_with_a_longer_last_stage(1.2)
        ),
        "micro-batches however many there are": lambda: held("1f1b", 64) == 8 == held("1f1b", 8) == held("gpipe", 8),
        "the bubble halves again, to about 10%, for more than twice as many messages": lambda: (
            round(3.5 / (pipelines.AFTER.micro_batches + 3.5), 2) == 0.1
            and messages("interleaved_1f1b", 16) > 2 * messages("1f1b", 8)
        ),
        "the fullest device holds 23 samples": lambda: (
            pipelines.SAMPLES / (m := pipelines.AFTER.micro_batches) * held("interleaved_1f1b", m, stages_each=2) == 23
        ),
    },
    "optimize_stages": {
        "A batch of twice the size takes twice as long.": lambda: (
            pipelines.STRATEGIES["larger"].run(8).busy(0) == pytest.approx(2 * pipelines.Strategy().run(8).busy(0))
        ),
        "1F1B keeps the activations of {AFTER.devices} micro-batches only": lambda: (
            held("1f1b", 32) == 8 and held("gpipe", 32) == 32
        ),
    },
    "which_cut": {
        "A makes the hidden states four times as wide": lambda: (
            max(sums := sent_by_an_mlp("rows, rows")) == 4 * min(sums)
        ),
    },
    "count_all_reduces": {
        "Each block goes forward twice and back once, so it needs two times two of g's all-reduces and two of f's, six "
        "in all, and four without recomputation.": lambda: (
            [tensor.all_reduces(3, recomputes) for recomputes in (True, False)] == [6 * 3, 4 * 3]
        ),
        "so there it makes five": lambda: tensor.all_reduces(3, recomputes=True, early_stop=True) == 5 * 3,
    },
    "choose_strategy": {
        "GPUs with 80 GB each": lambda: tensor.NODES.device == "A100-80GB",
        "16 bytes for each parameter": sixteen_bytes,
        "more than 1 TB": lambda: terabytes(tensor.LARGE) > 1,
        "four times in each layer": tensor_ranks_meet_four_times_a_layer,
        "some have two layers": lambda: max(layers_of_stages(tensor.LARGE.layers, 64)) == 2,
        "micro-batches of one sample": lambda: tensor.CANDIDATES[tensor.SHARDED].micro_batch == 1,
        "There are two good ways out.": lambda: candidate(tensor.SHARDED).mfu > 0.95 * candidate(tensor.FIRST_TRY).mfu,
        "the intervals of these three overlap": lambda: (
            (three := [candidate(tensor.SHARDED), candidate(tensor.FIRST_TRY), tensor._best()])
            and max(one.step_time.low for one in three) < min(one.step_time.high for one in three)
        ),
        "On eight times as many devices, with the same {BATCH} sequences, each has one": lambda: (
            8 * tensor.NODES.devices == tensor.BATCH == tensor.tried(64)[tensor.SHARDED].plan.dp
        ),
    },
    "bytes_per_weight": {
        "2 for the weight and 2 for the gradient that has just been computed, both in bfloat16. In 32 bits are the sum "
        "of the gradients so far, 4, AdamW's two numbers, 8, and the master weight, 4.": lambda: (
            per_weight(torch.bfloat16, MasterWeights) == (2, 2, 4, 8, 4)
        ),
        "In float32 it would be less, 16": sixteen_bytes,
    },
    "why_mixed_precision": {
        "Smaller by half: activations and messages.": lambda: torch.float16.itemsize / torch.float32.itemsize == 1 / 2,
        "Activations and messages become half as large.": lambda: (
            torch.float16.itemsize / torch.float32.itemsize == 1 / 2
        ),
        "16 bytes for each parameter before and 2 + 2 + 12 after (18 with gradients in 32 bits, 20 with both)": (
            lambda: sixteen_bytes() and per_weight(torch.float16, MasterWeights) == (2, 2, 4, 8, 4)
        ),
        "In float16 squares become zero first, and so does the small number that is added to them: 0 / 0.": lambda: (
            torch.tensor(1e-4, dtype=torch.float16).square() == 0 == torch.tensor(1e-8, dtype=torch.float16)
        ),
    },
    "diagnose_efficiency": {
        "each update is smaller than half of a weight's last digit in bfloat16": lambda: precision._two_faults().shown,
    },
    "optimize_training": {
        "on hardware with circuits for 16 bits products are at least twice as fast": lambda: all(
            Cluster(name).spec.peak["bf16"] > 2 * Cluster(name).spec.peak["fp32"] for name in ("A100-80GB", "H100-80GB")
        ),
    },
    "which_axis_across": {"twice forward and twice backward in every layer": tensor_ranks_meet_four_times_a_layer},
    "evaluate_strategy": {
        "in 4 all-reduces for each layer and micro-batch": tensor_ranks_meet_four_times_a_layer,
        "The memory is divided by nearly eight": lambda: 1 / 8 < of_a_mesh((1, 1, 8), 0) < 1.15 / 8,
        "two replicas of four tensor ranks, which with ZeRO-1 hold a quarter of weights and gradients and an eighth of "
        "the optimizer's state": lambda: (
            of_a_mesh((2, 1, 4), 0) == pytest.approx(1 / 4, rel=0.07)
            and of_a_mesh((2, 1, 4), 2) == pytest.approx(1 / 8, rel=0.07)
        ),
        "two stages of four tensor ranks, which hold an eighth of everything": lambda: all(
            of_a_mesh((1, 2, 4), part) == pytest.approx(1 / 8, rel=0.1) for part in range(3)
        ),
        "The memory falls to about an eighth": lambda: of_a_mesh((1, 1, 8), 0) == pytest.approx(1 / 8, rel=0.15),
        "4 to a machine": lambda: PER_MACHINE == 4,
    },
    "optimize_efficiency": {
        "A100 with 80 GB each": lambda: plans.NODES.device == "A100-80GB",
        "a twelfth as fast as the links inside": lambda: slower_network(plans.NODES),
        "Now less than half of the memory is in use": lambda: rung(0).memory.total < rung(0).capacity / 2,
        "A third of each step is tensor traffic": lambda: (
            rung(0).step_time.tensor / rung(0).step_time.total == pytest.approx(1 / 3, abs=0.02)
        ),
        "Memory that is free is spent on not computing twice.": lambda: (
            rung(1).step_time.recompute > rung(2).step_time.recompute == 0
        ),
        "does not compute everything twice": lambda: rung(1).step_time.recompute > rung(2).step_time.recompute == 0,
        "bring it to 82.7 s, more than twice as fast as at first, at 61% MFU": lambda: (
            round((best := plans.best(plans.NODES)).step_time.total, 1) == 82.7
            and 2 * best.step_time.total < rung(0).step_time.total
            and f"{best.mfu:.0%}" == "61%"
        ),
    },
    "more_replicas": {
        "a device sends less than twice its gradients however many replicas there are": lambda: (
            scaling._count_bytes(scaling.Gradients(50_000, 10)).measured < 2 * 4 * 50_000
        ),
        "is not the best for": lambda: (
            plans.best(replicas(128).cluster).step_time.total < replicas(128).step_time.total
        ),
        "Every doubling still helps: each device computes for half as long.": lambda: all(
            replicas(2 * nodes).step_time.compute == pytest.approx(replicas(nodes).step_time.compute / 2, rel=0.01)
            and replicas(2 * nodes).step_time.total < replicas(nodes).step_time.total
            for nodes in (8, 16, 32, 64)
        ),
    },
    "same_plan": {
        "by as many H100, on the same network": lambda: (
            plans.NODES.devices == plans.H100.devices and plans.NODES.between == plans.H100.between
        ),
    },
    "which_offer": {
        "the network twice as fast": lambda: (
            plans.FIRST["network"].between_link.bandwidth == 2 * plans.NODES.between_link.bandwidth
        ),
        "half as many A100 again, on the same network": lambda: (
            (plans.FIRST["a100"].devices, plans.FIRST["a100"].between) == (96, plans.NODES.between)
        ),
        "Over three times the peak, and less than that in a step": lambda: plans._ratios()["peak"] > 3 > gained("h100"),
        "Half as many devices more are about half as fast again": lambda: gained("a100") == pytest.approx(1.5, 0.05),
    },
    "infrastructure": {
        "have more FLOPs": lambda: plans._sites().shown and 32 * peak("B200-180GB") > 64 * peak("H100-80GB"),
        "16 bytes for each parameter": sixteen_bytes,
    },
}

GIVEN, FORMULA = "the situation, and all that computes with it is filled", "a formula"
NO_PROOF: dict[str, dict[str, str]] = {  # a part of a sentence, and why it needs no proof
    "stage_3_sends": {"With half of the samples, and so half of the activations": "what the run is given"},
    "evaluate_replicas": {
        "half of the memory is free": GIVEN,
        "with twice the samples for each device there is twice as much to compute": "twice is twice",
    },
    "Q5": {
        "ten times as fast, with the same memory": "what an option is",
        "with twice the bandwidth of the one it has now": "what an option is",
    },
    "one_machine": {"6 FLOPs for each parameter and token": "it has a source"},
    "pipeline_efficiency": {
        "m + p - 1": FORMULA,
        "1,000": "a number that nobody takes",
        "a thousand times": "once for each of them",
    },
    "which_cut": {"four times as wide as x": GIVEN},
    "count_all_reduces": {
        "Half of them": "a slip, whose factor the code has",
        "This runs everything twice.": "a slip, whose factor the code has",
    },
    "choose_strategy": {
        "(Published: 51.7% with ZeRO-3 for 70 billion parameters on 64 A100s, everything recomputed, one sample of "
        "8,192 tokens on each; torchtitan": "it has a source",
    },
    "Q9": {"where 32 were used": "bits of a number format", "are still done in 16": "bits of a number format"},
    "why_mixed_precision": {
        "a third of each step": GIVEN,
        "the exchange takes a sixth of the old step in place of a third": "half of a third",
        "since small updates round away in 16": "bits of a number format",
    },
    "pipelining_gain": {"for 1 second": GIVEN, "- 1 =": FORMULA, "1/{CUT.micro_batches} second": FORMULA},
    "optimize_stages": {
        "devices of twice the speed, links of ten times the speed, or memory for a batch of twice the size": GIVEN,
        "Devices of twice the speed": GIVEN,
        "for 1 of": FORMULA,
        "- 1 =": FORMULA,
        "of 1/{": FORMULA,
    },
    "which_offer": {"{before.step_time.total / after.step_time.low:.2f} with 90%": "what an interval is"},
    "infrastructure": {"a third the most devices": "the third of three managers"},
    "diagnose_efficiency": {"little more than half as long": GIVEN},
    "optimize_training": {"half as large": "16 bits for 32", "halves": "16 bits for 32"},
}

RANKS = re.compile(r"((?:\d+, )*(?:\d+ and )?\d+) (?:ranks|workers)")  # for the last test


def texts(name: str) -> Iterator[str]:
    """The paragraphs and items of a page."""
    page = ASKED[name]
    for heading, (_, text) in (page.sections | page.found).items():
        if heading != "events":
            yield from re.split(r"\n\n|\n(?=- )", text)


def unproved(texts: Iterable[str], quotes: Iterable[str]) -> Iterator[str]:
    """The sentences with a number that no quote covers."""
    for text in texts:
        looked_at = NOT_PROSE.sub(dots, re.sub(r"\{[^{}]*\}(?: [mb]illion)?", dots, text))
        found = (match.span() for quote in quotes for match in re.finditer(re.escape(quote), text))
        covered = {place for span in found for place in range(*span)}
        for sentence in SENTENCE.finditer(looked_at):
            if any(number.start() not in covered for number in NUMBER.finditer(looked_at, *sentence.span())):
                yield text[slice(*sentence.span())].strip()


@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_filled_or_proved(name: str) -> None:
    quotes = [*PROOFS.get(name, {}), *NO_PROOF.get(name, {})]
    left = [RANKS.sub("", text) for text in texts(name)]
    assert not list(unproved(left, quotes)), "quote these with what proves them"


@pytest.mark.parametrize(("name", "quote"), [(name, quote) for name in PROOFS for quote in PROOFS[name]])
def test_it_is_so(name: str, quote: str) -> None:
    assert any(quote in text for text in texts(name)), "the card no longer says this"
    assert PROOFS[name][quote](), "the card says this, and it is not so"


@pytest.mark.parametrize(("name", "quote"), [(name, quote) for name in NO_PROOF for quote in NO_PROOF[name]])
def test_what_needs_no_proof_is_still_said(name: str, quote: str) -> None:
    assert any(quote in text for text in texts(name))
