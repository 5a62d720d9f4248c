"""Inputs and outputs of a launch: any function, any arguments, results and prints by rank."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from course_lib import Link, Pace, RankFailed, launch
from course_lib.ranks import discard_all, prepare, renew
from course_lib.ranks.parent import pool
from course_lib.ranks.parent.fork_server import SHARED
from course_lib.timeline import compute

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as if defined in a notebook cell

FORKS = sys.platform == "linux"


@dataclasses.dataclass
class Shares:
    """A class of the student's own, which exists nowhere but here."""

    of: list[int]

    def total(self) -> int:
        return sum(self.of)


def total(rank: int) -> int:
    value = torch.tensor(rank + 1)
    dist.all_reduce(value)
    return int(value)


def script(program: str, *, folder: Path, **environment: str) -> str:
    """The output of a program that a student would start with python; the code is in its __main__."""
    path = folder / "student.py"
    path.write_text(program, encoding="utf-8")
    # Not the course's own folder: the package has to be installed, as it is for a student.
    variables = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, path], env=variables, cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# Sizes


@pytest.mark.parametrize("world_size", [1, 2, 3, 32])
def test_a_function_runs_on_every_rank_of_any_world_size(world_size: int) -> None:
    run = launch(total, world_size)
    assert run.results == [world_size * (world_size + 1) // 2] * world_size
    assert len(run.stdout) == run.world_size == world_size


def test_a_rank_knows_itself_as_torchrun_would_say_it() -> None:
    def who(rank: int) -> tuple[Any, ...]:
        return rank, dist.get_rank(), dist.get_world_size(), os.environ["RANK"], os.environ["WORLD_SIZE"]

    assert launch(who, 3).results == [(r, r, 3, str(r), "3") for r in range(3)]


# Functions


config = Shares([1, 2])


def test_a_function_may_use_names_that_torch_has_modules_of() -> None:
    def meets_and_adds(rank: int) -> int:
        dist.barrier()
        return config.total()

    assert "torch.distributed.config" in sys.modules
    assert launch(meets_and_adds, 2).results == [3, 3]


def test_a_closure_sees_what_has_changed_since_the_last_run() -> None:
    factor, history = 2, [1]

    def scaled(rank: int) -> tuple[int, list[int]]:
        return factor * rank, history

    assert launch(scaled, 2).results == [(0, [1]), (2, [1])]
    factor = 5
    history.append(2)
    assert launch(scaled, 2).results == [(0, [1, 2]), (5, [1, 2])]


def test_a_rank_works_on_its_own_copy() -> None:
    weights = torch.zeros(2)

    def change(rank: int) -> torch.Tensor:
        weights.add_(rank + 1)
        return weights

    assert [result.tolist() for result in launch(change, 2).results] == [[1.0, 1.0], [2.0, 2.0]]
    assert weights.tolist() == [0.0, 0.0]


def test_ranks_work_in_the_folder_and_environment_of_the_notebook(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch(total, 2)  # so that the ranks were there before the change
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STUDENT", "Ada")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_module.py").write_text("ANSWER = 42\n", encoding="utf-8")

    def surroundings(rank: int) -> tuple[str, str, int]:
        import own_module  # type: ignore[import-not-found]

        return os.getcwd(), os.environ["STUDENT"], own_module.ANSWER

    assert launch(surroundings, 2).results == [(str(tmp_path), "Ada", 42)] * 2


# Arguments and results

NESTED: dict[Any, Any] = {"shape": (2, 3), "names": ["a", "b"], 3: {1, 2}, "nothing": None, "number": 1.5}


@pytest.mark.parametrize(
    "value", [0, "text", None, b"bytes", (1, 2), NESTED, 2 + 1j, float("inf"), range(3), Shares([1, 2])]
)
def test_a_value_goes_there_and_back(value: Any) -> None:
    run = launch(lambda rank, given: (rank, given), 2, (value,))
    assert run.results == [(0, value), (1, value)]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4, dtype=torch.float64),
        torch.randn(3, 4).T[1:],
        torch.randn(8).bfloat16(),
        torch.arange(3),
        torch.tensor([True]),
        torch.tensor(1.0),
        torch.zeros(0, 2),
        torch.randn(2, requires_grad=True),
    ],
)
def test_a_tensor_goes_there_and_back_bit_by_bit(tensor: torch.Tensor) -> None:
    for back in launch(lambda rank, given: given, 2, (tensor,)).results:
        assert torch.equal(back, tensor)
        assert (back.dtype, back.requires_grad) == (tensor.dtype, tensor.requires_grad)


# Randomness


def draws(rank: int) -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), np.random.rand()


def test_every_rank_is_seeded_differently_and_every_run_alike() -> None:
    first, second = launch(draws, 4), launch(draws, 4)
    assert first.results == second.results
    for source in zip(*first.results, strict=True):
        assert len(set(source)) == 4


def test_what_a_run_changes_in_torch_is_undone_for_the_next() -> None:
    def change(rank: int) -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_num_threads(2)

    def look(rank: int) -> tuple[Any, ...]:
        return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()

    launch(change, 2)
    assert launch(look, 2).results == [(torch.float32, True, 1)] * 2


# Prints


def test_prints_come_back_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def talk(rank: int) -> None:
        print("I am", rank)
        print("no line end", end="")
        sys.stderr.write("!")

    run = launch(talk, 2)
    assert run.stdout == ["I am 0\nno line end!", "I am 1\nno line end!"]
    shown = capsys.readouterr().out.splitlines()
    assert sorted(shown) == ["rank 0 | I am 0", "rank 0 | no line end!", "rank 1 | I am 1", "rank 1 | no line end!"]


def test_a_print_shows_while_its_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = tmp_path / "seen"

    class Screen:
        def write(self, text: str) -> None:
            if "hello" in text:
                seen.touch()

        def flush(self) -> None: ...

    def greet_and_wait(rank: int) -> bool:
        import time

        print("hello")
        deadline = time.monotonic() + 30
        while not seen.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return seen.exists()

    monkeypatch.setattr(sys, "stdout", Screen())
    assert launch(greet_and_wait, 1).results == [True]


def test_what_a_rank_prints_before_it_fails_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def speak_and_fail(rank: int) -> None:
        print("last words")
        raise ValueError

    with pytest.raises(RankFailed):
        launch(speak_and_fail, 1)
    assert capsys.readouterr().out == "rank 0 | last words\n"


# Processes


@pytest.mark.skipif(not FORKS, reason="only forked workers start with everything imported")
def test_a_fresh_worker_has_imported_what_it_will_need_and_looks_for_no_garbage_in_it(tmp_path: Path) -> None:
    program = """
import gc, sys
from course_lib.preloading import preload

WANTED = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.optim.adamw"]
WANTED += ["course_lib.model", "course_lib.data", "course_lib.mechanisms.data_parallel", "torch.distributed.checkpoint"]
preload(WANTED[-1])  # before the fork server starts, which the next line does
from course_lib import launch

def state(rank):
    looks_at_little = len(gc.get_objects()) < gc.get_freeze_count() / 100
    return [name for name in WANTED if name not in sys.modules], looks_at_little, gc.isenabled()

print(launch(state, 2).results)
"""
    assert script(program, folder=tmp_path) == f"{[([], True, True)] * 2}\n"


@pytest.mark.skipif(not FORKS, reason="only forked workers have a fork server")
def test_another_process_and_its_children_may_use_our_fork_server(tmp_path: Path) -> None:
    program = """
import multiprocessing, os
from concurrent.futures import ProcessPoolExecutor
from course_lib import launch

def parents(_):
    return launch(lambda rank: os.getppid(), 2).results

if __name__ == "__main__":
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        print(parents(0) + pool.submit(parents, 0).result())
"""
    ours = launch(lambda rank: os.getppid(), 1).results
    server: Any = forkserver._forkserver
    assert script(program, folder=tmp_path, **{SHARED: server._forkserver_address}) == f"{ours * 4}\n"


def test_ranks_are_processes_of_their_own_and_stay_for_the_next_run() -> None:
    def process(rank: int) -> int:
        return os.getpid()

    first, second = launch(process, 2).results, launch(process, 2).results
    assert first == second
    assert len({os.getpid(), *first}) == 3


def test_a_thread_of_gloo_that_asks_which_one_it_is_is_nothing_that_a_run_has_left() -> None:
    """Any library that writes a log asks for the thread."""

    def log(rank: int) -> int:
        work: Any = dist.all_reduce(torch.ones(1), async_op=True)
        work.get_future().then(lambda _: threading.current_thread().name).wait()
        work.wait()
        return os.getpid()

    assert launch(log, 2).results == launch(log, 2).results


def test_runs_of_up_to_eight_ranks_share_their_processes() -> None:
    def process(rank: int) -> int:
        return os.getpid()

    discard_all()
    two, eight, five = (launch(process, n).results for n in (2, 8, 5))
    assert eight[:2] == two
    assert eight[:5] == five
    launch(process, 9)
    assert not any(map(psutil.pid_exists, eight))


@pytest.mark.parametrize("pace", [None, Pace({"forward": 1.0}, Link(0.5))])
def test_ranks_that_ran_in_another_number_know_their_new_one(pace: Pace | None) -> None:
    def who(rank: int) -> tuple[Any, ...]:
        with compute("forward", work=rank):
            pass
        value = torch.tensor(rank + 1)
        dist.all_reduce(value)
        half = dist.new_group(range(dist.get_world_size() // 2, dist.get_world_size()))
        if rank >= dist.get_world_size() // 2:
            dist.all_reduce(value, group=half)
            dist.destroy_process_group(half)
        return dist.get_world_size(), os.environ["WORLD_SIZE"], int(value)

    discard_all()
    for n in (4, 2, 5, 4, 4, 1, 5, 2):
        sum_of_all = n * (n + 1) // 2
        run = launch(who, n, pace=pace)
        assert run.results == [(n, str(n), sum_of_all * (1 if rank < n // 2 else n - n // 2)) for rank in range(n)]
        if pace:
            assert run.timeline.makespan == pytest.approx(n - 1 + sum(2 * 0.5 * (size - 1) for size in (n, n - n // 2)))


def test_after_a_failure_all_ranks_are_new() -> None:
    def process(rank: int, fails: bool) -> int:
        if fails and not rank:
            raise ValueError("while the others wait")
        dist.barrier()
        return os.getpid()

    four = launch(process, 4, (False,)).results
    with pytest.raises(RankFailed):
        launch(process, 2, (True,))
    assert not set(launch(process, 4, (False,)).results) & set(four)
    assert not any(map(psutil.pid_exists, four))  # forking new workers waits for the end of the old ones


def test_a_script_needs_no_main_guard_and_no_torch_and_its_classes_travel(tmp_path: Path) -> None:
    program = """
import sys
from dataclasses import dataclass
from course_lib import launch, Pace, Timeline

print("the script runs")

@dataclass
class Point:
    x: int

def move(rank, point):
    import torch, torch.distributed as dist
    x = torch.tensor(point.x + rank)
    dist.all_reduce(x)
    return Point(int(x))

run = launch(move, 2, (Point(1),))
print(run.results, type(run.results[0]) is Point, run.timeline.bytes_sent(0), "torch" in sys.modules)
"""
    assert script(program, folder=tmp_path) == "the script runs\n[Point(x=3), Point(x=3)] True 8 False\n"


def test_where_there_is_no_nccl_ranks_have_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no NCCL."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match="there are 0"):
        launch(total, 2, device="cuda")


def test_ranks_on_the_processor_see_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer's step opens one where there is one, which a process cannot once it has been forked from another."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert launch(lambda rank: os.environ["CUDA_VISIBLE_DEVICES"], 2).results == ["", ""]


def test_ranks_can_be_spawned_and_the_next_ones_are_while_the_student_reads_what_went_wrong(tmp_path: Path) -> None:
    """Ranks are spawned on systems where they cannot be forked."""
    program = """
import os, signal, time
import psutil
from course_lib import RankFailed, Stopped, launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in tests that run in the background

def process(rank, fault=None):
    import torch, torch.distributed as dist
    if fault == "raise":
        raise ValueError("no")
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    if fault == "stop":
        if rank == 0:
            os.kill(os.getppid(), signal.SIGINT)  # what the Stop button does, and not before all ranks run
        time.sleep(60)
    return int(total), os.getpid()

def ranks(n):
    for _ in range(1000):  # a process that has just begun may not have its command line yet
        found = {child.pid for child in psutil.Process().children() if "spawn_main" in str(child.cmdline())}
        if len(found) == n:
            break
        time.sleep(0.01)
    return found

def faulty(world_size, fault, error):
    try:
        launch(process, world_size, (fault,))
    except error as found:
        return str(found), ranks(world_size)

message, waiting = faulty(1, "raise", RankFailed)  # and the ranks there are when the error shows
totals, two = zip(*launch(process, 2).results)
print(message.splitlines()[0])
print(*totals, len(waiting), waiting == {two[0]}, ranks(2) == set(two))
new = faulty(2, "stop", Stopped)[1]
print(len(new), new.isdisjoint(two), *new)
"""
    message, first, second = script(program, folder=tmp_path, COURSE_LIB_START_METHOD="spawn").splitlines()
    assert message.startswith("Rank 0 raised ValueError: no")
    assert first == "3 3 1 True True"
    assert second.startswith("2 True ")
    assert not any(psutil.pid_exists(int(pid)) for pid in second.split()[2:])  # they went with the notebook


def test_workers_that_were_prepared_run_the_first_program_and_are_renewed_only_after_it() -> None:
    discard_all()
    prepare("launch", 2)
    while not (made := pool._pools.get("launch")) or len(made.started) < 2:
        time.sleep(0.01)
    prepared = [worker.process.pid for worker in made.started]
    renew("launch")
    assert launch(lambda rank: os.getpid(), 2).results == prepared
    renew("launch")
    assert set(launch(lambda rank: os.getpid(), 2).results).isdisjoint(prepared)
