"""An exception on a rank: the other ranks are ended, and the error names the rank, the exception and the line."""

from __future__ import annotations

import asyncio
import gc
import sys
import time

import pytest
import torch
import torch.distributed as dist

from course_lib import Mismatch, RankDied, RankFailed, RankTimeout, RunError, launch
from tests.faults.conftest import others_wait


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_raises_is_named_while_the_others_wait_in_a_collective(fault, row_at, world_size):
    def one_raises(rank):
        if rank == 1:
            others_wait(rank, "all_reduce")
            raise ValueError("the batch is empty")  # raises
        dist.all_reduce(torch.zeros(3, 5))  # waits

    error = fault.of(RankFailed, one_raises, world_size)
    line = str(error).splitlines()[0]
    assert "rank 1" in line.lower() and "ValueError" in line and "the batch is empty" in line
    assert error.rank == 1
    assert "raise" in row_at(error, 1, one_raises, "raises").state
    waiting = row_at(error, 0, one_raises, "waits")
    assert waiting.operation == "all_reduce" and "3x5" in waiting.shape
    assert waiting.seconds >= 0


def test_two_ranks_that_raise_different_things_are_both_named(fault, judged_when):
    def two_raise(rank):
        if rank == 0:
            raise KeyError("weight")
        if rank == 2:
            raise ZeroDivisionError("no samples")
        dist.barrier()

    judged_when(lambda statuses: statuses[0].has_ended and statuses[2].has_ended)
    error = fault.of(RankFailed, two_raise, 3)
    assert error.rank in (0, 2)
    for word in ("KeyError", "ZeroDivisionError", "weight", "no samples"):
        assert word in str(error)
    line = str(error).splitlines()[0].lower()
    assert "0" in line and "2" in line


def test_a_function_that_takes_no_rank_is_told_how_it_is_called():
    def without_rank():
        raise AssertionError("never called")

    with pytest.raises(RankFailed, match=r"takes 0 .* but 1 was given \(in the call fn\(rank, \*args\)\)\."):
        launch(without_rank, 2)


def test_all_ranks_that_raise_the_same_say_it_once(fault):
    def all_raise(rank):
        raise ValueError("every rank has this slip")

    error = fault.of(RankFailed, all_raise, 8)
    line = str(error).splitlines()[0]
    assert line.count("Error: every rank has this slip") == 1


def test_the_traceback_shows_the_students_code(fault):
    def inner():
        return [].pop()

    def outer(rank):
        return inner()

    text = str(fault.of(RankFailed, outer))
    assert "in inner" in text and "return [].pop()" in text


def test_the_rank_that_raised_is_named_and_not_the_neighbour_whose_connection_it_broke(fault):
    def leaves_in_the_middle(rank):
        dist.all_reduce(torch.zeros(1))
        if rank == 3:
            raise RuntimeError("mine")
        while True:
            dist.all_reduce(torch.zeros(1000))

    error = fault.of(RankFailed, leaves_in_the_middle, 4)
    assert error.rank == 3 and "mine" in str(error).splitlines()[0]


def test_a_rank_that_fails_inside_an_operation_of_torch_is_reported(fault, row_at):
    def wrong_shapes(rank):
        a = torch.zeros(2, 3)
        return a @ a  # slip

    error = fault.of(RankFailed, wrong_shapes)
    row_at(error, error.rank, wrong_shapes, "slip")
    assert "RuntimeError" in str(error)


def raise_needs_two(rank):
    class NeedsTwoHere(Exception):
        def __init__(self, what, why):
            super().__init__(f"{what}: {why}")

    raise NeedsTwoHere("a model", "no layers")


def raise_unpicklable(rank):
    class StaysHere(Exception):
        def __reduce__(self):
            raise TypeError("not me")

    raise StaysHere("holds a socket")


def raise_unshowable(rank):
    class Unshowable(Exception):
        def __str__(self):
            raise ValueError("no words")

    raise Unshowable


def raise_holding_a_lock(rank):
    import threading

    error = ValueError("holds a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def raise_cancelled(rank):
    raise asyncio.CancelledError("given up")


def raise_interrupt(rank):
    raise KeyboardInterrupt


def recurse(rank):
    return recurse(rank)


def raise_without_words(rank):
    raise ValueError


def assert_without_words(rank):
    assert rank == 5


@pytest.mark.parametrize(
    "mistake, word",
    [
        (raise_needs_two, "NeedsTwoHere"),
        (raise_unpicklable, "StaysHere"),
        (raise_unshowable, "Unshowable"),
        (raise_holding_a_lock, "holds a lock"),
        (raise_cancelled, "CancelledError"),
        (raise_interrupt, "KeyboardInterrupt"),
        (recurse, "RecursionError"),
        (raise_without_words, "ValueError"),
        (assert_without_words, "AssertionError"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_exception_comes_back_whatever_its_class_is_like(fault, mistake, word):
    assert word in str(fault.of(RankFailed, mistake))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_an_exception_group_comes_back(fault):
    def raise_group(rank):
        raise ExceptionGroup("several", [ValueError("one of them"), KeyError("another")])  # noqa: F821

    assert "one of them" in str(fault.of(RankFailed, raise_group))


def test_a_huge_message_is_cut(fault):
    def raise_a_book(rank):
        raise ValueError("word " * 2_000_000)

    text = str(fault.of(RankFailed, raise_a_book))
    assert "ValueError" in text.splitlines()[0]
    assert len(text) < 50_000


def test_what_was_printed_before_the_mistake_is_not_lost(fault, capsys):
    def prints_and_raises(rank):
        print("the loss is", 4711 + rank)
        dist.barrier()
        raise ValueError("then this")

    fault.of(RankFailed, prints_and_raises)
    shown = capsys.readouterr().out
    assert "the loss is 4711" in shown and "the loss is 4712" in shown


def test_a_rank_that_prints_without_end_is_stopped_and_its_output_capped(fault, capsys):
    def chatters(rank):
        while True:
            print("x" * 1000)

    fault.of(RunError, chatters, timeout=1.5)
    assert len(capsys.readouterr().out) < 20_000_000


def test_a_line_that_was_begun_is_not_lost_when_the_time_is_up(fault, capsys):
    def shows_progress(rank):
        print("half of it", end="")
        time.sleep(60)

    fault.of(RankTimeout, shows_progress, timeout=1.0)
    assert "half of it" in capsys.readouterr().out


def test_the_function_being_given_too_few_parameters_is_said_plainly():
    with pytest.raises((TypeError, RankFailed), match="rank"):
        launch(lambda: 1, 2)
    with pytest.raises((TypeError, RankFailed), match="argument"):
        launch(lambda rank, a, b: 1, 2, args=(1,))


def test_a_launch_inside_a_rank_is_refused_plainly(fault):
    def nests(rank):
        from course_lib import launch

        launch(lambda rank: rank, 2)

    line = str(fault.of(RankFailed, nests)).splitlines()[0]
    assert "launch" in line and "rank" in line


def test_arguments_of_the_kernel_are_not_changed_by_ranks_that_fail(fault):
    weights, names = torch.zeros(1000), ["a"]

    def scribbles(rank, weights, names):
        weights += 1
        names.append("b")
        raise ValueError("after the fact")

    fault.of(RankFailed, scribbles, args=(weights, names))
    assert torch.equal(weights, torch.zeros(1000)) and names == ["a"]


def test_ten_mistakes_in_a_row_do_not_use_up_file_descriptors(fault):
    import psutil

    def raises(rank):
        raise ValueError("again")

    def dies(rank):
        import os

        os._exit(1)

    def open_files():
        gc.collect()  # earlier errors hold the variables of their frames
        return psutil.Process().num_fds() if hasattr(psutil.Process, "num_fds") else 0

    fault.of(RankFailed, raises)
    fault.of(RankDied, dies)
    before = open_files()
    for _ in range(5):
        fault.of(RankFailed, raises)
        fault.of(RankDied, dies)
        assert open_files() <= before


def test_a_rank_that_raises_is_reported_though_another_computes_on(fault, judged_when):
    def one_raises(rank):
        if rank == 0:
            raise ValueError("at once")
        time.sleep(60)

    judged_when(lambda statuses: statuses[1].state == "computing")
    error = fault.of(RankFailed, one_raises)
    assert error.rank == 0 and error.report.rows[1].state == "computing"


def test_a_rank_that_raises_late_is_reported_when_it_does(fault):
    def raises_late(rank):
        if rank == 0:
            time.sleep(2)
            raise ValueError("late")
        dist.barrier()

    assert "late" in str(fault.of(RankFailed, raises_late, within=5.0)).splitlines()[0]


def test_an_exception_that_a_finally_holds_up_is_what_is_told(fault, row_at):
    def hides(rank):
        try:
            if rank == 1:
                raise ValueError("bad batch")  # raises
            dist.all_reduce(torch.zeros(1))
        finally:
            dist.barrier()  # meets nobody

    error = fault.of(RankFailed, hides)
    line = str(error).splitlines()[0]
    assert line.startswith("Rank 1 raised ValueError: bad batch (test_raising.py, line ") and "barrier" in line
    assert error.rank == 1 and isinstance(error.__cause__, ValueError) and "all_reduce" in line
    row_at(error, 1, hides, "meets nobody")


def test_an_exception_whose_finally_waits_for_those_who_wait_for_its_rank_is_told(fault):
    def hides(rank):
        try:
            dist.recv(torch.zeros(1), 1) if rank == 0 else [].pop()
        finally:
            dist.barrier()

    line = str(fault.of(RankFailed, hides)).splitlines()[0]
    assert "Rank 1 raised IndexError: pop from empty list" in line and "0 waits to receive from 1" in line


def test_an_exception_that_every_rank_handles_explains_nothing(fault):
    def falls_back(rank):
        try:
            __import__("no_such_module")
        except ImportError:
            dist.all_reduce(torch.zeros(1)) if rank else dist.barrier()

    assert "ImportError" not in str(fault.of(Mismatch, falls_back))
    assert "no_such_module" not in str(fault.of(Mismatch, falls_back)).splitlines()[0]
