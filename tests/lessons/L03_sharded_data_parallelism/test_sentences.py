"""Proofs of sentences in the lesson on sharded data parallelism."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, _fully_shard, fully_shard
from torch.distributed.tensor import Shard

from course_lib import Link, Pace, launch
from lessons.L03_sharded_data_parallelism.runs import sharded_step
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "sharded_data_parallelism"
numbers, shows = lesson(NAME).numbers, lesson(NAME).shows
PACE = Pace({"forward": 0.08, "backward": 0.16, "optimizer": 0.0}, Link(0.0002, 80e6))  # of section 5


def counted(name: str) -> list[float]:
    """Bytes for each parameter: parameters, gradients, optimizer, together, sent."""
    return numbers("columns = (", name)[-5:]


def takes(name: str) -> float:
    return numbers("{'without prefetch':16}", name)[-2]


def times_held_up() -> int:
    """The number of exposed transfers of rank 0; those less than a millisecond apart count as one."""
    found = [span for span in sharded_step(3, 4, PACE).timeline.of(0) if span.kind == "transfer"]
    spans = sorted((span for span in found if span.duration and not span.background), key=lambda span: span.start)
    return 1 + sum(later.start - earlier.end > 1e-3 for earlier, later in pairwise(spans))


def of_pytorch(rank: int) -> tuple[Any, float, float]:
    """The shard of a weight; a weight that began differently on each rank; the mean gradient of unequal shares."""
    layer = torch.nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.fill_(float(rank))
    fully_shard(layer)
    whole: Any = layer.weight
    begun = whole.full_tensor()[1, 0].item()
    layer(torch.ones(1 + 2 * rank, 2) * (1 + rank)).mean().backward()
    return whole.placements, begun, whole.grad.full_tensor()[0, 0].item()


@lru_cache
def pytorch() -> list[tuple[Any, float, float]]:
    return launch(of_pytorch, 2).results


PROOFS: Proofs = {
    # ZeRO-1 holds a shard of the mean gradient on top when its gradients are averaged.
    "$(8 + 8/N)\\,\\Psi$": lambda: counted("ZeRO-1")[3] == 8 + 8 / 4 + 4 / 4,
    "$(4 + 12/N)\\,\\Psi$": lambda: counted("ZeRO-2")[3] == 4 + 12 / 4,
    "$16/N\\,\\Psi$": lambda: counted("ZeRO-3")[3] == 16 / 4,
    "traffic is exposed in three places: before the first layer, in the middle, where the last layer is wanted back at "
    "once, and after the last gradient.": lambda: times_held_up() == 3,
    "ZeRO-3 sends the most, and is still faster than both *here*.": lambda: (
        takes("ZeRO-3") < min(takes("ZeRO-1"), takes("ZeRO-2"))
    ),
    "None of them. They belong to a rank's own samples, so nothing is redundant.": lambda: (
        len({numbers("at most {step", f"{name} ")[-1] for name in ("data parallelism", "ZeRO-1", "ZeRO-2", "ZeRO-3")})
        == 1
    ),
    "It cuts every parameter by its first dimension, into `DTensor`s": lambda: all(
        placements == (Shard(0),) for placements, _, _ in pytorch()
    ),
    # The second row is rank 1's, so each rank's own numbers are there.
    "It does not make the ranks equal at the start.": lambda: {begun for _, begun, _ in pytorch()} == {1.0},
    # Rank 0 has one sample with a gradient of 1/2, rank 1 three with 2/2: by samples it would be 7/8.
    "It averages over ranks as if all shares had the same size.": lambda: (
        {gradient for _, _, gradient in pytorch()} == {0.75}
    ),
    "`torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`, from `unshard` to `post_backward`.": lambda: all(
        hasattr(_fully_shard._fsdp_param_group.FSDPParamGroup, name) for name in ("unshard", "post_backward")
    ),
    "With `set_requires_gradient_sync(False)` it adds up": lambda: hasattr(FSDPModule, "set_requires_gradient_sync"),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)
