"""Calls of `launch` that cannot work: refused at once, naming the argument, its value and what would work."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading

import psutil
import pytest
import torch
import torch.distributed as dist

from course_lib import launch


def total(rank):
    value = torch.tensor(rank + 1)
    dist.all_reduce(value)
    return int(value)


def refused(name, value, *args, **options):
    with pytest.raises((TypeError, ValueError)) as caught:
        launch(*args, **options)
    line = str(caught.value).splitlines()[0]
    assert name in line and value in line, line
    return line


@pytest.mark.parametrize("world_size", [0, -1, 33, "4", True, 2.0, None])
def test_a_world_size_that_cannot_be_is_refused(world_size):
    line = refused("world_size", repr(world_size), lambda rank: rank, world_size)
    assert "1" in line and "32" in line


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan, math.inf, "60"])
def test_a_time_limit_that_cannot_be_is_refused(timeout):
    refused("timeout", repr(timeout), lambda rank: rank, 2, timeout=timeout)


@pytest.mark.parametrize("args", [3, "ab", torch.zeros(2)], ids=["a number", "a string", "a tensor"])
def test_arguments_that_are_no_tuple_are_refused(args):
    line = refused("args", "", lambda rank, a: rank, 2, args=args)
    assert "tuple" in line and ",)" in line


@pytest.mark.parametrize("fn", [3, None, "train"])
def test_something_that_is_no_function_is_refused(fn):
    refused("fn", repr(fn), fn, 2)


def test_the_result_of_a_call_instead_of_the_function_is_refused():
    def train(rank=0):
        return None

    assert "launch(train" not in refused("fn", "None", train(), 2)


def test_a_device_that_does_not_exist_is_refused():
    assert "cpu" in refused("device", "'tpu'", lambda rank: rank, 2, device="tpu")


def test_a_device_that_is_not_there_is_refused():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    refused("device", "'cuda'", lambda rank: rank, 2, device="cuda")


def test_a_pace_that_is_none_is_refused():
    refused("pace", "0.5", lambda rank: rank, 2, pace=0.5)


@pytest.mark.linux
def test_launches_from_two_threads_at_the_same_time_take_turns(kill):
    """The launches begin before there is a fork server, when the first of them takes longest."""
    server = psutil.Process(launch(lambda rank: os.getpid(), 1).results[0]).parent()
    assert server is not None
    kill(server)
    results: dict[int, list] = {}

    def another(world_size):
        for _ in range(3):
            results[world_size] = launch(total, world_size).results

    threads = [threading.Thread(target=another, args=(n,)) for n in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {2: [3, 3], 3: [6, 6, 6]}


def test_a_function_with_a_default_and_a_method_and_a_partial_work():
    from functools import partial

    class Trainer:
        def step(self, rank, n=2):
            return rank * n

    assert launch(Trainer().step, 2).results == [0, 2]
    assert launch(partial(lambda n, rank: rank + n, 5), 2).results == [5, 6]


FORK = """
import os, sys
from course_lib import launch
def total(rank):
    import torch, torch.distributed as dist
    t = torch.tensor(rank + 1); dist.all_reduce(t); return int(t)
launch(total, 2)
child = os.fork()
if child == 0:
    try:
        print("child", launch(total, 2).results, flush=True)
    except Exception as error:
        print("child", type(error).__name__, str(error).splitlines()[0], flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent", launch(total, 2).results, flush=True)
"""


@pytest.mark.linux
def test_a_forked_copy_of_the_kernel_does_not_disturb_its_pool():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    child, parent = done.stdout.splitlines()
    assert parent == "parent [3, 3]"
    assert child == "child [3, 3]" or "fork" in child


def test_a_module_beside_the_notebook_can_be_used_and_edited(tmp_path):
    (tmp_path / "beside.py").write_text("def answer(rank):\n    return 1\n")
    script = """
import sys, importlib; sys.path.insert(0, "."); sys.dont_write_bytecode = True
from course_lib import launch
launch(lambda rank: rank, 2)
import beside
print(launch(beside.answer, 2).results)
open("beside.py", "w").write("def answer(rank):\\n    return 2222\\n")
importlib.reload(beside)
print(launch(beside.answer, 2).results)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert done.stdout == "[1, 1]\n[2222, 2222]\n", done.stderr
