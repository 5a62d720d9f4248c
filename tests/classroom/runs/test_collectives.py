"""Messages of collectives, piece by piece, against the definition of each collective."""

from __future__ import annotations

import math

import pytest

from course_lib.classroom.runs.collectives import run_collective
from course_lib.figures.exchange import Sum

EVERYONE = (0, 1, 2, 3)


def at_the_end(sums: list[Sum], rank: int) -> dict[int, tuple[int, ...]]:
    return {one.piece: one.members for one in sums if one.source == one.target == rank and one.end == math.inf}


def on_the_way(sums: list[Sum]) -> list[Sum]:
    return [one for one in sums if one.source != one.target]


@pytest.mark.parametrize("way", ["ring all-reduce", "tree all-reduce", "hierarchical all-reduce"])
def test_after_an_all_reduce_everyone_has_the_sum_of_all(way: str) -> None:
    _, sums = run_collective(way, 4)
    for rank in range(4):
        assert at_the_end(sums, rank) == dict.fromkeys(range(4), EVERYONE)


def test_after_a_reduce_scatter_each_rank_has_one_complete_piece_its_own() -> None:
    _, sums = run_collective("ring reduce-scatter", 4)
    for rank in range(4):
        complete = [piece for piece, members in at_the_end(sums, rank).items() if members == EVERYONE]
        assert complete == [rank]


@pytest.mark.parametrize(("way", "source"), [("ring all-gather", None), ("tree broadcast", 0)])
def test_after_an_all_gather_or_a_broadcast_everyone_has_each_piece_as_it_was(way: str, source: int | None) -> None:
    _, sums = run_collective(way, 5)
    for rank in range(5):
        assert at_the_end(sums, rank) == {n: (n if source is None else source,) for n in range(5)}


def test_in_a_ring_each_message_is_one_piece_for_the_neighbor_and_arrives_in_the_sum() -> None:
    timeline, sums = run_collective("ring reduce-scatter", 4)
    sent = on_the_way(sums)
    assert len(sent) == 4 * 3
    assert timeline.makespan == pytest.approx(3 * 0.002)
    for message in sent:
        assert message.target == (message.source + 1) % 4
        (arrived,) = (
            one
            for one in sums
            if one.source == one.target == message.target and (one.piece, one.start) == (message.piece, message.end)
        )
        assert set(arrived.members) == {*message.members, message.target}


def test_in_a_tree_each_message_is_the_whole_tensor() -> None:
    timeline, sums = run_collective("tree all-reduce", 4)
    pairs = [(one.source, one.target) for one in on_the_way(sums) if one.piece == 0]
    assert sorted(pairs) == [(0, 1), (0, 2), (1, 0), (2, 0), (2, 3), (3, 2)]
    assert len(on_the_way(sums)) == 4 * len(pairs)
    assert timeline.makespan == pytest.approx(2 * 2 * 0.005)


def test_a_hierarchy_crosses_between_machines_with_a_rank_s_share_only() -> None:
    _, sums = run_collective("hierarchical all-reduce", 4)
    across = [one for one in on_the_way(sums) if one.source // 2 != one.target // 2]
    assert len(across) == 2 * 4  # two rings of two ranks, each with two of the four pieces
    assert all(abs(one.source - one.target) == 2 for one in across)
