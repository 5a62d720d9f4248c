"""Stop works at any line of a launch, however the run would have ended."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from course_lib.ranks import errors, messages
from course_lib.ranks.parent import interrupts, pool, run

FILES = {module.__file__ for module in (run, pool, interrupts, contextlib)}


class Workers:
    """A pool without processes, which records its fate and takes no time."""

    all: ClassVar[list[Any]] = []

    def __init__(self, room: int, uses_gpu: bool) -> None:
        self.room, self.world_size, self.is_alive, self.is_tidy, self.has_run = room, 0, True, True, False
        self.all.append(self)

    def fits(self, room: int, uses_gpu: bool) -> bool:
        return self.room == room

    def gather(self, world_size: int) -> None:
        self.world_size = world_size

    def kill(self) -> None:
        self.is_alive = False


class Monitor:
    """A monitor of a run that ends as `ending` says, unless an interrupt has come."""

    ending = "well"

    def __init__(self, workers: Workers, timeout: float, display: Any, interrupt: interrupts.Interrupt) -> None:
        self.interrupt = interrupt
        self.printed: list[list[str]] = [[]]

    def run(self, task: messages.Task) -> list[messages.RankOutcome]:
        if self.interrupt.has_come:
            raise errors.Stopped("Stopped. At that moment rank 0 computed.")
        if self.ending == "badly":
            raise errors.Deadlock("Nobody can move.")
        return [messages.RankOutcome(0.0, 1.0, b"N.")]

    def is_clean(self, may_keep_changes: bool) -> bool:
        return self.ending == "well"


@pytest.fixture(autouse=True)
def without_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pool.discard_all()
    Workers.all.clear()
    monkeypatch.setattr(pool, "Pool", Workers)
    monkeypatch.setattr(pool, "_postpone_retirement", lambda: None)
    monkeypatch.setattr(run, "RunMonitor", Monitor)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in tests that run in the background
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    pool.discard_all()


def at_line(number: int, action: Callable[[], object]) -> int:
    """Run an action, with an interrupt after that many lines of FILES; return the number of lines."""
    count = itertools.count(1)

    def trace(frame: Any, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line" and next(count) == number:
            signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
    return next(count) - 1


def launch_two() -> None:
    """Launch twice; the second launch cannot use the processes of the first."""
    for world_size in (1, pool.ROOM + 1):
        with contextlib.suppress(errors.Deadlock):
            run.run_on("launch", print, world_size, (), 60.0, None, uses_gpu=False)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("ending", ["well", "untidily", "badly"])
def test_stop_is_heard_at_every_line_of_a_launch(ending: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Monitor, "ending", ending)
    monkeypatch.setenv("COURSE_LIB_START_METHOD", method)
    lines = at_line(0, launch_two)
    assert lines > 100
    for number in range(1, lines + 1):
        with pytest.raises(KeyboardInterrupt):
            at_line(number, launch_two)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, number
        kept = pool._pools.get("launch")
        assert all(one is kept or not one.is_alive for one in Workers.all), f"line {number} left ranks behind"
        assert kept is None or kept.is_tidy, f"line {number} left ranks in the middle of a run"


def test_a_second_stop_does_not_reach_the_clean_up_after_the_first() -> None:
    def clean_up() -> None:
        with interrupts.fenced() as interrupt:
            try:
                with interrupt.open("Stopped."):
                    signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)
                done.append("cleaned up")

    done: list[str] = []
    with pytest.raises(errors.Stopped, match=r"^Stopped\.$"):
        clean_up()
    assert done == ["cleaned up"]


def test_a_stop_that_has_come_before_is_raised_where_it_may_fall_and_nothing_is_begun() -> None:
    with pytest.raises(errors.Stopped, match="starting"), interrupts.fenced() as interrupt:
        signal.raise_signal(signal.SIGINT)
        with interrupt.open("Stopped while the ranks were starting."):
            raise AssertionError


def test_a_stop_that_python_cannot_raise_where_it_falls_is_raised_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def lose_it() -> None:
        with interrupts.fenced() as interrupt, interrupt.open("Stopped."):
            Dying()

    with pytest.raises(errors.Stopped, match="end of the run"):
        lose_it()
    assert [type(one.exc_value) for one in lost] == [errors.Stopped]
    lost.clear()


def test_who_ignores_interrupts_goes_on_ignoring_them() -> None:
    """For example, a script in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.fenced() as interrupt:
            signal.raise_signal(signal.SIGINT)
        assert not interrupt.has_come
        with pytest.raises(errors.Stopped), interrupts.fenced(always=True):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
