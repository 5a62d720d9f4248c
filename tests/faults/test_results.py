"""Values that cannot be sent between processes: the error names the rank, the value and what would work."""

from __future__ import annotations

import os

import pytest
import torch

from course_lib import RankFailed, launch


def a_lock(rank):
    import threading

    return {"state": threading.Lock()}


def an_open_file(rank):
    return open(os.devnull, "w")


def a_generator(rank):
    return (n for n in range(3))


def a_socket(rank):
    import socket

    return socket.socket()


def a_running_thread(rank):
    import threading

    return threading.current_thread()


def one_that_refuses(rank):
    class Refuses:
        def __reduce__(self):
            raise RuntimeError("I stay here")

    return Refuses()


@pytest.mark.parametrize(
    "result, word",
    [
        (a_lock, "lock"),
        (an_open_file, "TextIOWrapper"),
        (a_generator, "generator"),
        (a_socket, "socket"),
        (a_running_thread, "Thread"),
        (one_that_refuses, "Refuses"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_result_that_cannot_be_pickled_is_named(fault, result, word):
    def only_one(rank):
        return result(rank) if rank == 1 else rank

    error = fault.of(RankFailed, only_one)
    line = str(error).splitlines()[0]
    assert error.rank == 1 and "rank 1" in line.lower() and "return" in line
    assert word in str(error)


def test_a_result_that_cannot_be_unpickled_here_is_named(fault):
    def traps(rank):
        class Trap:
            def __reduce__(self):
                return int, ("no number",)

        return Trap() if rank == 1 else rank

    error = fault.of(RankFailed, traps)
    assert error.rank == 1 and "return" in str(error).splitlines()[0]


def test_a_result_of_a_gigabyte_is_refused_with_its_size_the_limit_and_a_way_out(fault):
    def huge(rank):
        return torch.zeros(2**28) if rank == 1 else rank

    error = fault.of(RankFailed, huge, within=5.0)
    text = str(error)
    assert error.rank == 1 and "rank 1" in text.splitlines()[0].lower()
    assert "1.0 GB" in text or "1.1 GB" in text or "1.07 GB" in text or "1 GB" in text or "1024 MB" in text
    assert "limit" in text or "at most" in text
    assert "save" in text or "smaller" in text or "summary" in text


def test_a_small_view_of_a_huge_tensor_is_no_huge_result():
    def view(rank):
        return torch.zeros(2**27)[:3]

    assert [each.tolist() for each in launch(view, 2).results] == [[0.0, 0.0, 0.0]] * 2


def test_ten_megabytes_from_each_rank_are_lawful():
    results = launch(lambda rank: torch.full((2_500_000,), float(rank)), 4).results
    assert [float(each.mean()) for each in results] == [0.0, 1.0, 2.0, 3.0]


def test_results_that_need_gradients_come_back():
    def gradients(rank):
        weight = torch.ones(2, requires_grad=True)
        return weight * 2, torch.nn.Parameter(torch.ones(1))

    product, parameter = launch(gradients, 2).results[0]
    assert product.tolist() == [2.0, 2.0] and parameter.requires_grad


def not_to_be_pickled():
    import threading

    return threading.Lock()


def test_an_argument_that_cannot_be_pickled_is_named():
    with pytest.raises((TypeError, ValueError, RankFailed)) as caught:
        launch(lambda rank, n, lock: rank, 2, args=(1, not_to_be_pickled()))
    text = str(caught.value)
    assert "an argument" in text and "lock" in text
    assert launch(lambda rank: rank, 2).results == [0, 1]


def test_an_argument_that_is_a_generator_is_named():
    with pytest.raises((TypeError, ValueError, RankFailed), match="generator"):
        launch(lambda rank, batches: rank, 2, args=((n for n in range(3)),))


def test_an_argument_that_cannot_be_unpickled_there_is_named(fault):
    class Trap:
        def __reduce__(self):
            return int, ("no number",)

    error = fault.of(RankFailed, lambda rank, trap: rank, args=(Trap(),))
    assert "argument" in str(error) or "args" in str(error)


@pytest.mark.linux
def test_an_argument_that_never_ends_unpickling_meets_the_time_limit(fault):
    from course_lib import RankTimeout

    class Slow:
        def __reduce__(self):
            import time

            return time.sleep, (60,)

    fault.of(RankTimeout, lambda rank, slow: rank, args=(Slow(),), timeout=1.5)


def test_a_function_that_closes_over_what_cannot_be_pickled_is_told_so():
    guard = not_to_be_pickled()

    def guarded(rank):
        with guard:
            return rank

    with pytest.raises((TypeError, ValueError, RankFailed)) as caught:
        launch(guarded, 2)
    assert "else that it uses" in str(caught.value) and "lock" in str(caught.value)
    assert launch(lambda rank: rank, 2).results == [0, 1]


def test_a_huge_argument_arrives():
    data = torch.ones(25_000_000)
    assert launch(lambda rank, data: int(data.sum()), 2, args=(data,)).results == [25_000_000] * 2
