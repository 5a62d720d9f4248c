"""The Stop button of a real notebook kernel, in every state a run can be in, and twice in a row."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.faults.conftest import BUSY, DEADLINE, eventually

pytestmark = pytest.mark.linux

STATES = {
    "all compute": "while True: torch.ones(50, 50) @ torch.ones(50, 50)",
    "a deadlock": "dist.recv(torch.zeros(1), (rank + 1) % 4)",
    "one computes and the others wait": """
    while rank == 0: pass
    dist.barrier()""",
    "a loop of collectives": "while True: dist.all_reduce(torch.zeros(10))",
    "an operation that ends in minutes": "torch.linalg.svd(torch.rand(6000, 6000))",
    "a loop that swallows every exception": """
    while True:
        try: time.sleep(0.01)
        except BaseException: pass""",
    "endless printing": "while True: print('x' * 100)",
    "all sleep": "time.sleep(60)",
}


def assert_usable(kernel) -> None:
    assert "[10, 10, 10, 10]" in kernel.run("print(launch(total, 4).results)")
    assert "[1, 2, 3]" in kernel.run("print(kept)")


@pytest.mark.parametrize("state", STATES)
def test_stop_ends_the_run_and_the_next_one_works(shared_kernel, state):
    shared_kernel.launch(STATES[state])
    workers = shared_kernel.processes()[1:]
    shared_kernel.stop()
    assert "Stopped" in shared_kernel.reply(DEADLINE * BUSY)[-5000:]
    assert_usable(shared_kernel)
    eventually(lambda: len(shared_kernel.processes()) <= len(workers) + 1, "more than before", shared_kernel.processes)


@pytest.mark.parametrize(("state", "pause"), [("all compute", 0.0), ("a deadlock", 0.02), ("all sleep", 0.2)])
def test_stop_twice_is_like_stop_once(shared_kernel, state, pause):
    shared_kernel.launch(STATES[state])
    shared_kernel.stop()
    time.sleep(pause)
    shared_kernel.stop()
    assert "Stopped" in (reply := shared_kernel.reply()) or "KeyboardInterrupt" in reply
    assert_usable(shared_kernel)


def test_stop_while_an_argument_is_being_unpickled(shared_kernel):
    shared_kernel.run("""
def linger():
    here()
    time.sleep(60)
class Slow:
    def __reduce__(self):
        return linger, ()
""")
    shared_kernel.start("launch(lambda rank, slow: rank, 4, args=(Slow(),))")
    shared_kernel.ready(4)
    shared_kernel.stop()
    assert "Stopped" in shared_kernel.reply()
    assert_usable(shared_kernel)


def test_stop_while_a_result_is_being_pickled(shared_kernel):
    shared_kernel.start("""
class SlowResult:
    def __reduce__(self):
        here()
        time.sleep(60)
launch(lambda rank: SlowResult(), 4)
""")
    shared_kernel.ready(4)
    shared_kernel.stop()
    assert "Stopped" in shared_kernel.reply()
    assert_usable(shared_kernel)


def test_stop_right_after_the_start_of_many_runs(shared_kernel):
    for pause in (0.0, 0.003, 0.01, 0.03):
        shared_kernel.start("here()\nwhile True: launch(total, 4)")
        shared_kernel.ready(1)  # a kernel that has not begun a cell does not hear of a stop
        time.sleep(pause)
        shared_kernel.stop()
        assert "Stopped" in (reply := shared_kernel.reply()) or "KeyboardInterrupt" in reply
        assert_usable(shared_kernel)


def test_a_stopped_run_can_be_caught_as_the_interrupt_it_is(shared_kernel):
    shared_kernel.start("""
def body(rank):
    here()
    time.sleep(60)
try:
    launch(body, 4)
except KeyboardInterrupt as stopped:
    from course_lib import RunError
    print(isinstance(stopped, RunError), len(stopped.report.rows))
""")
    shared_kernel.ready(4)
    shared_kernel.stop()
    assert "True 4" in shared_kernel.reply()
    assert_usable(shared_kernel)


FIRST = """
import os, signal, sys, time
from course_lib import launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in tests that run in the background
def total(rank):
    import torch, torch.distributed as dist
    t = torch.tensor(rank + 1); dist.all_reduce(t); return int(t)
try:
    print("ready", flush=True)
    launch(total, 4)
    time.sleep(600)  # far too long for whoever waits for this process
except KeyboardInterrupt:
    pass
print(launch(total, 4).results, flush=True)
"""


@pytest.mark.parametrize("pause", [0.0, 0.4])  # every line of a launch is stopped at in ranks/test_interrupts
def test_stop_while_the_first_pool_is_being_made(pause):
    with subprocess.Popen(
        [sys.executable, "-c", FIRST], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(pause)
            os.killpg(process.pid, signal.SIGINT)
            out, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert out == "[10, 10, 10, 10]\n"
    assert process.returncode == 0
