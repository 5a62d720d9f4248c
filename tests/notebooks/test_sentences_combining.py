"""What the lesson on combining mechanisms says is so."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch.distributed import device_mesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from course_lib import launch
from lessons.L08_combining_mechanisms.explorer import MESHES
from lessons.L08_combining_mechanisms.runs import BETWEEN, INSIDE, PER_MACHINE, HybridExperiment, MeshStep
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "combining_mechanisms"
numbers, shows = lesson(NAME).numbers, lesson(NAME).shows
GROUPS, SENT = "def neighbors(", "for samples in (64, 256):"


def sent(samples: int) -> dict[str, float]:
    """Bytes of a step, by axis."""
    return dict(zip(("tp", "pp", "dp"), numbers(SENT, f"{samples:3} samples:")[1:], strict=True))


def norms() -> list[float]:
    """Of one process, with the squares of all ranks, with each gradient once."""
    return numbers("by_rank = launch(")


def counted(rank: int) -> list[float]:
    return numbers("for rank, kinds in enumerate(by_rank)", f"rank {rank} counts")[1:]


@lru_cache
def arranged(
    sizes: tuple[int, int, int], micro_batches: int = 4, name: str = "1f1b", dtype: Any = torch.float32
) -> MeshStep:
    """The explorer's step."""
    return HybridExperiment(sizes, micro_batches, name, dtype).run()


def bytes_of(step: MeshStep, axis: str = "") -> int:
    return sum(sum(by_pair.values()) for name, by_pair in step.sent.items() if axis in ("", name))


def share_in_16_bits(axis: str) -> float:
    """Of the bytes in 32 bits."""
    return bytes_of(arranged((2, 2, 2), dtype=torch.bfloat16), axis) / bytes_of(arranged((2, 2, 2)), axis)


def across(step: MeshStep) -> set[str]:
    """The axes that reach from one machine to the other."""
    return {
        axis
        for axis, by_pair in step.sent.items()
        if any(source // PER_MACHINE != target // PER_MACHINE for source, target in by_pair) and axis != "all"
    }


def computes(step: MeshStep) -> float:
    """For which share of the time rank 0 does."""
    return step.timeline.busy(0) / step.timeline.makespan


def idle(step: MeshStep) -> float:
    return step.timeline.idle_fraction()


def replicas_wait_at_the_end() -> bool:
    """Eight replicas: nothing holds a rank up before its last backward pass has ended."""
    timeline = arranged((8, 1, 1)).timeline
    ends = [max(span.end for span in timeline.of(rank) if span.kind == "backward") for rank in range(8)]
    held_up = [span for span in timeline.spans if span.kind in ("wait", "transfer") and not span.background]
    return all(span.start >= ends[span.rank] - 1e-9 for span in held_up)


def memory_of_replicas() -> bool:
    """Parameters and gradients are whole on each of eight replicas; of the optimizer's state they hold an eighth."""
    alone, shared = (HybridExperiment(sizes).predicted.held(0) for sizes in ((1, 1, 1), (8, 1, 1)))
    return shared[1] == alone[1] and shared[0] >= alone[0] and shared[2] < alone[2] / 7


def everything_adds_up() -> bool:
    """The squares of all ranks are twice those of a replica, whose tensor ranks have again what they hold whole."""
    cut, whole, tied = (
        [counted(0)[0], counted(1)[0], counted(2)[0], counted(3)[0]],
        [counted(0)[1], counted(2)[1]],
        [],
    )
    tied = [counted(0)[2], counted(1)[1]]
    once = sum(cut) + sum(whole) + sum(tied)
    everything = 2 * (sum(cut) + 2 * sum(whole) + 2 * sum(tied))
    return norms()[0] == pytest.approx(once**0.5, abs=1e-4) and norms()[1] == pytest.approx(everything**0.5, abs=1e-4)


def tensor_traffic_is_four_a_layer() -> bool:
    """All-reduces of hidden states that a rank of the first stage begins: those of its layers, and the embedding's."""
    step = arranged((2, 2, 2))
    hidden = 64 // 2 // 4 * 8 * 32 * 4  # bytes of a micro-batch's hidden states; two ranks in a ring send as many
    sums = [span for span in step.timeline.of(0) if span.kind == "transfer" and span.name == "all_reduce"]
    return sum(span.bytes == hidden for span in sums) == 4 * (4 * 2 + 1)


def _on_two_axes(rank: int) -> tuple[list[str], str]:
    """The axes of a weight that was cut and then sharded, and what clip_grad_norm_ says of it beside another."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    model(torch.ones(4, 8)).sum().backward()
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except RuntimeError as error:
        refused = str(error)
    axes: Any = model[1].weight
    return list(axes.device_mesh.mesh_dim_names), refused


@lru_cache
def on_two_axes() -> tuple[list[str], str]:
    return launch(_on_two_axes, 4).results[0]


PROOFS: Proofs = {
    "arrange the ranks in nine ways": lambda: len(MESHES) == 9,
    "train one model on eight ranks that share the samples, the layers *and* each layer, in 16 bits if you like": (
        lambda: (
            {dp * pp * tp for dp, pp, tp in MESHES} == {8} and "float16" in lesson(NAME).code("def train_with_an_over")
        )
    ),
    "Think of eight ranks as a block, 2 x 2 x 2: two **replicas**, each a pipeline of two **stages**, each stage "
    "on two **tensor ranks**.": lambda: "Mesh(dp=2, pp=2, tp=2)" in lesson(NAME).code(GROUPS),
    "Replicas wait for nobody until the end, but of all memory they share out the optimizer's alone.": lambda: (
        replicas_wait_at_the_end() and memory_of_replicas()
    ),
    # The answers to the tasks of the explorer.
    "1 x 1 x 8 sends the most, 17 MB, and 2 x 4 x 1 the fewest, 0.8 MB. But 4 x 1 x 2 makes the shortest step, and "
    "sends more than four times as much as 2 x 4 x 1.": lambda: (
        [f"{bytes_of(arranged(sizes)) / 1e6:.2g}" for sizes in ((1, 1, 8), (2, 4, 1))] == ["17", "0.81"]
        and sorted(MESHES, key=lambda sizes: bytes_of(arranged(sizes)))[:: len(MESHES) - 1] == [(2, 4, 1), (1, 1, 8)]
        and min(MESHES, key=lambda sizes: arranged(sizes).timeline.makespan) == (4, 1, 2)
        and bytes_of(arranged((4, 1, 2))) > 4 * bytes_of(arranged((2, 4, 1)))
    ),
    "They wait for the slow link, and compute for 33% of the time. In 2 x 1 x 4 only the replicas' lines cross, in "
    "1 x 2 x 4 only those of the pipeline.": lambda: (
        f"{computes(arranged((1, 1, 8))):.0%}" == "33%"
        and (across(arranged((2, 1, 4))), across(arranged((1, 2, 4)))) == ({"dp"}, {"pp"})
    ),
    "they are idle for 45% of the time. With eight micro-batches and `zb_h1` it is 16%.": lambda: (
        [f"{idle(arranged((2, 4, 1), *how)):.0%}" for how in ((4, "1f1b"), (8, "zb_h1"))] == ["45%", "16%"]
    ),
    "Only those of the replicas keep more than half of their bytes, since gradients are added up in 32 bits.": lambda: (
        [axis for axis in ("tp", "pp", "dp") if share_in_16_bits(axis) > 0.51] == ["dp"]
        and share_in_16_bits("dp") == 3 / 4
    ),
    "Which sends the most bytes, and which the fewest? Is it the fewest bytes that make the shortest step?": lambda: (
        max(MESHES, key=lambda sizes: bytes_of(arranged(sizes))) == (1, 1, 8)
        and min(MESHES, key=lambda sizes: bytes_of(arranged(sizes)))
        != min(MESHES, key=lambda sizes: arranged(sizes).timeline.makespan)
    ),
    "Take 1 x 1 x 8. What do the ranks do for most of the time?": lambda: computes(arranged((1, 1, 8))) < 0.5,
    "Then 2 x 1 x 4 and 1 x 2 x 4: which lines cross from one machine to the other now?": lambda: (
        (across(arranged((2, 1, 4))), across(arranged((1, 2, 4)))) == ({"dp"}, {"pp"})
    ),
    "Take 2 x 4 x 1, which sends little. Who waits, and for what? Which two controls help?": lambda: (
        idle(arranged((2, 4, 1))) > max(idle(arranged((2, 4, 1), 8)), idle(arranged((2, 4, 1), 4, "zb_h1")))
    ),
    "Halve the bits. Which lines become thinner": lambda: all(
        bytes_of(arranged((2, 2, 2), dtype=torch.bfloat16), axis) < 0.8 * bytes_of(arranged((2, 2, 2)), axis)
        for axis in ("tp", "pp", "dp")
    ),
    "eight real ranks, which stand for eight devices in two machines of four.": lambda: (
        PER_MACHINE == 4 and INSIDE.bandwidth > BETWEEN.bandwidth and INSIDE.latency < BETWEEN.latency
    ),
    "replicas count everything twice, tensor ranks the norms and some biases twice again": everything_adds_up,
    "twice forward and twice backward in every layer, for every micro-batch": tensor_traffic_is_four_a_layer,
    '`parallelize_module` on the axis "tp", `fully_shard` on the axis "dp". They are compared with our ranks': lambda: (
        shows("by_replica = launch(", "the same as ours up to rounding: True")
    ),
    "A weight is then a `DTensor` on both axes.": lambda: on_two_axes()[0] == ["dp", "tp"],
    "`clip_grad_norm_` does not work here": lambda: "must have the same mesh" in on_two_axes()[1],
    "`torch/distributed/device_mesh.py`, at `init_device_mesh` and `DeviceMesh`": lambda: (
        init_device_mesh.__module__ == device_mesh.__name__ and hasattr(device_mesh, "DeviceMesh")
    ),
    "Rank 5 works with rank 4 on every layer of its stage (tp)": lambda: shows(
        GROUPS, "rank 5: dp [1, 5]   pp [5, 7]   tp [4, 5]"
    ),
    "With ranks 0, 2, 3 and 6 it never has to talk at all": lambda: (
        set(range(8)) - set(numbers(GROUPS, "rank 5:")) == {0, 2, 3, 6}
    ),
    "A little more than a quarter: half of the layers, and half of each of their matrices.": lambda: all(
        25 < share < 26 for share in numbers("def what_it_holds(", "%")[3::4]
    ),
    "Each of these ways to arrange eight ranks is the same training": lambda: (
        lesson(NAME).shown("alone = training.train(").count("the same\n") == 3
    ),
    "Too large, and not by a round factor": lambda: (
        norms()[1] > norms()[0] == norms()[2] and abs(norms()[1] / norms()[0] - 2**0.5) > 0.01
    ),
    "It clips too often and too much": lambda: norms()[1] > norms()[0],
    "Only replica 0 counts": lambda: shows(
        "for rank, kinds in enumerate(by_rank)", *(f"rank {rank} counts nothing" for rank in (4, 5, 6, 7))
    ),
    "What all tensor ranks have is counted by the first of them, and the shared embedding by the first stage.": (
        lambda: [len(counted(rank)) for rank in range(4)] == [3, 2, 2, 1]
    ),
    "Tensor parallelism sends by far the most": lambda: all(
        sent(samples)["tp"] > 5 * max(sent(samples)["pp"], sent(samples)["dp"]) for samples in (64, 256)
    ),
    "with more samples, the other two grow, and this one does not": lambda: (
        sent(64)["dp"] == sent(256)["dp"]
        and sent(256)["tp"] == pytest.approx(4 * sent(64)["tp"], rel=0.01)
        and sent(256)["pp"] == pytest.approx(4 * sent(64)["pp"], rel=0.01)
    ),
    "Whatever you choose, the updated weights are those of one process.": lambda: shows(
        "MeshExplorer()", "The updated weights are those of one process."
    ),
    "All skip, and all halve their scale.": lambda: shows(
        "results = launch(train_with_an_overflow", "step 3: loss 2.2, skipped", str([2.0**9] * 8)
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)
