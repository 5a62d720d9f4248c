"""Memory and messages are counted exactly."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import launch
from course_lib.instruments.watch import Watch


def test_only_what_is_new_counts() -> None:
    tensor = torch.zeros(1000)
    with Watch() as watch:
        tensor += 1
        tensor[:10].mul_(2)
        tensor.split(100)
    assert watch.peak == 0


def test_a_copy_counts_its_bytes() -> None:
    tensor = torch.zeros(1000, dtype=torch.float64)
    with Watch() as watch:
        tensor[:100].clone()
    assert watch.peak == 800


def test_memory_that_was_given_back_counts_once() -> None:
    tensor = torch.zeros(1000)
    with Watch() as watch:
        for _ in range(10):
            del_me = tensor * 2
            del del_me
    assert watch.peak == 4000


def test_a_view_keeps_the_memory_of_its_tensor_alive() -> None:
    with Watch() as watch:
        view = torch.zeros(1000)[:1]
        other = torch.zeros(1000)
    assert watch.peak == 8000
    del view, other


def messages(rank: int) -> tuple[list[int], list[list[float]], bool, bool]:
    tensor, untouched = torch.full((2,), float(rank)), torch.zeros(2)
    arriving = torch.empty(2)
    with Watch() as watch:
        sending = dist.isend(tensor[:1], 1 - rank)
        dist.recv(arriving[:1], 1 - rank)
        assert sending is not None
        sending.wait()
        tensor += 10
    peers, contents = [sent.peer for sent in watch.sent], [sent.content.tolist() for sent in watch.sent]
    return peers, contents, watch.communicated(tensor), watch.communicated(untouched)


def test_messages_are_noted_as_they_left() -> None:
    first, second = launch(messages, 2).results
    assert first == ([1], [[0.0]], True, False)
    assert second == ([0], [[1.0]], True, False)


def reduced(rank: int) -> tuple[bool, bool, float]:
    tensor = torch.ones(3)
    copy: Tensor = tensor.clone()
    with Watch() as watch:
        dist.all_reduce(copy)
    return watch.communicated(copy), watch.communicated(tensor), float(copy[0])


def test_a_collective_is_seen_and_still_does_its_work() -> None:
    assert launch(reduced, 2).results == [(True, False, 2.0)] * 2
