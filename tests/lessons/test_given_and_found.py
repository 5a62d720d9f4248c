"""Every number in a situation, an option or a report of a run is quoted, with the run or computation behind it.

A given number is the author's choice, but the answer has to compute with it: so it is quoted with the part of the
answer that does, which `test_every_number` proves. All other numbers are quoted with their proofs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from course_lib.classroom import questions
from course_lib.planner import Cluster, ModelSpec, Plan, simulate
from course_lib.ranks import Pace
from course_lib.ranks.parent import run as ranks_run
from course_lib.schedules import SCHEDULES
from lessons.L01_one_machine_is_not_enough import questions as one_machine
from lessons.L02_data_parallelism import questions as scaling
from lessons.L03_sharded_data_parallelism import questions as sharding
from lessons.L03_sharded_data_parallelism import runs as sharded
from lessons.L04_layerwise_model_parallelism import questions as layerwise
from lessons.L04_layerwise_model_parallelism import runs as events
from lessons.L05_pipeline_parallelism import questions as pipelines
from lessons.L06_tensor_parallelism import questions as tensor
from lessons.L06_tensor_parallelism import runs as cuts
from lessons.L07_mixed_precision import questions as precision
from lessons.L08_combining_mechanisms import questions as mesh
from lessons.L08_combining_mechanisms import runs as meshes
from lessons.L09_planning import questions as plans
from tests.lessons.asked import ASKED
from tests.lessons.test_every_number import (
    NAMES,
    Proofs,
    busy,
    held,
    rung,
    sixteen_bytes,
    unproved,
)


class Launched(NamedTuple):
    """A launch: the number of ranks, the function's arguments, the pace."""

    ranks: int
    args: tuple[Any, ...]
    pace: Pace | None


@cache
def launched(name: str, answer: str = "I do not know yet.") -> list[Launched]:
    """All launches of a card's answer."""
    seen: list[Launched] = []
    run_on = ranks_run.run_on

    def watched(
        purpose: str, fn: Any, world_size: int, args: tuple[Any, ...], timeout: float, pace: Pace | None, gpu: bool
    ) -> Any:
        seen.append(Launched(world_size, args, pace))
        return run_on(purpose, fn, world_size, args, timeout, pace, gpu)

    form: Any = questions.load(name).form
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks_run, "run_on", watched)
        assert form.run(form.read(answer)).happened
    return seen


def ranks(name: str, answer: str = "I do not know yet.") -> list[int]:
    return [one.ranks for one in launched(name, answer)]


def micro_batches(name: str) -> list[int]:
    """The number of micro-batches in each schedule, or order of events, that was run."""
    given = [getattr(one.args[0], "actions", [one.args[0]])[0] for one in launched(name)]
    return [1 + max(action.micro_batch for action in order) for order in given if isinstance(order, list)]


def idle_with_a_longer_last_stage(times: float) -> float:
    seconds = [1.0] * 7 + [times]
    return simulate(SCHEDULES["gpipe"](8, 8), seconds, [2 * one for one in seconds]).idle_fraction()


def billions(model: ModelSpec) -> float:
    return model.parameters / 1e9


def default(function: Any, name: str) -> Any:
    return inspect.signature(function).parameters[name].default


def all_too_large_for(gigabytes: float) -> bool:
    """Whether the states of every model in Q5, in the lesson and in other numbers, are larger than that."""
    family = one_machine.QUESTIONS["Q5"]
    return all(16 * case.billions > gigabytes for case in (family.first, *family.others))


def forward_seconds(answer: str) -> float:
    """Seconds of a forward pass in the first run of an option of Q5."""
    first: Any = launched("Q5", answer)[0].pace
    return first.device["forward"]


def ten_samples_on_four_ranks() -> bool:
    alone, *on_four = launched("data_distribution")
    return alone.ranks == 1 and {(one.ranks, len(one.args[0][0])) for one in on_four} == {(4, 10)}


def all_reduces_of_an_mlp(way: str) -> list[int]:
    """Bytes that a rank sends for each all-reduce of the forward pass."""
    run = cuts.run_cut(way, 2)
    return [sent for one, (sent, _) in zip(run.operations, run.traffic, strict=True) if one.forward == "all-reduce"]


def is_llama_70b() -> bool:
    return 70e9 < plans.MODEL.parameters < 71e9


def up_to_1024() -> bool:
    return max(plans.NUMBERS_OF_NODES) * plans.NODES.devices_per_node == 1024


def offer(name: str) -> Cluster:
    return plans.OFFERS[name][1]


def network(cluster: Cluster) -> float:
    """Bytes per second between nodes."""
    return cluster.between_link.bandwidth


GIVEN: dict[str, dict[str, str]] = {  # in the situation, and where the answer computes with it
    "ideal_speed_up": {
        "A step takes 3.2 seconds on one worker.": "3.2 / 8 = 0.4 s",
        "With data parallelism on 8 workers it takes 0.56 seconds.": "They need 0.56 s",
        "not 8 times as fast, and whether a ninth worker": "A ninth worker shortens only the 0.4 s, to 0.36 s",
    },
    "find_the_flaw": {"A colleague has written this for 8 workers.": "the work of one, done eight times"},
    "evaluate_replicas": {
        "on 16 devices, 8 in each of two machines": "measure a step on 1, 8 and 16 devices",
        "the minibatch of 128 samples": "one process that has all 128 samples",
        "A step takes a tenth of the time that one device needs.": "Ten times on 16 devices is 62.5% of the ideal",
        "ten times as fast is plenty": "Ten times on 16 devices is 62.5% of the ideal",
        "half of the memory is free": "use the free memory: with twice the samples for each device",
    },
    "why_partition": {
        "You have 32 devices with 80 GB each.": "320 GB in all, which is more than 80 GB",
    },
    "pipeline_efficiency": {
        "of 4 stages runs with 2 micro-batches": "m of m + p - 1 turns: 2 of 5, 40%",
        "the devices busy for 40% of the time": "m of m + p - 1 turns: 2 of 5, 40%",
        "Explain the 40%, say what 8 micro-batches would make of it, and why nobody takes 1,000.": (
            "With 1,000 nearly nothing would be idle"
        ),
    },
    "pipelining_gain": {
        "each device computes for 1 second of a step that takes 4": "Each device still computes for 1 second",
        "You propose 8 micro-batches.": "a step has 8 + 4 - 1 = 11 such turns",
    },
    "optimize_stages": {
        "on 8 devices, an eighth of the computing on each": "each is busy for 1 of 8 seconds, 12.5%",
        "A batch of 64 samples": "the activations of all 64 samples",
        "a step takes 8 seconds": "1.22 s in place of 8",
        "devices of twice the speed, links of ten times the speed, or memory for a batch of twice the size": (
            "Devices of twice the speed make that 4 seconds"
        ),
    },
    "why_mixed_precision": {
        "more than four sequences for each GPU": "about eight sequences fit where four did",
        "a third of each step goes into exchanging gradients": "a sixth of the old step in place of a third",
    },
    "diagnose_efficiency": {
        "a batch of 64 sequences passes through as a whole": "measure 16 and 32 before you take 64",
        "a step takes little more than half as long": "going back to float32 would give away what was won",
        "64 micro-batches of one sequence each": "84% with 16, 96% with 64",
    },
    "optimize_training": {
        "A step takes 2 seconds: 1.2 of computing and 0.8 of exchanging gradients.": "0.1 s in place of 0.8, so 1.3 s",
    },
}

PROOFS: dict[str, Proofs] = {
    "Q5": {
        "A language model of {billions} billion parameters": lambda: all_too_large_for(80),
        "with 80 GB of memory": lambda: all_too_large_for(80),
        "with a device that is thousands of times as fast": lambda: 1000 * forward_seconds("a") < forward_seconds("b"),
    },
    "one_machine": {
        "one H100 with 80 GB": lambda: one_machine.MACHINES["one H100"][0].spec == Cluster("H100-80GB").spec,
        "6.7 billion parameters": lambda: round(billions(one_machine.SEVEN), 1) == 6.7,
        "140 billion tokens": lambda: one_machine.TOKENS == 140e9,
        "multiplies as fast and has 141 GB": lambda: Cluster("H200-141GB").spec.memory == 141e9,
        "a small model of 8 layers": lambda: [(one.ranks, one.args[0]) for one in launched("one_machine")] == [(1, 8)],
    },
    "bytes_sent": {"its gradients are numbers of 4 bytes": lambda: scaling.Gradients(1, 8).bytes == 4},
    "Q3": {
        "with devices of twice the speed": lambda: (
            scaling.REMEDIES["devices"]
            == {"seconds": scaling.Cluster().seconds / 2, "update": scaling.Cluster().update / 2}
        ),
    },
    "data_distribution": {
        "10 samples are left at the end of the data, and 4 workers": ten_samples_on_four_ranks,
        "a minibatch of 12": lambda: 12 % 4 == 0 != 10 % 4,
        "Run on 4 ranks with 10 samples": ten_samples_on_four_ranks,
    },
    "ideal_speed_up": {"with 1, 2, 4 and 8 workers": lambda: ranks("ideal_speed_up") == [1, 2, 4, 8]},
    "evaluate_replicas": {"with 1, 2, 4 and 8 workers": lambda: ranks("evaluate_replicas") == [1, 2, 4, 8]},
    "find_the_flaw": {"Run on 4 ranks": lambda: ranks("find_the_flaw") == [4, 4]},
    "enough_stage": {
        "A model of {billions} billion parameters": lambda: sharding.Training(10, 8, 80).needed(0) == 16 * 10,
        "all in 32 bits, on {devices} devices of {gigabytes} GB": lambda: sharding.Training(1, 8, 80).needed(0) == 16,
    },
    "stage_3_sends": {
        "With half of the samples, and so half of the activations": lambda: (
            2 * sharding.WITHOUT["activations"]["samples"] == default(sharded._train, "samples")
        )
    },
    "why_partition": {
        "A model of 20 billion parameters is to be trained with Adam in 32-bit numbers": lambda: (
            round(billions(layerwise.TWENTY)) == 20
            and {layerwise.CUT.precision, layerwise.SHARDED.precision} == {"fp32"}
        ),
        "with its layers on 1, 2, 4 and 8 devices": lambda: ranks("why_partition") == [1, 2, 4, 8],
        "layers cut over 8 devices": lambda: (layerwise.CUT.pp, layerwise.CUT.tp, layerwise.CUT.zero) == (8, 1, 0),
        "state sharded among 32": lambda: (layerwise.SHARDED.dp, layerwise.SHARDED.zero) == (32, 3),
    },
    "Q11": {
        "units of twice the speed": lambda: (
            pipelines.STRATEGIES["faster"] == pipelines.Strategy(speed=2 * pipelines.Strategy().speed)
        ),
        "a batch of twice the size": lambda: (
            pipelines.STRATEGIES["larger"] == pipelines.Strategy(work=2 * pipelines.Strategy().work)
        ),
    },
    "Q8": {
        "A backward pass takes twice as long as a forward pass.": lambda: (
            events.SECONDS["backward"] == 2 * events.SECONDS["forward"]
        )
    },
    "pipeline_efficiency": {
        "with 2 micro-batches, for {idle[1]:percent} with 8": lambda: micro_batches("pipeline_efficiency") == [2, 8],
        "Run on 4 ranks": lambda: ranks("pipeline_efficiency") == [4, 4],
    },
    "pipelining_gain": {
        "Run on 4 ranks, the batch as a whole and in 8 micro-batches": lambda: (
            ranks("pipelining_gain") == [4, 4] and micro_batches("pipelining_gain") == [1, 8]
        )
    },
    "tune_a_pipeline": {
        "A model of 48 layers is trained on 8 devices, 6 layers on each": lambda: 48 / 8 == 6,
        "with GPipe and 8 micro-batches of 8 samples": lambda: 8 * held("gpipe", 8, 8) == 64,
        "idle for more than half of the time, the last device computes longer than the others": lambda: (
            idle_with_a_longer_last_stage(1) < 1 / 2 < idle_with_a_longer_last_stage(1.2)
        ),
        "run on a smaller pipeline of 4 ranks": lambda: ranks("tune_a_pipeline") == [4, 4, 4],
    },
    "optimize_stages": {
        "Run on 4 ranks, the batch as a whole and in 8 micro-batches": lambda: (
            ranks("optimize_stages") == [4, 4] and micro_batches("optimize_stages") == [1, 8]
        )
    },
    "which_cut": {
        "A makes the hidden states four times as wide": lambda: (
            max(sums := all_reduces_of_an_mlp("rows, rows")) == 4 * min(sums)
        ),
    },
    "count_all_reduces": {"blocks on 2 ranks": lambda: ranks("count_all_reduces", "96") == [2]},
    "choose_strategy": {
        "65 billion parameters (80 layers, hidden size 8192, 64 heads)": lambda: (
            round(billions(tensor.LARGE)) == 65
            and (tensor.LARGE.layers, tensor.LARGE.hidden, tensor.LARGE.heads) == (80, 8192, 64)
        ),
        "on 8 nodes of 8 GPUs with 80 GB each": lambda: (
            (tensor.NODES.nodes, tensor.NODES.devices_per_node, tensor.NODES.device) == (8, 8, "A100-80GB")
        ),
        "between nodes, twelve times slower": lambda: (
            tensor.NODES.inside_link.bandwidth == 12 * tensor.NODES.between_link.bandwidth
        ),
        "A step has 512 sequences of 2048 tokens.": lambda: (tensor.BATCH, tensor.LARGE.sequence) == (512, 2048),
        "64 replicas, 64 tensor ranks, and 64 pipeline stages": lambda: (
            {Plan(dp=64), Plan(tp=64), Plan(pp=64)} < set(tensor.CANDIDATES.values())
        ),
    },
    "bytes_per_weight": {"In float32 they are 16.": sixteen_bytes},
    "one_overflow": {
        "Run on 4 ranks": lambda: {one for letter in "abcd" for one in ranks("one_overflow", letter)} == {4}
    },
    "Q9": {
        "16-bit numbers where 32 were used before": lambda: (
            {precision.Training().weights, precision.Training().compute, precision.Training().sums} == {torch.bfloat16}
        )
    },
    "why_mixed_precision": {"Run on 4 ranks": lambda: ranks("why_mixed_precision") == [4, 4, 4]},
    "diagnose_efficiency": {
        "every device busy for 25% of the time": lambda: busy(4, 1) == "0.25",
        "in 16 micro-batches four devices": lambda: (
            ranks("diagnose_efficiency")[:2] == [4, 4] and micro_batches("diagnose_efficiency")[:2] == [1, 16]
        ),
        "in 16 micro-batches: {idle[1]:percent}": lambda: micro_batches("diagnose_efficiency")[:2] == [1, 16],
        "A gradient of 64 micro-batches": lambda: default(precision.added_up, "micro_batches") == 64,
    },
    "optimize_training": {
        "on 8 GPUs. A GPU has room for 4 sequences at a time, and a minibatch has 256. So in each step a GPU computes "
        "8 micro-batches": lambda: 8 * 4 * precision.MICRO_BATCHES == 256,
        "A step takes 2 seconds: 1.2 of computing and 0.8": lambda: 1.2 + 0.8 == 2,
        "Run on 4 ranks with 8 micro-batches each.": lambda: (
            ranks("optimize_training") == [4, 4, 4] and precision.MICRO_BATCHES == 8
        ),
    },
    "which_axis_across": {
        "Run on 8 ranks as {experiment.words}": lambda: set(ranks("which_axis_across", "a")) == {8},
        "Run on 8 ranks, with each axis in turn across": lambda: (
            ranks("which_axis_across", "d") == 6 * [8]
            and {meshes.HybridExperiment(sizes).ranks for sizes in mesh.ACROSS.values()} == {8}
        ),
    },
    "evaluate_strategy": {
        "Run on 8 ranks, 4 to a machine": lambda: ranks("evaluate_strategy") == 4 * [8] and meshes.PER_MACHINE == 4
    },
    "optimize_efficiency": {
        "A model of 70 billion parameters is trained on 8 nodes of 8 A100 with 80 GB each": lambda: (
            is_llama_70b() and (plans.NODES.spec.memory, plans.NODES.devices) == (80 * 2**30, 64)
        ),
        "a twelfth as fast as the links inside": lambda: (
            plans.NODES.inside_link.bandwidth == 12 * plans.NODES.between_link.bandwidth
        ),
        "with 16 tensor ranks, 4 stages, and all activations computed again": lambda: (
            rung("as it is").plan == Plan(tp=16, pp=4, recompute="full")
        ),
        "Now less than half of the memory is in use": lambda: (
            rung("as it is").memory.total < rung("as it is").capacity / 2
        ),
        "the devices reach 28% of their peak (MFU)": lambda: f"{rung('as it is').mfu:.0%}" == "28%",
    },
    "more_replicas": {
        "best on 64 GPUs": lambda: plans.NODES.devices == 64,
        "until 1,024 GPUs work on the same minibatch of 256 samples": lambda: up_to_1024() and plans.BATCH == 256,
        "on 1,024 GPUs": up_to_1024,
    },
    "same_plan": {
        "Your 64 A100 are replaced by as many H100, on the same network.": lambda: (
            plans.NODES.devices == plans.H100.devices == 64 and plans.NODES.between == plans.H100.between
        )
    },
    "which_offer": {
        "a model of 70 billion parameters on 64 A100": lambda: is_llama_70b() and plans.NODES.devices == 64,
        "the network twice as fast": lambda: (
            offer("network").between_link.bandwidth == 2 * plans.NODES.between_link.bandwidth
        ),
        "half as many B200, on the same network": lambda: (
            (offer("b200").devices, offer("b200").between) == (32, plans.NODES.between)
        ),
        "twice as many A100, on the same network": lambda: (
            (offer("a100").devices, offer("a100").between) == (128, plans.NODES.between)
        ),
    },
    "infrastructure": {
        "models of 70 billion parameters all year, and perhaps one of 405 billion": lambda: (
            is_llama_70b() and 405e9 < plans.LARGER.parameters < 406e9
        ),
        "64 H100 or 32 B200 with a fast network, or 128 A100 with a slow one (25 Gbit/s for each)": lambda: (
            [site.devices for site in plans.SITES.values()] == [64, 128, 32]
            and plans.SITES["128 A100, slow network"].between_link.bandwidth == 25e9 / 8
        ),
    },
}
NO_PROOF = {"infrastructure": {"a third the most devices": "the third of three managers"}}


def texts(name: str) -> Iterator[str]:
    """The paragraphs of a page about the situation, the question, and the results of runs."""
    page = ASKED[name]
    for heading, (_, text) in (page.sections | page.found).items():
        if heading in ("", "events") or heading.startswith("found"):
            yield from text.split("\n\n")
        elif heading.startswith("option: "):
            yield text.partition("\n\n")[0]


def says(name: str, quote: str) -> bool:
    return any(quote in text for text in texts(name))


@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_tied_to_something(name: str) -> None:
    quotes = [quote for table in (GIVEN, PROOFS, NO_PROOF) for quote in table.get(name, {})]
    assert not list(unproved(texts(name), quotes)), "quote these with what computes with them, or proves them"


@pytest.mark.parametrize(("name", "quote"), [(name, quote) for name in GIVEN for quote in GIVEN[name]])
def test_what_is_given_is_what_the_answer_computes_with(name: str, quote: str) -> None:
    assert says(name, quote), "the card no longer gives this"
    used = GIVEN[name][quote]
    assert any(used in text for _, text in ASKED[name].sections.values()), "the answer no longer says this"


@pytest.mark.parametrize(("name", "quote"), [(name, quote) for name in PROOFS for quote in PROOFS[name]])
def test_it_is_so(name: str, quote: str) -> None:
    assert says(name, quote), "the card no longer says this"
    assert PROOFS[name][quote](), "the card says this, and it is not so"


@pytest.mark.parametrize(("name", "quote"), [(name, quote) for name in NO_PROOF for quote in NO_PROOF[name]])
def test_what_needs_no_proof_is_still_said(name: str, quote: str) -> None:
    assert says(name, quote)
