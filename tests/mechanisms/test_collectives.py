"""The ring collectives, against sums made in this process.

A ring adds chunk c in a known order: it starts on rank c + 1, goes once around and ends on rank c. In the same
order one process gets the same bits, so these tests demand `torch.equal`.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from course_lib import Link, Pace, launch
from course_lib.mechanisms import collectives
from tests.mechanisms.ring import contribution, ring_sum

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.complex64, torch.int64, torch.int8, torch.bool)


def all_reduced(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    tensor = contribution(rank, shape, dtype)
    collectives.ring_all_reduce(tensor)
    return tensor


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@given(shape=st.lists(st.integers(0, 7), max_size=3).map(tuple), dtype=st.sampled_from(DTYPES))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_all_reduce_gives_every_rank_the_sum_bit_for_bit(n: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    expected = ring_sum([contribution(rank, shape, dtype) for rank in range(n)])
    for result in launch(all_reduced, n, (shape, dtype)).results:
        assert result.dtype == dtype
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_all_reduce_agrees_with_the_one_of_torch(dtype: torch.dtype) -> None:
    """The order of the sum differs: n terms, so n roundings of at most eps times the sum of magnitudes."""
    n, shape = 4, (33, 7)

    def difference(rank: int) -> float:
        ours, theirs = contribution(rank, shape, dtype), contribution(rank, shape, dtype)
        magnitudes = theirs.abs()
        collectives.ring_all_reduce(ours)
        dist.all_reduce(theirs)
        dist.all_reduce(magnitudes)
        return float(((ours - theirs).abs() / magnitudes).max())

    assert max(launch(difference, n).results) <= n * torch.finfo(dtype).eps


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_reduce_scatter_leaves_chunk_r_of_the_sum_on_rank_r(n: int) -> None:
    def scattered(rank: int) -> tuple[Tensor, Tensor]:
        tensor = contribution(rank, (2, 5), torch.float32)
        return collectives.ring_reduce_scatter(tensor), tensor

    expected = ring_sum([contribution(rank, (2, 5), torch.float32) for rank in range(n)]).flatten().tensor_split(n)
    for rank, (chunk, tensor) in enumerate(launch(scattered, n).results):
        assert torch.equal(chunk, expected[rank])
        assert torch.equal(tensor.flatten().tensor_split(n)[rank], expected[rank])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_all_gather_fills_in_the_chunks_of_the_others(n: int) -> None:
    def gathered(rank: int) -> Tensor:
        tensor = torch.full((2, 5), float("nan"))
        tensor.view(-1).tensor_split(n)[rank].fill_(rank)
        return collectives.ring_all_gather(tensor)

    sizes = [10 // n + (rank < 10 % n) for rank in range(n)]
    expected = [float(rank) for rank, size in enumerate(sizes) for _ in range(size)]
    for result in launch(gathered, n).results:
        assert result.flatten().tolist() == expected


def test_a_group_of_some_ranks_sums_among_itself() -> None:
    def in_groups(rank: int) -> tuple[Tensor, str]:
        even, odd = dist.new_group([0, 2, 4]), dist.new_group([1, 3])
        own, other = (even, odd) if rank % 2 == 0 else (odd, even)
        tensor = contribution(rank, (7,), torch.float32)
        collectives.ring_all_reduce(tensor, own)
        try:
            collectives.ring_all_reduce(tensor, other)
        except ValueError as refusal:
            return tensor, str(refusal)
        return tensor, ""

    for rank, (tensor, refusal) in enumerate(launch(in_groups, 5).results):
        members = range(rank % 2, 5, 2)
        assert torch.equal(tensor, ring_sum([contribution(member, (7,), torch.float32) for member in members]))
        assert f"does not contain rank {rank}" in refusal


@pytest.mark.parametrize("n", [2, 3, 4])
def test_each_rank_sends_no_more_than_the_best_algorithm_needs(n: int) -> None:
    """2 (n - 1) / n of the tensor, in 2 (n - 1) messages, all to the neighbor on the right."""
    elements = 12 * 5
    run = launch(all_reduced, n, ((elements,), torch.float32))
    for rank in range(n):
        sends = [span for span in run.timeline.of(rank) if span.name in ("send", "isend") and span.bytes]
        assert sum(span.bytes for span in sends) == 2 * (n - 1) * elements * 4 // n
        assert len(sends) == 2 * (n - 1)
        assert {span.peer for span in sends} == {(rank + 1) % n}
        assert run.timeline.bytes_sent(rank) == sum(span.bytes for span in sends)


def test_a_single_rank_sends_nothing() -> None:
    timeline = launch(all_reduced, 1, ((9,), torch.float32)).timeline
    assert not [span for span in timeline.spans if span.kind in ("transfer", "wait")]


def whole(rank: int, way: str) -> Tensor:
    """A part of a tensor: 2 ** rank everywhere, so that a sum tells who is in it."""
    storage = torch.zeros(6, 5, dtype=torch.int64)
    view = storage[:3]
    view += 2**rank
    if way == "tree":
        assert collectives.tree_all_reduce(view) is view
    else:
        across, inside = init_device_mesh("cpu", (dist.get_world_size() // 2, 2)).get_all_groups()
        assert collectives.hierarchical_all_reduce(view, inside, across) is view
    return storage


@pytest.mark.parametrize(
    ("way", "n"), [("tree", 1), ("tree", 2), ("tree", 3), ("tree", 6), ("hierarchical", 2), ("hierarchical", 6)]
)
def test_a_tree_and_a_hierarchy_leave_the_sum_of_all_ranks_and_touch_nothing_else(way: str, n: int) -> None:
    for result in launch(whole, n, (way,)).results:
        assert result[:3].unique().tolist() == [2**n - 1]
        assert result[3:].unique().tolist() == [0]


@pytest.mark.parametrize(("way", "steps", "share"), [("tree", 2 * 3, 1.0), ("ring", 2 * 7, 1 / 8)])
def test_a_tree_takes_few_steps_with_everything_and_a_ring_many_with_little(way: str, steps: int, share: float) -> None:
    def add_up(rank: int) -> None:
        getattr(collectives, f"{way}_all_reduce")(torch.ones(800))

    timeline = launch(add_up, 8, pace=Pace(link=Link(0.5, 3200))).timeline
    assert timeline.makespan == pytest.approx(steps * (0.5 + share), rel=1e-9)


def test_a_hierarchy_sends_the_bytes_of_a_ring_in_fewer_steps() -> None:
    def add_up(rank: int) -> None:
        across, inside = init_device_mesh("cpu", (2, 4)).get_all_groups()
        collectives.hierarchical_all_reduce(torch.ones(800), inside, across)

    timeline = launch(add_up, 8, pace=Pace(link=Link(0.5, 3200))).timeline
    assert timeline.makespan == pytest.approx(2 * 3 * (0.5 + 1 / 4) + 2 * (0.5 + 1 / 8), rel=1e-9)
    assert [timeline.bytes_sent(rank) for rank in range(8)] == [2 * 7 * 3200 // 8] * 8
