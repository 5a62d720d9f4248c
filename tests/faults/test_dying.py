"""A dead worker: the message names its rank, not its neighbours, and says in words what killed it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from course_lib import NotConnected, Pace, RankDied, launch
from course_lib.ranks.diagnosis.endings import explain_death
from course_lib.ranks.diagnosis.status import RankStatus
from course_lib.ranks.messages import Place, World
from course_lib.ranks.parent import pool
from course_lib.ranks.parent.monitor import RunMonitor
from tests.faults.conftest import others_wait


def exits_at_once(rank):
    os._exit(3)


def exits(rank):
    sys.exit(3)


def kills_itself(rank):
    os.kill(os.getpid(), signal.SIGKILL)


def follows_a_null_pointer(rank):
    ctypes.string_at(0)


def aborts(rank):
    os.abort()


def terminates_itself(rank):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)


ENDS = [
    (exits_at_once, ("exit", "3")),
    (exits, ("exit", "3")),
    (kills_itself, ("killed",)),
    (follows_a_null_pointer, ("segmentation fault",)),
    (aborts, ("abort",)),
    (terminates_itself, ("sigterm",)),
]


@pytest.mark.linux
@pytest.mark.parametrize("end, words", ENDS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_rank_that_dies_while_the_others_wait_is_named_with_the_reason(fault, end, words):
    def one_dies(rank):
        if rank == 1:
            others_wait(rank, "all_reduce")
            end(rank)
        dist.all_reduce(torch.zeros(4))

    error = fault.of(RankDied, one_dies, 3)
    line = str(error).splitlines()[0].lower()
    assert error.rank == 1 and "rank 1" in line
    for word in words:
        assert word in line
    assert [row.operation for row in error.report.rows if row.rank != 1] == ["all_reduce"] * 2


def test_a_death_that_is_noticed_after_what_it_did_to_others_is_told_all_the_same(fault, monkeypatch):
    """On a busy machine the others fail first: their connections are closed before the process has quite ended."""

    def one_dies(rank):
        if rank == 1:
            others_wait(rank, "all_reduce")
            os._exit(3)
        dist.all_reduce(torch.zeros(4))

    def notice_late(monitor, rank):
        if monitor.since_failure and monitor.since_failure.seconds > 2.5:
            notice(monitor, rank)

    notice = RunMonitor._note_death
    monkeypatch.setattr(RunMonitor, "_note_death", notice_late)
    assert fault.of(RankDied, one_dies, 3).rank == 1


def test_a_rank_that_dies_in_the_middle_of_traffic_is_named_and_not_its_neighbours(fault):
    def dies_in_the_middle(rank):
        for step in range(10_000):
            if rank == 2 and step == 20:
                os._exit(7)
            dist.all_reduce(torch.zeros(10_000))

    error = fault.of(RankDied, dies_in_the_middle, 4)
    assert error.rank == 2 and "rank 2" in str(error).splitlines()[0].lower()


def test_all_ranks_that_die_are_told(fault):
    def all_die(rank):
        os._exit(1)

    fault.of(RankDied, all_die, 4)


def test_the_line_of_a_rank_that_died_in_an_operation_is_kept(fault, row_at):
    def dies(rank):
        data = torch.zeros(3)
        if rank == 0:
            dist.recv(data, 1)  # waits
        others_wait(rank, "recv")
        os._exit(3)

    row = row_at(fault.of(RankDied, dies), 0, dies, "waits")
    assert (row.operation, row.peer) == ("recv", "1")


@pytest.mark.linux
def test_a_worker_that_dies_between_two_runs_is_not_missed(kill):
    pids = launch(lambda rank: os.getpid(), 2).results
    kill(psutil.Process(pids[1]))
    assert launch(lambda rank: rank, 2).results == [0, 1]


@pytest.mark.linux
def test_a_fork_server_that_dies_between_two_runs_is_not_missed(kill):
    pid = launch(lambda rank: os.getpid(), 2).results[0]
    server = psutil.Process(pid).parent()
    assert server is not None
    kill(server)
    assert launch(lambda rank: rank, 2).results == [0, 1]
    assert launch(lambda rank: rank, 3).results == [0, 1, 2]


@pytest.mark.linux
@pytest.mark.parametrize("pace", [None, Pace()])
def test_a_rank_that_cannot_connect_gets_new_workers_and_the_function_runs_once(tmp_path, pace):
    def total(rank):
        with open(tmp_path / f"rank-{rank}", "a") as begun:
            begun.write("once ")
        dist.all_reduce(value := torch.tensor(rank + 1))
        return os.getpid(), int(value)

    first = launch(lambda rank: os.getpid(), 3).results
    psutil.Process(first[1]).rlimit(psutil.RLIMIT_NOFILE, (8, 8))  # no new connection
    pids, values = zip(*launch(total, 4, pace=pace).results, strict=True)
    assert values == (10,) * 4 and not set(pids) & set(first)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["once "] * 4


def test_ranks_that_cannot_connect_twice_are_told_with_the_reason(monkeypatch, tmp_path):
    no_file = SimpleNamespace(World=lambda size, _: World(size, str(tmp_path)), Place=Place)
    monkeypatch.setattr(pool, "messages", no_file)  # ranks meet in a file
    with pytest.raises(NotConnected, match="could not connect to the others before the function began") as caught:
        launch(lambda rank: rank, 2)
    assert "Is a directory" in str(caught.value)
    monkeypatch.undo()
    assert launch(lambda rank: rank, 2).results == [0, 1]


GREEDY = """
import os
from course_lib import RankDied, launch
def good(rank):
    import torch, torch.distributed as dist
    t = torch.tensor(rank + 1); dist.all_reduce(t); return int(t)
def greedy(rank):
    import torch.distributed as dist
    held = []
    while rank == 1:
        held.append(bytearray(os.urandom(1)) * 20_000_000)
    dist.barrier()
print(launch(good, 2).results)
try:
    launch(greedy, 2)
except RankDied as error:
    print(error.rank, str(error).splitlines()[0])
print(launch(good, 2).results)
"""


@pytest.mark.linux
def test_a_worker_killed_for_its_memory_is_named_and_the_kernel_lives(tmp_path):
    with memory_limit(900_000_000) as enter:
        done = subprocess.run(
            [sys.executable, "-c", GREEDY], preexec_fn=enter, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 0, done.stderr
    before, told, after = done.stdout.splitlines()
    assert before == after == "[3, 3]"
    assert told.startswith("1 ") and "memory" in told


@contextlib.contextmanager
def memory_limit(size: int) -> Iterator[Callable[[], None]]:
    """A control group below this process's own, with a limit on memory; yields the function that enters it."""
    place, knob = own_memory_group()

    def enter() -> None:
        (place / "cgroup.procs").write_text(str(os.getpid()))

    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"no control group with a memory limit can be made here ({error.strerror})")
    try:
        (place / knob).write_text(str(size))
        yield enter
    finally:
        remove_group(place)


def remove_group(place: Path) -> None:
    """Remove a group once its last process has ended; the kernel takes a moment to notice."""
    for _ in range(100):
        try:
            place.rmdir()
            return
        except OSError:
            time.sleep(0.05)


def own_memory_group() -> tuple[Path, str]:
    """The folder for a control group of a test, and the name of its limit (versions 1 and 2 differ)."""
    name = f"course-test-{uuid.uuid4().hex[:8]}"
    for entry in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = entry.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/") / name, "memory.limit_in_bytes"
        if number == "0":
            unified = Path("/sys/fs/cgroup") / path.lstrip("/")
    # version 2 allows no processes beside groups, so the new one stands next to this process's own
    return unified.parent / name, "memory.max"


def test_a_death_is_told_where_the_system_has_fewer_signals(monkeypatch):
    """On Windows, a process that somebody ends has the code of SIGTERM."""
    monkeypatch.delattr(signal, "SIGKILL")
    error = explain_death(RankStatus(1, "died", exit_code=-signal.SIGTERM))
    assert error.message == "Rank 1 was asked to end (SIGTERM)."
