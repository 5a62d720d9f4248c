"""The sentences of the lesson on data parallelism, with their proofs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

from course_lib import data, launch
from course_lib.classroom.runs.training import flat
from course_lib.figures import time_breakdown
from course_lib.mechanisms import batches
from course_lib.model import TinyGPT
from lessons.L02_data_parallelism.explorer import BATCH_SIZES, LINK_SPEEDS, DataParallelSetting
from tests.notebooks.lesson import Proofs, is_proved, lesson

NAME = "data_parallelism"
numbers, shown, shows = lesson(NAME).numbers, lesson(NAME).shown, lesson(NAME).shows
RING = "for n in (2, 4, 8, 16):"


def times_the_gradients() -> dict[int, float]:
    """Bytes sent as a multiple of the gradients, by the number of ranks in the ring."""
    rows = [line.split() for line in shown(RING).splitlines() if line]
    return {int(row[0]): float(row[-4]) for row in rows}


def held() -> list[list[float]]:
    return [numbers("bytes_held", f"on {n}:")[1:] for n in (1, 4)]


def terms() -> list[list[float]]:
    """Milliseconds on 1, 2, 4 and 8 ranks: the four terms, their sum, and the emulated time."""
    return [numbers("G = emulated[1]", f"N = {n}:")[1:] for n in (1, 2, 4, 8)]


@lru_cache
def explored(ranks: int, batch_size: int, link_speed: float, overlap: bool = True) -> float:
    """The explorer's speed-up over one rank."""
    alone, step = (DataParallelSetting(n, batch_size, link_speed, overlap).with_ranks(n).run() for n in (1, ranks))
    return alone.makespan / step.makespan


def computes(ranks: int, batch_size: int, link_speed: float) -> float:
    """The share of the explorer's step in which ranks compute."""
    return time_breakdown(DataParallelSetting(ranks, batch_size, link_speed, True).run())["compute"]


# PyTorch's own, on ranks


def gradient(model: torch.nn.Module, share: Sequence[torch.Tensor]) -> torch.Tensor:
    inputs, targets = share
    data.answer_loss(model(inputs), targets).backward()
    return flat(weight.grad for weight in model.parameters() if weight.grad is not None)


def of_own_share(rank: int, minibatch: Sequence[torch.Tensor]) -> torch.Tensor:
    share = batches.split(minibatch, dist.get_world_size())[rank]
    return gradient(DistributedDataParallel(TinyGPT(dtype=torch.float64)), share)


def is_the_plain_mean() -> bool:
    ten = data.fixed_examples(10)
    mean = torch.stack([gradient(TinyGPT(dtype=torch.float64), share) for share in batches.split(ten, 4)]).mean(0)
    return all(torch.allclose(theirs, mean, rtol=0, atol=1e-12) for theirs in launch(of_own_share, 4, (ten,)).results)


def unused_parameter(rank: int) -> str:
    """The error of the second step if a layer takes no part in the loss."""
    layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("used", "unused")})
    layers.forward = lambda x: layers["used"](x)
    replica = DistributedDataParallel(layers)
    try:
        for _ in range(2):
            replica(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


PROOFS: Proofs = {
    "With 512 samples it is. With 10 the sampler **pads**: every rank is to have three, so it begins again at the "
    "front, and samples 0 and 1 count twice.": lambda: shows(
        "launch(in_pytorch",
        "[0, 4, 8] [1, 5, 9] [2, 6, 0] [3, 7, 1]",
        "512 samples        the same",
        "10 samples         off",
    ),
    "(With `drop_last=True` it leaves two out instead.)": lambda: (
        sum(len(DistributedSampler(TensorDataset(torch.arange(10)), 4, rank, drop_last=True)) for rank in range(4))
        == 10 - 2
    ),
    "`DistributedDataParallel` averages over *ranks*, so that is the plain mean again.": is_the_plain_mean,
    "`no_sync` keeps the ranks from averaging after each portion": lambda: shows(
        "launch(in_portions", "four portions      the same, up to rounding", "all-reduces: 1\n"
    ),
    "A parameter that takes no part in the loss is an error in the next step": lambda: all(
        "find_unused_parameters=True" in said for said in launch(unused_parameter, 2).results
    ),
    "It is the **mean**.": lambda: (
        shows('compare("mean of the four"', "mean of the four   the same")
        and shows('compare("mean of the four"', "one of the four    off by", "sum of the four    off by")
    ),
    "A sum goes with a sum, a mean with a mean": lambda: shows('compare("sum of sums', "the same, up to rounding"),
    "That is no bound (add 1, a hundred million and minus a hundred million, and the 1 may be lost)": lambda: (
        (torch.tensor(1.0) + 1e8 - 1e8).item() == 0
    ),
    "and it is far smaller than what any wrong idea is off by": lambda: (
        min(numbers('compare("mean of the four"', "off by")) > 10 * 100 * 512 * 3 * 2**-23
    ),  # three characters of an answer in each of 512 samples; percent
    "counts one and a half times as much as one from a share of three": lambda: (
        (1 / 4 / 2) / (1 / 4 / 3) == 1.5
        and shows('compare("weighted mean"', "weighted mean      the same, up to rounding", "plain mean         off by")
    ),
    ": less than twice": lambda: all(times == 2 * (n - 1) / n < 2 for n, times in times_the_gradients().items()),
    "Nothing: a replica is a whole model.": lambda: held() == [held()[0], 4 * held()[0]] and held()[0][0] > 0,
    "the longer they train, the further apart they are": lambda: (
        (apart := [numbers("follow, 4", f"after step {n:2} ")[1] for n in (1, 5, 20, 80)]) == sorted(apart)
        and apart[0] < apart[-1]
    ),
    "The emulated line has a device for each rank, and still bends.": lambda: (
        (all_ranks := [n * row[-1] for n, row in zip((1, 2, 4, 8), terms(), strict=True)]) == sorted(set(all_ranks))
    ),
    "The share of time spent on communication grows with every rank.": lambda: (
        (shares := [(row[2] + row[3]) / row[-1] for row in terms()]) == sorted(set(shares))
    ),
    "There is more of it; but above all there is less computing beside it.": lambda: (
        0 < terms()[-1][2] + terms()[-1][3] < (terms()[0][0] - terms()[-1][0]) / 10
    ),
    "The first term falls with $N$, the second stays. The third grows, but is never twice what it was with two ranks; "
    "the last one grows without limit.": lambda: (
        [row[0] for row in terms()] == [768 / n for n in (1, 2, 4, 8)]
        and {row[1] for row in terms()} == {4}
        and terms()[1][2] < terms()[2][2] < terms()[3][2] < 2 * terms()[1][2]
        and [row[3] for row in terms()] == [2 * (n - 1) for n in (1, 2, 4, 8)]
    ),
    "Here are all four, beside what the emulated clocks say": lambda: all(row[4] == row[5] for row in terms()),
    # The answers to the tasks of the explorer.
    "Overlap can hide little here, since the link is busy for longer than the ranks compute.": lambda: (
        abs(explored(8, 32, 2, overlap=False) - explored(8, 32, 2)) < 0.2 and computes(8, 32, 2) < 1 / 2
    ),
    "Where there is little to compute, that costs more than it hides.": lambda: (
        explored(8, 16, 5) < explored(8, 16, 5, overlap=False)
    ),
    "With overlap they are slower than four, whatever the link. Without it they are faster": lambda: all(
        explored(8, 16, link) < explored(4, 16, link)
        and explored(4, 16, link, overlap=False) < explored(8, 16, link, overlap=False)
        for link in LINK_SPEEDS
    ),
    "samples, overlap and the fastest link.": lambda: (
        explored(8, 64, max(LINK_SPEEDS))
        == max(explored(8, size, max(LINK_SPEEDS), overlap) for size in BATCH_SIZES for overlap in (False, True))
    ),
    "Computing shrinks with their number, communication and the update do not.": lambda: (
        terms()[0][0] > terms()[-1][0] and terms()[0][1] == terms()[-1][1] and terms()[1][2] < terms()[-1][2]
    ),
}


@pytest.mark.parametrize("sentence", PROOFS)
def test_it_is_so(sentence: str) -> None:
    is_proved(NAME, sentence, PROOFS)
