"""A rank that never ends is ended at the time limit, and the error names its line."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from course_lib import RankTimeout
from course_lib.ranks.parent.pool import Pool

LIMIT = 1.5


def test_an_endless_python_loop_is_ended_at_its_line(fault, row_at):
    def spins(rank):
        while rank == 0:
            sum(range(1_000_000))  # spins

    error = fault.of(RankTimeout, spins, timeout=LIMIT)
    line = str(error).splitlines()[0]
    assert "rank 0" in line.lower() and "1.5" in line
    assert error.rank == 0
    row_at(error, 0, spins, "spins")


def test_the_time_limit_is_kept_and_not_undercut(fault):
    def sleeps(rank):
        time.sleep(60)

    begun = time.monotonic()
    error = fault.of(RankTimeout, sleeps, timeout=LIMIT)
    assert time.monotonic() - begun > LIMIT
    assert len(error.report.rows) == 2


def test_an_endless_operation_of_torch_is_ended_at_its_line(fault, row_at):
    def factorises(rank):
        torch.linalg.svd(torch.rand(4000, 4000))  # minutes

    error = fault.of(RankTimeout, factorises, timeout=LIMIT)
    row_at(error, 0, factorises, "minutes")


def test_an_endless_computation_that_holds_the_interpreter_is_ended_at_its_line(fault, row_at, judged_when):
    def powers(rank):
        if rank == 1:
            9 ** (10**8 + rank)  # holds
        dist.barrier()

    judged_when(lambda statuses: statuses[0].state == "waiting" and statuses[1].state == "computing")
    error = fault.of(RankTimeout, powers, timeout=LIMIT)
    assert error.rank == 1
    row_at(error, 1, powers, "holds")


def test_a_loop_that_swallows_every_exception_is_ended(fault):
    def stubborn(rank):
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(0.01)

    fault.of(RankTimeout, stubborn, timeout=LIMIT)


def test_a_loop_that_ignores_every_signal_is_ended(fault):
    def deaf(rank):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(0.01)

    fault.of(RankTimeout, deaf, timeout=LIMIT)


def test_a_loop_of_collectives_is_ended(fault):
    def endless(rank):
        while True:
            dist.all_reduce(torch.zeros(1))

    fault.of(RankTimeout, endless, 4, timeout=LIMIT)


def test_an_endless_wait_for_something_of_python_is_ended_at_its_line(fault, row_at):
    def waits(rank):
        threading.Event().wait()  # for ever

    row_at(fault.of(RankTimeout, waits, timeout=LIMIT), 1, waits, "for ever")


@pytest.mark.linux
def test_a_worker_that_was_stopped_from_outside_is_named(fault, row_at, judged_when):
    def freezes(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)  # stopped
        dist.barrier()

    judged_when(lambda statuses: statuses[0].state == "waiting" and statuses[1].state == "computing")
    error = fault.of(RankTimeout, freezes, timeout=LIMIT)
    assert error.rank == 1 and "rank 1" in str(error).splitlines()[0].lower()
    row_at(error, 1, freezes, "stopped")


def test_a_lock_that_is_never_freed_is_named_on_every_rank(fault, row_at):
    def locks(rank):
        lock = threading.Lock()
        with lock, lock:  # for ever
            pass

    error = fault.of(RankTimeout, locks, 4, timeout=LIMIT)
    for rank in range(4):
        row_at(error, rank, locks, "for ever")


def test_a_rank_that_is_held_up_has_time_to_say_where_it_is(fault, row_at, monkeypatch):
    def spins(rank):
        while True:
            sum(range(1_000_000))  # spins

    looks, log = itertools.count(), Pool.log
    monkeypatch.setattr(Pool, "log", lambda pool, rank: log(pool, rank) if next(looks) > 200 else "")
    row_at(fault.of(RankTimeout, spins, timeout=LIMIT), 0, spins, "spins")
