"""What the lesson on tensor parallelism says is so."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module, style

from course_lib import Link, Pace, RunError, Timeline, launch
from course_lib.classroom import questions
from course_lib.classroom.runs import after_barrier
from course_lib.mechanisms.collectives import ring_all_reduce
from course_lib.mechanisms.tensor_parallel import parallelize, vocab_parallel_cross_entropy
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import estimate, search
from course_lib.planner.hardware import LINKS
from lessons.L06_tensor_parallelism.explorer import BANDWIDTH, PACE
from lessons.L06_tensor_parallelism.questions import BATCH, CANDIDATES, LARGE, NODES
from lessons.L06_tensor_parallelism.runs import CUTS, POSITIONS, run_cut
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "tensor_parallelism"
numbers, shows = lesson(NAME).numbers, lesson(NAME).shows


def sent(way: str) -> float:
    return numbers("for way in WAYS:", f"{way}  ")[0]


def for_the_loss(what: str) -> float:
    return numbers("def evaluate(", what)[0]


@lru_cache
def step(ranks: int, per_node: int) -> Timeline:
    """The run behind the figure on nodes."""
    inside, between = Link(latency=0.0002, bandwidth=4e6), Link(latency=0.0005, bandwidth=4e5)
    pace = Pace({"forward": 4e-6, "backward": 8e-6}, inside, between, per_node)
    return run_cut("columns, rows", ranks, pace=pace).timeline


def speed_up(ranks: int, per_node: int) -> float:
    return step(1, per_node).makespan / step(ranks, per_node).makespan


def _ring(rank: int) -> None:
    """Of sends, a reduce-scatter and then an all-gather: what it sends is really counted."""
    ring_all_reduce(torch.ones(64))


def _all_reduce(rank: int) -> None:
    dist.all_reduce(torch.ones(64))


@lru_cache
def explored(ranks: int, hidden: int, sequence_parallel: bool = False) -> tuple[float, int, float]:
    """Seconds and bytes of a run of the explorer, and the share of the time that its ranks compute."""
    run = run_cut("columns, rows", ranks, hidden, sequence_parallel, PACE)
    step = run.timeline
    return step.makespan, run.sent, step.busy(0) / step.makespan


def widest(way: str) -> tuple[bool, bool]:
    """Whether an all-reduce of four times x travels forward, and backward. A ring of four sends 3/2 of it."""
    run = run_cut(way, 4)
    forward, backward = zip(*run.traffic, strict=True)
    wide = 4 * POSITIONS * 64 * 4 * 3 // 2
    return wide in forward, wide in backward


def error_with(ranks: int) -> str:
    try:
        launch(lambda rank: parallelize(TinyGPT(GPTConfig(layers=1, hidden=64, heads=4))) and None, ranks)
    except RunError as error:
        return error.message
    return ""


def _gradients_of_copies(rank: int) -> list[Any]:
    """Of what all ranks hold: norms, positions, biases after g."""
    model, tokens = parallelize(TinyGPT(dtype=torch.float64)), torch.arange(4 * 8).view(4, 8) % 12
    vocab_parallel_cross_entropy(model(tokens), tokens, vocab=12).backward()
    named = dict(model.named_parameters()).items()
    return [
        p.grad for name, p in named if "norm" in name or "position" in name or name.endswith(("out.bias", "down.bias"))
    ]


def copies_have_the_same_gradient() -> bool:
    first, *others = launch(_gradients_of_copies, 4).results
    return len(first) == 2 * 6 + 2 + 1 and all(
        torch.allclose(*pair) for rank in others for pair in zip(first, rank, strict=True)
    )


# PyTorch's own, on ranks


def _in_pytorch(rank: int, ranks: int, seed: int) -> dict[str, tuple[bool, torch.Tensor]]:
    """Parameters, with whether they are cut; what one block sends is in the timeline."""
    columns = ["attention.query", "attention.key", "attention.value", "mlp.up"]
    cuts = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(["attention.out", "mlp.down"], RowwiseParallel())
    model = TinyGPT(GPTConfig(layers=1), seed=seed + rank)
    block = parallelize_module(model.blocks[1], init_device_mesh("cpu", (ranks,)), cuts)  # type: ignore[arg-type]
    dist.barrier()
    block(torch.ones(2, 8, 64, requires_grad=True)).sum().backward()
    return {
        name: (True, p.full_tensor()) if isinstance(p, DTensor) else (False, p.detach())
        for name, p in model.named_parameters()
    }


def _ends_in_pytorch(rank: int) -> tuple[bool, float]:
    """Embedding and head, cut as the text says, and the loss of shares of the logits."""
    model, tokens = TinyGPT(GPTConfig(layers=1)), torch.arange(4 * 8).view(4, 8) % 12
    mesh = init_device_mesh("cpu", (2,))
    ends = {
        "0.token": RowwiseParallel(input_layouts=Replicate()),
        "2.output": ColwiseParallel(use_local_output=False),
    }
    parallelize_module(model.blocks, mesh, ends)
    with loss_parallel():
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    are_cut = [isinstance(p, DTensor) for p in (model.blocks[0].token.weight, model.blocks[2].output.weight)]
    return all(are_cut), loss.full_tensor().item()  # type: ignore[attr-defined]


def ends_are_cut_and_the_loss_is_right() -> bool:
    model, tokens = TinyGPT(GPTConfig(layers=1)), torch.arange(4 * 8).view(4, 8) % 12
    right = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).item()
    return all(
        is_cut and loss == pytest.approx(right, rel=1e-5) for is_cut, loss in launch(_ends_in_pytorch, 2).results
    )


@lru_cache
def cut_in_pytorch() -> tuple[list[dict[str, tuple[bool, torch.Tensor]]], int]:
    """What ranks with seeds of their own hold, and the all-reduces of a block."""
    run = launch(_in_pytorch, 2, (2, 5), pace=Pace({}, Link(0.001, 1e6)))
    sums = [span for span in after_barrier(run.timeline).of(0) if span.name == "all_reduce" and span.kind == "transfer"]
    return run.results, len(sums)


def only_what_is_cut_is_the_first_rank_s() -> bool:
    mine, theirs = (TinyGPT(GPTConfig(layers=1), seed=seed).state_dict() for seed in (5, 6))
    held = cut_in_pytorch()[0][1]  # rank 1's
    cut, left = ({name: w for name, (is_cut, w) in held.items() if is_cut is wanted} for wanted in (True, False))
    return all(torch.equal(w, mine[name]) for name, w in cut.items()) and all(
        torch.equal(w, theirs[name]) for name, w in left.items()
    )


def waits() -> dict[int, float]:
    """Percent of a step, by the number of tensor ranks."""
    rows = numbers("for tp in (1, 2, 4, 8, 16, 32, 64):")
    return {int(row[0]): row[2] for row in (rows[i : i + 4] for i in range(0, len(rows), 4))}


PROOFS: Proofs = {
    "There are two ways.": lambda: shows("A.chunk(2, dim)", "by columns [[4, 3], [4, 3]]", "by rows [[2, 6], [2, 6]]"),
    "Each can be cut in two ways, so there are four combinations.": lambda: len(CUTS) == 2 * 2,
    "$A$ makes $x$ four times as wide, $B$ makes it narrow again.": lambda: (
        GPTConfig().ffn_width == 4 * GPTConfig().hidden
    ),
    "(The gradients are right only because they were given the right gradient of $y$ here": lambda: shows(
        "for way in WAYS:", "without g              12,288 bytes  wrong: y\n"
    ),
    "It is **emulated**, with links of 1 MB per second. (A thousandth or less of what real ones do": (
        lambda: 1000 * BANDWIDTH == 1e9 <= min(link.bandwidth for link in LINKS.values())
    ),
    # The answers to the tasks of the explorer.
    "In *rows, rows* it comes before the GELU: addends have to be summed there, and there they are four times as wide. "
    "In *columns, columns* it is on the way back, and *rows, columns* has one in each direction.": lambda: (
        [widest("rows, rows"), widest("columns, columns"), widest("rows, columns")]
        == [(True, False), (False, True), (True, True)]
    ),
    "Eight ranks then compute for 58% of the time, with the smallest for 18%.": lambda: (
        [f"{explored(8, hidden)[2]:.0%}" for hidden in (128, 32)] == ["58%", "18%"]
    ),
    "Yes, but not by much: 67 ms in place of 80.": lambda: (
        [round(1000 * explored(ranks, 64)[0]) for ranks in (8, 4)] == [67, 80]
    ),
    "Each becomes a reduce-scatter and an all-gather, one of them forward and the other backward.": lambda: (
        {(one.forward, one.backward) for one in run_cut("columns, rows", 4, sequence_parallel=True).operations}
        == {("", ""), ("all-gather", "reduce-scatter"), ("reduce-scatter", "all-gather")}
    ),
    "Where is the all-reduce of four times the size": lambda: (
        max(map(max, run_cut("rows, rows", 4).traffic)) == 4 * max(map(max, run_cut("columns, rows", 4).traffic))
    ),
    "Take 8 ranks and the smallest hidden size, then the largest. Which one makes better use of the ranks?": lambda: (
        explored(8, 32)[2] < explored(8, 128)[2]
    ),
    "Are 8 ranks faster than 4 with hidden size 64?": lambda: (
        explored(4, 64)[0] / 2 < explored(8, 64)[0] < explored(4, 64)[0]
    ),
    "What becomes of the two all-reduces, and how many bytes does it save?": lambda: (
        explored(4, 64)[1] == explored(4, 64, True)[1]
    ),
    "The other half of a transformer block has four matrices: query, key and value, then out.": lambda: (
        sum("attention." in line and ".weight" in line for line in lesson(NAME).shown("def shapes(rank):").splitlines())
        == 4
    ),
    "So heads cannot be shared by just any number of ranks": lambda: (
        "works on one of [1, 2, 4] ranks" in error_with(3) and not error_with(4)
    ),
    "has got the same gradient everywhere": copies_have_the_same_gradient,
    "with a link between them that is ten times slower": lambda: (
        "inside, between = Link(latency=0.0002, bandwidth=4e6), Link(latency=0.0005, bandwidth=4e5)"
        in lesson(NAME).code("def timing(")
    ),
    "each of $N$ ranks sends": lambda: (
        numbers("for is_cut in", "bytes sent")[1] == 4 * 2 * 2 * 3 / 4 * (8 * 64 * 64 * 4)
    ),
    "The second one gives you an idea of what will travel: a sum over ranks is an all-reduce.": lambda: shows(
        'compare("rows, added up"',
        "rows, added up               the same",
        "columns, side by side        the same",
    ),
    "the timeline counts what each rank sends if it goes around in a ring": lambda: (
        run_cut("columns, rows", 2, hidden=8).sent == 2 * 32 * 8 * 4
    ),
    "A quarter of both matrices on each rank, and so a quarter of their gradients": lambda: shows(
        "run = launch(cut_mlp", "holds [64, 64] and [64, 64]"
    ),
    "You could see one of the two all-reduces coming": lambda: shows(
        "travels(run.timeline)", "['all_reduce', 'all_red"
    ),
    "All four cuts are right, but only one is cheap.": lambda: (
        lesson(NAME).shown("for way in WAYS:").count("bytes  right") == 4
        and min(sent(way) for way in ("columns, columns", "rows, rows", "rows, columns")) > 3 * sent("columns, rows")
    ),
    "This layer's own gradients are right, so looking at them proves nothing.": lambda: shows(
        "for way in WAYS:", "wrong: gradient of x\n"
    ),
    "**GELU before the sum** spoils everything": lambda: shows(
        "for way in WAYS:", "wrong: y, gradient of x, gradient of A, gradient of B"
    ),
    "What grows with the square of the hidden size, and what with the hidden size itself?": lambda: (
        run_cut("columns, rows", 2, hidden=16).sent == 2 * run_cut("columns, rows", 2, hidden=8).sent
    ),
    "Query, key and value are cut by columns, into **whole heads**; out by rows.": lambda: shows(
        "def shapes(rank):", "attention.query.weight  [64, 64]     [32, 64]", "out.weight    [64, 64]     [64, 32]"
    ),
    "More than a thousand times less.": lambda: (
        for_the_loss("all logits gathered") > 1000 * for_the_loss("what the loss needs")
    ),
    "What travels are three numbers for each target": lambda: (
        for_the_loss("what the loss needs") == 4 * 8 * 3 * 4 * 2 * 3 / 4
        and len({line.split("loss ")[-1] for line in lesson(NAME).shown("def evaluate(").split("\n") if line}) == 1
    ),
    "four ranks learn to add, each with a quarter of every matrix": lambda: shows(
        "four, _ = launch(train", "the same as one process, up to rounding: True"
    ),
    "Not a byte more: in a ring, an all-reduce *is* a reduce-scatter and an all-gather, one after the other.": lambda: (
        len(set(numbers("for is_cut in", "bytes sent")[1::2])) == 1
        and launch(_ring, 4).timeline.bytes_sent(0) == 64 * 4 * 1.5 == launch(_all_reduce, 4).timeline.bytes_sent(0)
    ),
    "And less is kept: the inputs of the norms are shared now.": lambda: (
        (kept := numbers("for is_cut in", "bytes sent")[::2])[0] - kept[1] > 0
        # four norms, 8 x 64 positions x 64 numbers: what was whole is a quarter
        and kept[0] - kept[1] >= 4 * 8 * 64 * 64 * 4 * 3 // 4
    ),
    "come four times in *every layer*": lambda: shows("for is_cut in", "{'all_reduce': 8}"),  # two layers
    "Up to four ranks the two lines are the same.": lambda: all(speed_up(n, 8) == speed_up(n, 4) for n in (2, 4)),
    "that is little more than three times as fast as one rank, and slower than four ranks were": lambda: (
        3 < speed_up(8, 4) < min(3.3, speed_up(4, 4))
        and shows("def timing(", f"{speed_up(8, 4):.2f} times as fast as 1")
    ),
    "Look at the step from 8 to 16, where the groups leave their nodes.": lambda: (
        waits()[16] - waits()[8] == max(waits()[2 * n] - waits()[n] for n in (1, 2, 4, 8, 16, 32))
        and NODES.devices_per_node == 8
    ),
    "A model of 65 billion parameters on 8 nodes of 8 A100s, with tensor groups from 1 to 64": lambda: (
        64e9 < LARGE.parameters < 66e9
        and (NODES.nodes, NODES.devices_per_node, NODES.device) == (8, 8, "A100-80GB")
        and list(waits()) == [1, 2, 4, 8, 16, 32, 64]
    ),
    "searches thousands of plans for the best": lambda: len(search(LARGE, NODES, BATCH)) > 2000,
    "for the same twenty steps as in section 7": lambda: (
        "args=(20, torch.float64)" in lesson(NAME).code("four, _ = launch(train")
        and "steps=20" in lesson(NAME).code("def in_pytorch(")
        and shows("launch(in_pytorch", "the same as ours, up to rounding: True")
    ),
    "So a block has six all-reduces, and not four.": lambda: cut_in_pytorch()[1] == 6,
    "It cuts what you name, and nothing else: here embedding and head are whole on all ranks.": lambda: (
        {name.split(".")[1] for name, (is_cut, _) in cut_in_pytorch()[0][0].items() if is_cut} == {"1"}
    ),
    "inside `loss_parallel()` the loss is found as in section 6": ends_are_cut_and_the_loss_is_right,
    "What it cuts is rank 0's. What it leaves whole stays as each rank has made it": (
        only_what_is_cut_is_the_first_rank_s
    ),
    "`torch/distributed/tensor/parallel/style.py`, from `ColwiseParallel` on": lambda: (
        ColwiseParallel.__module__ == style.__name__ == "torch.distributed.tensor.parallel.style"
    ),
    "Parameters, gradients and optimizer state are divided by the number of ranks": lambda: shows(
        "def shapes(rank):", "mlp.up.weight           [256, 64]    [128, 64]"
    ),
    "So with a small hidden size there is little to compute for each byte, and more ranks can be slower than fewer.": (
        lambda: explored(8, 32)[0] > explored(4, 32)[0]
    ),
    "What a layer computes grows with the square of the width, what travels only with the width.": lambda: (
        run_cut("columns, rows", 2, hidden=32).sent == 4 * run_cut("columns, rows", 2, hidden=8).sent
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)


def test_the_figures_of_the_case_are_the_planner_s() -> None:
    ((_, answer),) = questions.load("choose_strategy").form.explanations()
    reached = {name: f"{estimate(LARGE, NODES, plan, BATCH).mfu:.0%}" for name, plan in CANDIDATES.items()}
    best = search(LARGE, NODES, BATCH).best
    for name in list(CANDIDATES)[1:]:
        assert reached[name] in answer
    assert f"{best.mfu:.0%}" in answer and (best.plan.tp, best.plan.pp, best.plan.dp) == (2, 4, 8)
    sharded = estimate(LARGE, NODES, CANDIDATES["64 replicas, all states sharded (ZeRO-3)"], BATCH)
    assert sharded.step_time.data > sharded.step_time.total / 4
