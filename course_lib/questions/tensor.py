"""Questions about tensor parallelism."""

from __future__ import annotations

from functools import partial
from random import Random

import torch
import torch.distributed as dist

from course_lib.experiments.cuts import CUTS, run_cut
from course_lib.figures import who_holds_what
from course_lib.mechanisms import tensor_parallel as tp
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import Cluster, Estimate, ModelSpec, Plan, estimate, search
from course_lib.questions.forms import Choice, Form, FreeText, Number, Option, Reading
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.questions.units import Quantity, Slip
from course_lib.ranks import launch

# Which cut costs least


def _ask_cut(ranks: int) -> tuple[str, Form]:
    text = (
        f"The MLP of a transformer is y = gelu(x A) B, where A makes the hidden states four times as wide and B makes "
        f"them narrow again. {ranks} ranks share both matrices. All of them have x, and all of them need y and the "
        "gradient of x. How do you cut, so that as little as possible travels in a forward and a backward pass?"
    )
    why = {
        "columns, rows": "What A leaves on a rank are columns of the wide result, whole numbers to which it can apply "
        "the GELU, and exactly the columns that its rows of B ask for. Nothing travels between the two.",
        "columns, columns": "B by columns asks for all of the wide result, so it is put together from all ranks, and "
        "on the way back its gradient is added up, four times as wide as x.",
        "rows, rows": "A by rows leaves an addend on each rank. The GELU needs the sum, so an all-reduce of the wide "
        "result comes before it.",
        "rows, columns": "Both mistakes at once: the wide result is added up before the GELU, and all of it is needed "
        "after it.",
    }
    options = tuple(
        Option(
            f"A by {first}, B by {second}",
            partial(_compare_cuts, ranks, f"{first}, {second}"),
            why[f"{first}, {second}"],
        )
        for first, second in (("rows", "columns"), ("columns", "columns"), ("columns", "rows"), ("rows", "rows"))
    )
    return text, Choice(options)


def _compare_cuts(ranks: int, way: str) -> Outcome:
    runs = {one: run_cut(one, ranks) for one in map(", ".join, CUTS)}
    run, least = runs[way], min(other.sent for other in runs.values())
    right = run.sent == least
    numbers = "differ from" if run.wrong else "are"
    said = f"Each of {ranks} ranks sends {run.sent:,} bytes, and the numbers {numbers} those of one process."
    much = "No other cut sends less." if right else f"Another cut does with {least:,} bytes."
    shown = not run.wrong and right == (way == "columns, rows")
    picture = who_holds_what(run.operations, run.traffic, ranks, title="Who holds what, and what travels")
    return Outcome(right, f"{said} {much}", shown=shown, pictures=(picture,))


# How many all-reduces


ALL_REDUCES = Quantity("a number of all-reduces", {"all-reduces": 1.0, "all-reduce": 1.0, "": 1.0}, "10 all-reduces")


def _ask_all_reduces(layers: int) -> tuple[str, Form]:
    text = (
        f"A model has {layers} transformer blocks, each an attention and an MLP, cut for tensor parallelism as best "
        "one can. How many all-reduces do these blocks need in one training step, forward and backward?"
    )
    slips = (
        Slip(1 / 2, "Half of them: forward and backward both count, or attention and MLP do."),
        Slip(
            1 / 4,
            "One for each block is what a single forward pass of the MLPs takes; there are attention and backward.",
        ),
    )
    why = (
        "Attention and MLP each end with a sum over the ranks, g, and each has its twin on the way back, f: four "
        "all-reduces for each block, of all hidden states each time."
    )
    return text, Number(ALL_REDUCES, partial(_count_all_reduces, layers), why, slips, tolerance=0.0)


def _count_all_reduces(layers: int) -> Reading:
    run = launch(_train_blocks, 2, (layers,))
    count = sum(span.kind == "transfer" and span.name == "all_reduce" for span in run.timeline.of(0))
    return Reading(count, f"{layers} blocks on 2 ranks, forward and backward: {count} all-reduces.")


def _train_blocks(rank: int, layers: int) -> None:
    blocks = TinyGPT(GPTConfig(layers=layers, hidden=8, heads=2)).blocks[1:-1]
    tp.parallelize(blocks)
    blocks(torch.ones(1, 8, 8, requires_grad=True)).sum().backward()
    dist.barrier()


# Choosing a parallelism strategy for a large model


LARGE = ModelSpec(layers=80, hidden=8192, heads=64, sequence=2048, vocab=32_000, flash_attention=True)
NODES = Cluster(device="A100-80GB", nodes=8, devices_per_node=8)
BATCH = 512
CANDIDATES = {
    "64 replicas": Plan(dp=64),
    "64 replicas, all states sharded (ZeRO-3)": Plan(dp=64, zero=3),
    "64 tensor ranks": Plan(tp=64),
    "64 stages": Plan(pp=64),
    "8 tensor ranks, 4 stages, 2 replicas": Plan(dp=2, tp=8, pp=4, zero=1, sequence_parallel=True),
}


def _strategy() -> Outcome:
    tried = {name: estimate(LARGE, NODES, plan, BATCH) for name, plan in CANDIDATES.items()}
    best = search(LARGE, NODES, BATCH).best
    plan = best.plan
    found = f"{plan.tp} tensor ranks, {plan.pp} stages, {plan.dp} replicas"
    lines = [_in_words(name, one) for name, one in (tried | {f"the best of all plans, {found}": best}).items()]
    right = not tried["64 replicas"].fits and best.mfu > 5 * tried["64 tensor ranks"].mfu and plan.tp <= 8
    return Outcome(None, f"The planner says (modelled): {'; '.join(lines)}.", shown=right)


def _in_words(name: str, one: Estimate) -> str:
    if not one.fits:
        return f"{name}: does not fit, {one.memory.total / 2**30:,.0f} GiB on a device that has 80"
    return f"{name}: {one.memory.total / 2**30:.0f} GiB, computes at {one.mfu:.0%} of what the devices can"


def _ask_strategy(_: None) -> tuple[str, Form]:
    text = (
        "A model of 65 billion parameters (80 layers, hidden size 8192, 64 heads) is to be trained on 8 nodes of 8 "
        "GPUs with 80 GB each. Inside a node, links are fast; between nodes, twelve times slower. A step has 512 "
        "sequences of 2048 tokens. Three colleagues propose 64 replicas, 64 tensor ranks, and 64 pipeline stages. "
        "What is wrong with each, what do you propose, and in which order do you decide?"
    )
    answer = (
        "A replica needs 16 bytes for each parameter, more than 1 TB, so 64 replicas do not fit. (With all states "
        "sharded they do, and with 8 sequences for each device that is not even slow: fetching the weights over slow "
        "links then hides behind a lot of computing. With a smaller batch it would not.) 64 tensor ranks fit, but "
        "four times in each layer hidden states cross the slow links, and nobody can compute meanwhile. 64 stages "
        "send little, but 80 layers cannot be cut evenly, and so many stages have a long bubble. So: tensor "
        "parallelism within a node and no further than needed, because it talks most; pipeline stages across nodes "
        "until the model fits, because they talk least; replicas with what is left, because they talk once in a step. "
        "Then a micro-batch small enough for the memory, and a schedule with a small bubble."
    )
    return text, FreeText(
        _strategy,
        answer,
        (
            "16 bytes for each parameter are more than a terabyte: replicas alone do not fit.",
            "Tensor parallelism stays inside a node: it talks in every layer, and nothing hides it.",
            "Stages go across nodes: they send only at their borders, and cost a bubble.",
            "Replicas take what is left; their gradients travel once in a step.",
            "The order: make it fit first, then keep the most talkative on the fastest links.",
        ),
    )


def _draw_ranks(random: Random) -> int:
    return random.choice([2, 8])


def _draw_layers(random: Random) -> int:
    return random.choice([12, 32, 40])


QUESTIONS: dict[str, Family] = {
    "which_cut": Family(4, _ask_cut, _draw_ranks),
    "count_all_reduces": Family(24, _ask_all_reduces, _draw_layers),
    "choose_strategy": Family(None, _ask_strategy),
}
