"""Memory and messages are counted exactly."""

from __future__ import annotations

import torch
import torch.distributed as dist

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


def test_the_fullest_moment_has_the_shapes_of_what_was_held() -> None:
    with Watch() as watch:
        for n in (2, 3, 1):
            held = [torch.zeros(n, 5), torch.zeros(7)]
            del held
    assert watch.fullest == [[3, 5], [7]]


def messages(rank: int) -> list[tuple[str, int, list[float]]]:
    tensor, arriving = torch.full((2,), float(rank)), torch.empty(2)
    with Watch() as watch:
        sending = dist.isend(tensor[:1], 1 - rank)
        dist.recv(arriving[:1], 1 - rank)
        assert sending is not None
        sending.wait()
        tensor += 10
    return [(sent.operation, sent.peer, sent.content.tolist()) for sent in watch.sent]


def test_messages_are_noted_as_they_left() -> None:
    assert launch(messages, 2).results == [[("send", 1, [0.0])], [("send", 0, [1.0])]]


def reduced(rank: int) -> tuple[list[tuple[str, int, float]], float]:
    tensor = torch.ones(3)
    with Watch() as watch:
        dist.all_reduce(tensor)
        dist.all_gather([torch.empty(3) for _ in range(2)], tensor)
    return [(sent.operation, sent.peer, float(sent.content.sum())) for sent in watch.sent], float(tensor[0])


def test_what_went_into_a_collective_is_noted_and_it_still_does_its_work() -> None:
    assert launch(reduced, 2).results == [([("allreduce", -1, 3.0), ("allgather", -1, 6.0)], 2.0)] * 2
