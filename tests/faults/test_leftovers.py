"""A function that returns while something of it still runs: named, ended, and the next run is clean."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib import Deadlock, RankFailed, RunError, launch
from tests.faults.conftest import assert_gone, with_numbers


def assert_named(error, rank, *words):
    line = str(error).splitlines()[0]
    assert error.rank == rank and f"rank {rank}" in line.lower()
    for word in words:
        assert word in str(error), word


def test_a_thread_left_behind_is_named(fault):
    def leaves(rank):
        if rank == 1:
            threading.Thread(target=time.sleep, args=(60,), name="prefetcher").start()

    assert_named(fault.of(RankFailed, leaves), 1, "thread", "prefetcher")


def test_a_thread_that_was_joined_is_lawful():
    def joins(rank):
        thread = threading.Thread(target=time.sleep, args=(0.01,))
        thread.start()
        thread.join()
        return rank

    assert launch(joins, 2).results == [0, 1]


def test_daemon_threads_of_libraries_are_lawful():
    def starts(rank):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        x = torch.ones(3, requires_grad=True)
        (x * x).sum().backward()
        return rank

    assert launch(starts, 2).results == [0, 1]


def test_a_child_process_left_behind_is_named_and_ended(fault, tmp_path):
    note = tmp_path / "child"

    def leaves(rank):
        if rank == 0:
            child = subprocess.Popen(["sleep", "60"])
            note.write_text(str(child.pid))

    assert_named(fault.of(RankFailed, leaves), 0, "child process")
    assert_gone(with_numbers([int(note.read_text())]))


@pytest.mark.linux
def test_a_child_of_multiprocessing_left_behind_is_named(fault):
    def leaves(rank):
        import multiprocessing

        if rank == 0:
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)).start()

    assert_named(fault.of(RankFailed, leaves), 0, "process")


@pytest.mark.linux
def test_a_child_process_of_a_rank_that_raises_is_ended_too(fault, tmp_path):
    note = tmp_path / "child"

    def leaves(rank):
        note.write_text(str(subprocess.Popen(["sleep", "60"]).pid)) if rank == 0 else None
        dist.barrier()
        raise ValueError("and then this")

    fault.of(RankFailed, leaves)
    assert_gone(with_numbers([int(note.read_text())]))


def test_a_child_process_that_was_waited_for_is_lawful():
    def asks(rank):
        return subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout

    assert launch(asks, 2).results == ["42\n", "42\n"]


@pytest.mark.linux
def test_a_data_loader_with_workers_is_lawful():
    def loads(rank):
        numbers = torch.utils.data.TensorDataset(torch.arange(8))
        loader: Any = torch.utils.data.DataLoader(numbers, batch_size=4, num_workers=1)
        return [batch.tolist() for (batch,) in loader]

    assert launch(loads, 2).results == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2


def test_a_send_that_was_never_waited_for_nor_received_is_named(fault, row_at):
    def forgets(rank):
        if rank == 0:
            dist.isend(torch.zeros(6), 1)  # forgotten

    error = fault.of(RunError, forgets)
    assert isinstance(error, (RankFailed, Deadlock))
    assert_named(error, 0, "isend", "wait")
    row_at(error, 0, forgets, "forgotten")


def test_a_receive_that_was_never_waited_for_is_named(fault):
    def forgets(rank):
        if rank == 1:
            dist.irecv(torch.zeros(6), 0)

    assert_named(fault.of(RunError, forgets), 1, "irecv", "wait")


def test_a_collective_that_was_never_waited_for_is_named(fault):
    def forgets(rank):
        work = dist.all_reduce(torch.zeros(6), async_op=True)
        if rank == 0:
            work.wait()

    assert_named(fault.of(RunError, forgets), 1, "all_reduce", "wait")


def test_a_message_received_too_late_does_not_reach_the_next_run(fault):
    def sends_into_the_void(rank):
        if rank == 0:
            dist.isend(torch.full((1,), 666.0), 1)

    def next_run(rank):
        box = torch.zeros(1)
        dist.send(torch.full((1,), 1.0), 1) if rank == 0 else dist.recv(box, 0)
        return float(box)

    fault.of(RunError, sends_into_the_void)
    assert launch(next_run, 2).results == [0.0, 1.0]


def test_a_destroyed_process_group_does_not_spoil_the_next_run():
    def destroys(rank):
        dist.destroy_process_group()
        return rank

    def total(rank):
        value = torch.tensor(rank)
        dist.all_reduce(value)
        return int(value)

    assert launch(destroys, 3).results == [0, 1, 2]
    assert launch(total, 3).results == [3, 3, 3]


def test_settings_of_a_run_do_not_reach_the_next_one():
    def changes(rank):
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(99)
        torch.set_grad_enabled(False)
        torch.set_num_threads(3)

    def looks(rank):
        return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch.initial_seed()

    before = launch(looks, 2).results
    assert [each[:3] for each in before] == [(torch.float32, True, 1)] * 2
    launch(changes, 2)
    assert launch(looks, 2).results == before


def test_the_directory_and_environment_of_a_run_do_not_reach_the_next_one():
    def changes(rank):
        os.environ["LEFT_BEHIND"] = "yes"
        os.chdir("/")

    def looks(rank):
        return os.environ.get("LEFT_BEHIND"), os.getcwd()

    launch(changes, 2)
    assert launch(looks, 2).results == [(None, os.getcwd())] * 2
