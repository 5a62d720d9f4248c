"""Verdicts do not depend on the load of the machine: they are found here while every core is busy."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from course_lib import launch
from course_lib.classroom.checks import part
from course_lib.classroom.checks.exercise import Exercise
from course_lib.ranks.parent.monitor import _TimeTaken
from lessons.L03_sharded_data_parallelism import checks as sharding
from tests.classroom.checks import test_examine as e
from tests.lessons.parts import checks

BUSY = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
CORES = os.cpu_count() or 1


@contextlib.contextmanager
def all_cores_busy(times: int = 1) -> Iterator[None]:
    """Keep `times` processes for each core computing."""
    processes = [subprocess.Popen(BUSY, stdout=subprocess.PIPE) for _ in range(times * CORES)]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline()  # it is computing
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def loops(block: Callable, x: Tensor) -> Any:
    return all(itertools.repeat(True))  # one line, so that the verdict names it


# A part that takes long, and ways in which a run can end: right, wrong, told by the trace, by a hang, by a time limit.
PROGRAMS: dict[Callable[..., Any], tuple[Exercise, str]] = {
    sharding.trained: (checks.train_sharded, "Right in all"),
    e.buffer_of_wrong_dtype: (checks.ring_all_reduce, "the dtype of what arrives"),
    e.sends_first: (checks.ring_all_reduce, "somebody must receive first"),
    loops: (checks.recompute, "perhaps a loop never ends"),
}


def verdict_on(program: Callable[..., Any]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if program is loops:
            patch.setattr(part, "TIMEOUT", 0.5)
        return str(PROGRAMS[program][0](program))


@pytest.fixture(scope="module")
def quiet() -> dict[Callable[..., Any], str]:
    """The verdicts on an idle machine."""
    return {program: verdict_on(program) for program in PROGRAMS}


@pytest.fixture(scope="module")
def busy(quiet: dict[Callable[..., Any], str]) -> Iterator[dict[Callable[..., Any], str]]:
    with all_cores_busy():
        yield quiet


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_verdict_is_the_same_on_a_busy_machine(program: Callable[..., Any], busy: dict[Callable, str]) -> None:
    told = verdict_on(program)
    assert PROGRAMS[program][1] in told
    assert told == busy[program]


# The time limit

LIMIT = 1.0


def starves(rank: int) -> None:
    """Compute for twice the limit."""
    begun = time.monotonic()
    while time.monotonic() - begun < 2 * LIMIT:
        pass


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the system does not count who waits for a core")
def test_waiting_for_a_core_does_not_count() -> None:
    with all_cores_busy(times=4):  # each of them takes a turn before the rank gets its next
        launch(starves, 1, timeout=LIMIT)


@pytest.mark.parametrize(
    ("computed", "waited", "counts"),
    [
        ([0.0, 0.0], [0.0, 0.0], 1.0),  # both sleep, perhaps for ever
        ([1.0, 0.0], [0.0, 0.0], 1.0),  # one loops
        ([0.1, 0.0], [0.9, 0.0], 0.1),  # a busy machine lets it compute for a tenth of the time
        ([0.0], [-3.0], 1.0),  # a thread that waited for three seconds before has ended
        ([CORES / 4] * 4, [1 - CORES / 4] * 4, 1.0),  # four loops keep all cores busy, without other processes
    ],
)
def test_the_seconds_that_count_are_those_that_ranks_could_have_used(
    computed: list[float], waited: list[float], counts: float
) -> None:
    taken = _TimeTaken(11.0, [(5.0, 7.0)] * len(computed))
    taken.go_on(12.0, [(5.0 + one, 7.0 + other) for one, other in zip(computed, waited, strict=True)])
    assert taken.seconds == pytest.approx(counts)


def test_who_looks_late_does_not_take_all_that_went_by_for_time_of_the_ranks() -> None:
    taken = _TimeTaken(11.0, [(5.0, 7.0)])
    taken.go_on(71.0, [(5.0, 7.0)])
    assert taken.seconds == 1.0


def test_however_busy_the_machine_is_a_run_is_over_after_ten_times_its_limit() -> None:
    """Two ranks that compute without end, among sixty others: each gets a core for a second of thirty."""
    taken = _TimeTaken(0.0, [(0.0, 0.0)] * 2)
    over = []
    for second in range(1, 41):
        taken.go_on(float(second), [(second / 30, second * 29 / 30)] * 2)
        over.append(taken.is_over(3.0))
    assert over.index(True) == 29
    assert taken.seconds < 3.0
