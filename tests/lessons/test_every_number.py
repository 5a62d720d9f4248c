"""No number in the explanation of a card is unproved: a quoted sentence covers it, or it needs no proof.

Numbers are found as in the lessons' prose (`tests.notebooks.numbers`), except in fields, which a run fills. Situations,
options and reports of runs are for `test_given_and_found`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, lru_cache

import pytest
import torch

from course_lib.classroom.runs.training import RoundedWeights
from course_lib.mechanisms import batches
from course_lib.mechanisms.mixed_precision import MasterWeights
from course_lib.planner import Cluster, Estimate, ModelSpec, Plan, estimate, simulate
from course_lib.schedules import SCHEDULES, messages_from, peak_in_flight
from lessons.L01_one_machine_is_not_enough import questions as one_machine
from lessons.L02_data_parallelism import questions as scaling
from lessons.L03_sharded_data_parallelism import questions as sharding
from lessons.L04_layerwise_model_parallelism import questions as layerwise
from lessons.L05_pipeline_parallelism import questions as pipelines
from lessons.L06_tensor_parallelism import questions as tensor
from lessons.L07_mixed_precision import questions as precision
from lessons.L08_combining_mechanisms.runs import HybridExperiment
from lessons.L09_planning import questions as plans
from tests.lessons.asked import ASKED
from tests.notebooks.numbers import NOT_PROSE, NUMBER, SENTENCE, dots

Proofs = dict[str, Callable[[], object]]

NAMES = [name for name, page in ASKED.items() if page.room.startswith("L")]
DAY = 86_400


@lru_cache
def per_weight(dtype: torch.dtype, keeps: type[MasterWeights] | type[RoundedWeights]) -> tuple[int, ...]:
    return tuple(precision.bytes_per_weight(dtype, keeps).values())


def sixteen_bytes() -> bool:
    """Whether weight, gradient and Adam's two numbers take 16 bytes."""
    return per_weight(torch.float32, RoundedWeights) == (4, 4, 8, 0)


@cache
def machine(name: str) -> Estimate:
    cluster, plan = one_machine.MACHINES[name]
    return estimate(one_machine.SEVEN, cluster, plan, 256)


def days(name: str) -> float:
    return one_machine.TOKENS / machine(name).tokens_per_second / DAY


def flops() -> float:
    """Six FLOPs per parameter and token: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1."""
    return 6 * one_machine.SEVEN.parameters * one_machine.TOKENS


def peak(device: str) -> float:
    return Cluster(device).spec.peak["bf16"]


def turns(devices: int, micro_batches: int) -> int:
    return micro_batches + devices - 1


def busy(devices: int, micro_batches: int) -> str:
    """The busy share of a simulated GPipe schedule, with forward and backward passes of one second each."""
    schedule = SCHEDULES["gpipe"](devices, micro_batches)
    timeline = simulate(schedule, 1.0, 1.0)
    assert timeline.makespan == pytest.approx(2 * turns(devices, micro_batches))
    return f"{1 - timeline.idle_fraction():.3g}"


def held(name: str, devices: int, micro_batches: int, stages_each: int = 1) -> float:
    """Micro-batches whose activations the fullest device holds, in whole devices' worth of layers."""
    return max(peak_in_flight(SCHEDULES[name](devices * stages_each, micro_batches))) / stages_each


def messages(name: str, stages: int) -> int:
    schedule = SCHEDULES[name](stages, 32)
    return sum(len(list(messages_from(schedule, rank))) for rank in range(schedule.n_ranks))


@cache
def candidate(name: str) -> Estimate:
    return estimate(tensor.LARGE, tensor.NODES, tensor.CANDIDATES[name], tensor.BATCH)


@cache
def rung(name: str) -> Estimate:
    return estimate(plans.MODEL, plans.NODES, plans.LADDER[name], plans.BATCH)


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


def tensor_ranks_meet_four_times_a_layer() -> bool:
    return tensor._count_all_reduces(3).measured == 4 * 3


PROOFS: dict[str, Proofs] = {
    "Q5": {"16 bytes in 32-bit numbers": sixteen_bytes},
    "one_machine": {
        "16 bytes for each parameter (weights, gradients, and what Adam keeps in 32 bits) are 107 GB, more than 80": (
            lambda: sixteen_bytes() and 1e3 * terabytes(one_machine.SEVEN) == pytest.approx(107, abs=0.5)
        ),
        "multiplies as fast and has 141 GB": lambda: (
            peak("H200-141GB") == peak("H100-80GB") and Cluster("H200-141GB").spec.memory == 141e9
        ),
        "On the H200 it fits": lambda: machine("one H200").fits and not machine("one H100").fits,
        "6 FLOPs for each parameter and token are 5.6e21.": lambda: f"{flops():.1e}" == "5.6e+21",
        "at most 9.9e14 in a second, so the training takes 65 days": lambda: (
            f"{peak('H100-80GB'):.1e}" == "9.9e+14" and round(flops() / peak("H100-80GB") / DAY) == 65
        ),
        "real trainings use about half: more than four months": lambda: (
            0.4 < machine("one H100").mfu < 0.6 and 4 * 30.5 < days("one H200") < days("one H100")
        ),
        "each of eight holds an eighth, and they are done in about three weeks": lambda: (
            one_machine.MACHINES["each of eight H100"][1] == Plan(dp=8, zero=3)
            and days("each of eight H100") == pytest.approx(21, abs=3)
        ),
        "16 bytes for each parameter: 107 GB, more than 80.": sixteen_bytes,
        "6 FLOPs for each parameter and token: months on one device": lambda: days("one H200") > 61,
    },
    "bytes_sent": {
        "2 × {others} / {ranks} of {size}, less than twice the gradients": lambda: (
            scaling._count_bytes(scaling.Gradients(40_000, 4)).measured == 2 * 3 / 4 * 160_000
        ),
        "each number takes 4": lambda: torch.float32.itemsize == 4,
    },
    "Q3": {
        "With devices of twice the speed": lambda: (
            scaling.REMEDIES["devices"]["seconds"] == scaling.Cluster().seconds / 2
        )
    },
    "data_distribution": {
        "Shares of 3, 3, 2 and 2": lambda: [len(one) for one in batches.split(torch.ones(10), 4)] == [3, 3, 2, 2],
        "a share of two counts one and a half times as much as one from a share of three": lambda: 1 / 2 == 1.5 * 1 / 3,
        "With 12 samples the shares are equal": lambda: {len(one) for one in batches.split(torch.ones(12), 4)} == {3},
    },
    "ideal_speed_up": {
        "8 workers would need 3.2 / 8 = 0.4 s. They need 0.56 s, which is 5.7 times as fast, 71% of the ideal.": (
            lambda: (f"{3.2 / 8:g}", f"{3.2 / 0.56:.1f}", f"{0.4 / 0.56:.0%}") == ("0.4", "5.7", "71%")
        ),
        "Each worker has an eighth of the samples": lambda: 8 == 3.2 / 0.4,
        "that is the missing 0.16 s": lambda: round(0.56 - 0.4, 2) == 0.16,
        "A ninth worker shortens only the 0.4 s, to 0.36 s, and adds a little to the exchange: a step is 8% shorter at "
        "best, for an eighth more hardware.": lambda: (
            round(3.2 / 9, 2) == 0.36 and round((3.2 / 8 - 3.2 / 9) / 0.56, 2) == 0.08
        ),
        "The ideal is 0.4 s; the speed-up is 5.7, or 71% of the ideal.": lambda: round(3.2 / 0.56, 1) == 5.7,
    },
    "evaluate_replicas": {
        "Ten times on 16 devices is 62.5% of the ideal: of each step, more than a third is not computing.": lambda: (
            10 / 16 == 0.625 and 1 - 0.625 > 1 / 3
        ),
        "With 8 samples for each device": lambda: 128 / 16 == 8,
        "10 of 16 is 62.5%": lambda: 10 / 16 == 0.625,
    },
    "enough_stage": {
        "Everything is on every device, 16 bytes for each parameter": lambda: (
            sharding.Training(1, 8, 80).needed(0) == 16
        ),
        "8 bytes for each parameter. Only the optimizer's 8 bytes are shared out": lambda: (
            sharding.Training(1, 8, 80).needed(1) == 8 + 8 / 8
        ),
        "it stays above half of what it was": lambda: 8 < sharding.Training(1, 10**6, 80).needed(1) < 8.001,
        "4 bytes for each. The other 12 are shared out": lambda: sharding.Training(1, 8, 80).needed(2) == 4 + 12 / 8,
        "All 16 bytes are shared out": lambda: sharding.Training(1, 8, 80).needed(3) == 16 / 8,
    },
    "stage_3_sends": {
        "Stage 3 sends half as much again.": lambda: (
            sharding._sent(3, 2) == pytest.approx(1.5 * sharding._sent(1, 2), 1e-3)
        )
    },
    "why_partition": {
        "Each parameter takes 16 bytes with its gradient and Adam's two numbers: 320 GB": lambda: (
            sixteen_bytes() and 16 * 20 == 320 and layerwise.TWENTY.parameters == pytest.approx(20e9, rel=0.02)
        ),
        "So these 320 GB themselves have to be divided": lambda: 16 * 20 == 320,
        "its layers on 8 devices make 40 GB each, which leaves room for activations; the 32 devices are then 4 such": (
            lambda: 320 / 8 == 40 and 32 / 8 == 4
        ),
        "each of 32 keeps 10 GB": lambda: 320 / 32 == 10,
        "16 bytes for each parameter, 320 GB in all, which is more than 80 GB.": sixteen_bytes,
    },
    "Q6": {
        "Numbers of 16 bits take half the room": lambda: (
            2 * sum(per_weight(torch.float16, RoundedWeights)) == sum(per_weight(torch.float32, RoundedWeights))
        )
    },
    "pipeline_efficiency": {
        "a device has something to do for m of m + p - 1 turns: 2 of 5, 40%.": lambda: (
            turns(4, 2) == 5 and busy(4, 2) == "0.4"
        ),
        "The other 3 turns are the bubble": lambda: turns(4, 2) - 2 == 3,
        "With 8 micro-batches it is 8 of 11, 73%.": lambda: turns(4, 8) == 11 and busy(4, 8) == "0.727",
        "With 1,000 nearly nothing would be idle": lambda: 1000 / turns(4, 1000) > 0.99,
        "m / (m + p - 1): 2 of 5 turns.": lambda: turns(4, 2) == 5,
        "8 of 11 turns, 73%, with 8 micro-batches.": lambda: busy(4, 8) == "0.727",
    },
    "pipelining_gain": {
        "Each device still computes for 1 second": lambda: 8 * 1 / 8 == 1,
        "A micro-batch takes 1/8 second on a device, and a step has 8 + 4 - 1 = 11 such turns: 1.375 s, 2.9 times": (
            lambda: turns(4, 8) == 11 and 11 / 8 == 1.375 and round(4 / 1.375, 1) == 2.9
        ),
        "Devices are busy for 73% of it, where it was 25%.": lambda: (busy(4, 8), busy(4, 1)) == ("0.727", "0.25"),
        "up to 4 times as fast as before": lambda: 4 / (turns(4, 10**6) / 10**6) == pytest.approx(4, rel=1e-5),
        "11 turns of 1/8 second: 1.375 s for a step, 2.9 times as fast.": lambda: 11 / 8 == 1.375,
        "Devices are busy for 73% of the time, before for 25%.": lambda: busy(4, 8) == "0.727",
        "four times as fast is the limit": lambda: 4 / (turns(4, 10**6) / 10**6) < 4,
    },
    "tune_a_pipeline": {
        "a device holds no more than 8 micro-batches however many there are. With 8 of them the first device gains "
        "nothing yet": lambda: held("1f1b", 8, 64) == 8 == held("1f1b", 8, 8) == held("gpipe", 8, 8),
        "with 32 micro-batches of 2 samples, the fullest device holds 16 samples where it held 64, and the bubble "
        "falls from 7/15, 47%, to 7/39, 18%.": lambda: (
            2 * held("1f1b", 8, 32) == 16
            and 8 * held("gpipe", 8, 8) == 64
            and (busy(8, 8), busy(8, 32)) == (f"{8 / 15:.3g}", f"{32 / 39:.3g}")
            and (f"{7 / 15:.0%}", f"{7 / 39:.0%}") == ("47%", "18%")
        ),
        "the bubble halves again, to about 10%, for more than twice as many messages": lambda: (
            round(3.5 / (32 + 3.5), 2) == 0.1 and messages("interleaved_1f1b", 16) > 2 * messages("1f1b", 8)
        ),
        "the fullest device holds 23 samples where it held 16": lambda: (
            2 * held("interleaved_1f1b", 8, 32, stages_each=2) == 23
        ),
        "micro-batches of 2 samples may be so small that their overhead eats the gain, and then 4": lambda: (
            64 / 32 == 2
        ),
        "from 47% idle to 18% with 32 of them": lambda: (f"{7 / 15:.0%}", f"{7 / 39:.0%}") == ("47%", "18%"),
    },
    "optimize_stages": {
        "each is busy for 1 of 8 seconds, 12.5%.": lambda: busy(8, 1) == "0.125",
        "Devices of twice the speed make that 4 seconds": lambda: 8 / 2 == 4,
        "A batch of twice the size takes twice as long.": lambda: (
            pipelines.STRATEGIES["larger"].run(8).busy(0) == pytest.approx(2 * pipelines.Strategy().run(8).busy(0))
        ),
        "32 micro-batches of 2 samples flow through in 32 + 8 - 1 = 39 turns of 1/32 second, 1.22 s in place of 8, and "
        "devices are busy for 82% of the time.": lambda: (
            turns(8, 32) == 39 and f"{39 / 32:.2f}" == "1.22" and busy(8, 32) == "0.821"
        ),
        "the activations of all 64 samples; with 1F1B the first holds those of 8 micro-batches, 16 samples": lambda: (
            held("gpipe", 8, 32) == 32 and held("1f1b", 8, 32) == 8 and 8 * 64 / 32 == 16
        ),
        "micro-batches of 2 samples use a device well; if not, 16 of 4 samples take 23 turns of 1/16 second, 1.44 s.": (
            lambda: turns(8, 16) == 23 and f"{23 / 16:.2f}" == "1.44"
        ),
        "One of eight devices works at a time: 12.5%.": lambda: busy(8, 1) == "0.125",
        "32 micro-batches: 39 turns of 1/32 second, 1.22 s.": lambda: turns(8, 32) == 39,
        "1F1B keeps the activations of 8 micro-batches only.": lambda: held("1f1b", 8, 32) == 8,
    },
    "choose_strategy": {
        "between nodes, twelve times slower": lambda: (
            tensor.NODES.inside_link.bandwidth == 12 * tensor.NODES.between_link.bandwidth
        ),
        "A replica needs 16 bytes for each parameter, more than 1 TB, so 64 replicas do not fit.": lambda: (
            terabytes(tensor.LARGE) > 1 and not candidate("64 replicas").fits
        ),
        "reach 46% of the peak: every micro-batch fetches all weights over the slow links, so the devices wait for "
        "more than a quarter of the step": lambda: (
            f"{(one := candidate('64 replicas, all states sharded (ZeRO-3)')).mfu:.0%}" == "46%"
            and one.step_time.data > one.step_time.total / 4
        ),
        "64 tensor ranks fit, but four times in each layer hidden states cross the slow links, and nobody can compute "
        "meanwhile: 9%.": lambda: (
            f"{candidate('64 tensor ranks').mfu:.0%}" == "9%" and tensor_ranks_meet_four_times_a_layer()
        ),
        "64 stages send little, but 80 layers do not make 64 equal stages: some have two layers, and the others wait "
        "for them: 36%.": lambda: f"{candidate('64 stages').mfu:.0%}" == "36%" and 64 < tensor.LARGE.layers < 128,
        "8 tensor ranks, 4 stages and 2 replicas, reaches 44%": lambda: (
            f"{candidate('8 tensor ranks, 4 stages, 2 replicas').mfu:.0%}" == "44%"
        ),
        "a search among all plans finds that 2 tensor ranks are enough, with 4 stages and 8 replicas: 62%.": lambda: (
            "the best of all plans, 2 tensor ranks, 4 stages, 8 replicas" in str(tensor._strategy().found["lines"])
            and str(tensor._strategy().found["lines"]).endswith("computes at 62% of what the devices can")
        ),
        "16 bytes for each parameter are more than a terabyte": lambda: terabytes(tensor.LARGE) > 1,
    },
    "bytes_per_weight": {
        "2 for the weight, 2 for its gradient, 8 for AdamW's two numbers, and 4 for the master weight: as many as "
        "before.": lambda: (
            per_weight(torch.float16, MasterWeights) == (2, 2, 8, 4)
            and sum(per_weight(torch.float16, MasterWeights)) == sum(per_weight(torch.float32, RoundedWeights))
        ),
        "they are one more copy, of 4 bytes": lambda: per_weight(torch.float16, MasterWeights)[-1] == 4,
    },
    "why_mixed_precision": {
        "Smaller by half: activations and messages.": lambda: torch.float16.itemsize / torch.float32.itemsize == 1 / 2,
        "the exchange takes a sixth of the old step in place of a third": lambda: 1 / 3 / 2 == 1 / 6,
        "16 bytes for each parameter before and 2 + 2 + 12 after (18 with gradients in 32 bits, 20 with both)": (
            lambda: (
                sum(per_weight(torch.float32, RoundedWeights)) == 16 == 2 + 2 + 12
                and per_weight(torch.float16, MasterWeights)[2:] == (8, 4)
                and (2 + 4 + 12, 2 + 2 + 4 + 12) == (18, 20)
            )
        ),
        "Activations and messages become half as large.": lambda: torch.float16.itemsize == 2,
        "In float16 squares become zero first, and so does the small number that is added to them: 0 / 0.": lambda: (
            torch.tensor(1e-4, dtype=torch.float16).square() == 0 == torch.tensor(1e-8, dtype=torch.float16)
        ),
    },
    "diagnose_efficiency": {
        "each update is smaller than half of a weight's last digit in bfloat16": lambda: precision._two_faults().shown,
        "one of four computes at a time, 25%": lambda: busy(4, 1) == "0.25",
        "it is m of m + 3 turns: 84% with 16, 96% with 64.": lambda: (
            turns(4, 16) == 16 + 3 and (busy(4, 16), f"{64 / turns(4, 64):.0%}") == ("0.842", "96%")
        ),
        "with 16 the devices are busy for 84% of the time, where it was 25%": lambda: busy(4, 16) == "0.842",
    },
    "optimize_training": {
        "The gradients of the 8 micro-batches add up": lambda: 256 / 8 / 4 == 8,
        "0.1 s in place of 0.8, so 1.3 s": lambda: (0.8 / 8, 1.2 + 0.1) == (0.1, 1.3),
        "messages are half as large, 0.05 s, and on hardware with circuits for 16 bits products are at least twice as "
        "fast, 0.6 s. Together 0.65 s, three times as fast as before.": lambda: (
            0.1 / 2 == 0.05
            and 1.2 / 2 == 0.6
            and round(2 / 0.65) == 3
            and all(
                Cluster(name).spec.peak["bf16"] > 2 * Cluster(name).spec.peak["fp32"]
                for name in ("A100-80GB", "H100-80GB")
            )
        ),
        "Activations are half as large, so there is room for 8 sequences and only 4 micro-batches": lambda: (
            256 / 8 / 8 == 4
        ),
        "8 of them keep 4 stages busy for 8 of 11 turns": lambda: turns(4, 8) == 11,
        "One exchange in a step in place of eight: 1.3 s": lambda: 1.2 + 0.8 / 8 == 1.3,
        "Mixed precision halves messages and at least halves computing: about 0.65 s.": lambda: 0.05 + 0.6 == 0.65,
    },
    "which_axis_across": {
        "twice forward and twice backward in every layer": tensor_ranks_meet_four_times_a_layer,
    },
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
    },
    "optimize_efficiency": {
        "the network between nodes is a twelfth as fast": lambda: (
            plans.NODES.inside_link.bandwidth == 12 * plans.NODES.between_link.bandwidth
        ),
        "A third of each step is tensor traffic, as groups of 16 reach over two nodes: 8 tensor ranks and 8 stages put "
        "it back on the fast links, and a step takes 129 s where it took 179 s.": lambda: (
            rung("as it is").step_time.tensor / rung("as it is").step_time.total == pytest.approx(1 / 3, abs=0.02)
            and round(rung("as it is").step_time.total) == 179
            and round(rung("8 tensor ranks, 8 stages").step_time.total) == 129
        ),
        "without recomputation the backward pass does not compute everything twice, and sequence parallelism keeps "
        "what has to be held small; 96.5 s.": lambda: (
            round(rung("no recomputation, sequence parallelism").step_time.total, 1) == 96.5
        ),
        "2 replicas of 4 stages with ZeRO-1 send less through pipelines, and 92.3 s remain": lambda: (
            round(rung("2 replicas with ZeRO-1, 4 stages").step_time.total, 1) == 92.3
        ),
        "bring it to 81.6 s, more than twice as fast as at first, at 62% MFU": lambda: (
            round((best := plans.best(plans.NODES)).step_time.total, 1) == 81.6
            and 2 * best.step_time.total < rung("as it is").step_time.total
            and f"{best.mfu:.0%}" == "62%"
        ),
        "Memory that is free is spent on not computing twice.": lambda: (
            rung("8 tensor ranks, 8 stages").step_time.recompute
            > rung("no recomputation, sequence parallelism").step_time.recompute
            == 0
        ),
    },
    "more_replicas": {
        "a device sends less than twice its gradients however many replicas there are": lambda: (
            scaling._count_bytes(scaling.Gradients(50_000, 10)).measured < 2 * 4 * 50_000
        ),
        "the best plan for 64 is not the best for 1,024": lambda: (
            plans.best(replicas(128).cluster).step_time.total < replicas(128).step_time.total
        ),
        "Every doubling still helps: each device computes for half as long.": lambda: all(
            replicas(2 * nodes).step_time.compute == pytest.approx(replicas(nodes).step_time.compute / 2, rel=0.01)
            and replicas(2 * nodes).step_time.total < replicas(nodes).step_time.total
            for nodes in (8, 16, 32, 64)
        ),
    },
    "which_offer": {
        "Over three times the peak, and less than that in a step": lambda: (
            plans._ratios()["peak"] > 3 > plans._buy("h100").found["gain"]  # type: ignore[operator]
        ),
        "what has been published of steps on B200 uses less than half of that peak": lambda: (
            Cluster("B200-180GB").spec.matmul < 0.5
        ),
        "Twice the devices are about twice as fast": lambda: plans._buy("a100").found["gain"] == pytest.approx(2, 0.05),
        "the peak of an H100 is more than three times that of an A100": lambda: (
            peak("H100-80GB") > 3 * peak("A100-80GB")
        ),
    },
    "infrastructure": {
        "For 70 billion parameters the 64 H100 lead, although the 32 B200 have more FLOPs": lambda: (
            plans._sites().shown and 32 * peak("B200-180GB") > 64 * peak("H100-80GB")
        ),
        "They are the only ones with enough memory for 405 billion, though: 16 bytes for each parameter are 6.5 TB, "
        "more than 64 H100 or 32 B200 have.": lambda: (
            round(terabytes(plans.LARGER), 1) == 6.5
            and [plans._has_room(site, plans.LARGER) for site in plans.SITES.values()] == [False, True, False]
            and plans.best(plans.SITES["128 A100, slow network"], plans.LARGER).fits
        ),
        "6.5 TB for 405 billion parameters rule two of the offers out for it.": lambda: (
            round(terabytes(plans.LARGER), 1) == 6.5
        ),
    },
}

GIVEN = "what the situation says"
NO_PROOF: dict[str, dict[str, str]] = {  # a part of a sentence, and why it needs no proof
    "find_the_flaw": {"the work of one, done eight times": GIVEN},
    "evaluate_replicas": {
        "that of one process that has all 128 samples": GIVEN,
        "measure a step on 1, 8 and 16 devices": GIVEN,
        "with twice the samples for each device there is twice as much to compute": "twice is twice",
    },
    "pipeline_efficiency": {"costs its fixed time a thousand times": "once for each of a thousand"},
    "which_cut": {"four times as wide as x": GIVEN},
    "count_all_reduces": {"Half of them": "a slip, whose factor the code has"},
    "Q9": {"are still done in 16": "bits of a number format"},
    "why_mixed_precision": {"since small updates round away in 16": "bits of a number format"},
    "diagnose_efficiency": {"measure 16 and 32 before you take 64": "a task"},
}


def explanations(name: str) -> Iterator[str]:
    """The paragraphs and items of a page that claim something."""
    for heading, (_, text) in ASKED[name].sections.items():
        if heading not in ("", "events"):
            claims = text.partition("\n\n")[2] if heading.startswith("option: ") else text
            yield from re.split(r"\n\n|\n(?=- )", claims)


def unproved(texts: Iterable[str], quotes: Iterable[str]) -> Iterator[str]:
    """The sentences with a number that no quote covers."""
    for text in texts:
        looked_at = NOT_PROSE.sub(dots, re.sub(r"\{[^{}]*\}", dots, text))
        found = (match.span() for quote in quotes for match in re.finditer(re.escape(quote), text))
        covered = {place for span in found for place in range(*span)}
        for sentence in SENTENCE.finditer(looked_at):
            if any(number.start() not in covered for number in NUMBER.finditer(looked_at, *sentence.span())):
                yield text[slice(*sentence.span())].strip()


@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_proved(name: str) -> None:
    quotes = [*PROOFS.get(name, {}), *NO_PROOF.get(name, {})]
    assert not list(unproved(explanations(name), quotes)), "quote these with what proves them"


@pytest.mark.parametrize(("name", "quote"), [(name, quote) for name in PROOFS for quote in PROOFS[name]])
def test_it_is_so(name: str, quote: str) -> None:
    assert any(quote in text for _, text in ASKED[name].sections.values()), "the card no longer says this"
    assert PROOFS[name][quote](), "the card says this, and it is not so"


@pytest.mark.parametrize(("name", "quote"), [(name, quote) for name in NO_PROOF for quote in NO_PROOF[name]])
def test_what_needs_no_proof_is_still_said(name: str, quote: str) -> None:
    assert any(quote in text for text in explanations(name))
