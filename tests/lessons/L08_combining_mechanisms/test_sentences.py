"""Proofs of sentences in the lesson on combining mechanisms."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch.distributed import device_mesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from course_lib import data, launch
from course_lib.mechanisms import hybrid
from course_lib.mechanisms.mixed_precision import LossScaler
from course_lib.model import TinyGPT
from course_lib.planner.communication import group
from course_lib.schedules import SCHEDULES
from lessons.L08_combining_mechanisms.runs import CONFIG, PER_MACHINE, HybridExperiment
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "combining_mechanisms"
numbers, shown, shows = lesson(NAME).numbers, lesson(NAME).shown, lesson(NAME).shows


def sent() -> tuple[list[float], list[float]]:
    """Bytes of a step with few samples and with many: of tp, pp and dp."""
    few, many = (numbers("for samples in (64, 256):", f"{samples:3} samples:")[1:] for samples in (64, 256))
    return few, many


def norms() -> list[float]:
    """Norms of one process, with the squares of all ranks, and with each gradient once."""
    return numbers("by_rank = launch(")


def counted(rank: int) -> list[float]:
    return numbers("for rank, kinds in enumerate(by_rank)", f"rank {rank} counts")[1:]


def everything_adds_up() -> bool:
    """Sums of squares over ranks: all ranks have twice that of a replica, whose tensor ranks repeat whole tensors."""
    (cut0, whole0, tied0), (cut1, tied1), (cut2, whole2), (cut3,), *others = map(counted, range(8))
    everything = 2 * (cut0 + cut1 + cut2 + cut3 + 2 * (whole0 + whole2 + tied0 + tied1))
    return norms()[1] == pytest.approx(everything**0.5, abs=1e-4) and others == [[]] * 4


def across(sizes: tuple[int, int, int]) -> set[str]:
    """The axes that reach from one machine to the other."""
    sent = HybridExperiment(sizes).run().sent
    far = {axis: any(a // PER_MACHINE != b // PER_MACHINE for a, b in by_pair) for axis, by_pair in sent.items()}
    return {axis for axis in ("tp", "pp", "dp") if far[axis]}


def replicas_wait_at_the_end() -> bool:
    """Eight replicas: nothing holds a rank up before its last backward pass has ended."""
    timeline = HybridExperiment((8, 1, 1)).run().timeline
    ends = [max(span.end for span in timeline.of(rank) if span.kind == "backward") for rank in range(8)]
    held_up = [span for span in timeline.spans if span.kind in ("wait", "transfer") and not span.background]
    return all(span.start >= ends[span.rank] - 1e-9 for span in held_up)


def _on_two_axes(rank: int) -> tuple[list[str], str]:
    """The axes of a weight that was cut and then sharded, and the error of clip_grad_norm_ with it and another one."""
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


NINE = [
    *("8 x 1 x 1  ", "4 x 2 x 1", "4 x 1 x 2  ", "2 x 4 x 1", "2 x 2 x 2"),
    *("2 x 1 x 4", "1 x 4 x 2", "1 x 2 x 4", "1 x 1 x 8"),
]


def planned(name: str) -> tuple[float, float]:
    """GiB and seconds of an arrangement, as shown."""
    *_, memory, seconds = numbers("planned = {", name)
    return memory, seconds


def overflow_on_rank_5(rank: int) -> bool:
    """Whether this rank skips the update of a step in which a gradient on rank 5 overflows."""
    mesh = hybrid.Mesh(2, 2, 2)
    part = hybrid.ModelPart(TinyGPT(CONFIG, dtype=torch.float16), mesh, SCHEDULES["1f1b"](2, 4))
    optimizer = hybrid.make_optimizer(part, torch.optim.SGD, lr=1.0)
    before = [parameter.detach().clone() for parameter in part.parameters()]
    if rank == 5:
        next(part.parameters()).register_hook(lambda gradient: gradient * math.inf)
    hybrid.train_step(part, optimizer, *data.fixed_examples(64), LossScaler(2.0**10))
    same = all(torch.equal(one, other) for one, other in zip(part.parameters(), before, strict=True))
    mesh.close()
    return same


PROOFS: Proofs = {
    "Rank 5 works with rank 4 on every layer of its stage (tp)": lambda: shows(
        "def neighbors(", "rank 5: dp [1, 5]   pp [5, 7]   tp [4, 5]"
    ),
    "A little more than a quarter: half of the layers, and half of each of their matrices.": lambda: all(
        25 < share < 26 for share in numbers("def what_it_holds(", "%")[3::4]
    ),
    "Each of these ways to arrange eight ranks is the same training": lambda: (
        shown("alone = training.train(").count("the same\n") == 3
    ),
    "Too large, and not by a round factor": lambda: (
        norms()[1] > norms()[0] == norms()[2] and abs(norms()[1] / norms()[0] - 2**0.5) > 0.01
    ),
    "replicas count everything twice, tensor ranks the norms and some biases twice again": everything_adds_up,
    "Tensor parallelism sends by far the most": lambda: all(tp > 5 * max(pp, dp) for tp, pp, dp in sent()),
    "with more samples, the other two grow, and this one does not": lambda: (
        [round(many / few, 1) for few, many in zip(*sent(), strict=True)] == [4, 4, 1]
    ),
    "In 2 x 1 x 4 only the replicas' lines cross, in 1 x 2 x 4 only those of the pipeline.": lambda: (
        (across((2, 1, 4)), across((1, 2, 4))) == ({"dp"}, {"pp"})
    ),
    "Replicas wait for nobody until the end": replicas_wait_at_the_end,
    "If one on rank 5 is not, all eight skip the update": lambda: launch(overflow_on_rank_5, 8).results == [True] * 8,
    "With both, the two are as fast as each other.": lambda: math.isclose(
        *numbers("for name, how in settings.items():", "256, and leave early")[4::4], rel_tol=0.01
    ),
    "2 x 4 x 1 is worse than 2 x 2 x 2 in both.": lambda: all(
        one > other for one, other in zip(planned("2 x 4 x 1"), planned("2 x 2 x 2"), strict=True)
    ),
    "Eight replicas would be the fastest, and they do not fit. Eight tensor ranks need the least, and take about twice "
    "as long.": lambda: (
        shows("planned = {", "8 x 1 x 1          modelled:   98 GiB, does not fit")
        and planned("8 x 1 x 1  ")[1] == min(times := [planned(name)[1] for name in NINE])
        and planned("1 x 1 x 8")[0] == min(planned(name)[0] for name in NINE)
        and 1.8 < planned("1 x 1 x 8")[1] / min(times) < 2.2
    ),
    "a device fetches half as much, twice as often, and its group has half as many network cards": lambda: (
        group(4, 2, 4).per_node == 2 == group(8, 1, 4).per_node / 2  # 4 replicas of 2 tensor ranks, or 8
    ),
    "stay among four, and what crosses between the machines is one `all_reduce`": lambda: shows(
        "for sizes in ((8,), (2, 4)):", "(8,) rank 0 holds 25,200", "(2, 4) rank 0 holds 50,336", "'all_reduce'"
    ),
    '`parallelize_module` on the axis "tp", `fully_shard` on the axis "dp". They are compared with our ranks': lambda: (
        shows("by_replica = launch(", "the same as ours up to rounding: True")
    ),
    "A weight is then a `DTensor` on both axes.": lambda: on_two_axes()[0] == ["dp", "tp"],
    "`clip_grad_norm_` does not work here": lambda: "must have the same mesh" in on_two_axes()[1],
    "`torch/distributed/device_mesh.py`, at `init_device_mesh` and `DeviceMesh`": lambda: (
        init_device_mesh.__module__ == device_mesh.__name__ and hasattr(device_mesh, "DeviceMesh")
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)
