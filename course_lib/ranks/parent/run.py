"""Run a function on N real ranks."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import pickle
import reprlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import cloudpickle

from course_lib.ranks import errors, messages
from course_lib.ranks.board import MAX_WORLD_SIZE
from course_lib.ranks.diagnosis.status import make_report
from course_lib.ranks.pace import Pace
from course_lib.ranks.parent import pool
from course_lib.ranks.parent.interrupts import fenced
from course_lib.ranks.parent.monitor import RunMonitor
from course_lib.ranks.parent.output import make_display
from course_lib.ranks.parent.spans import make_timeline
from course_lib.ranks.worker import start
from course_lib.timeline import Timeline

_HOME = os.getpid()


@dataclass(frozen=True, repr=False)
class Run:
    """The outcome of a run: results, timeline and prints, by rank."""

    results: list[Any]
    stdout: list[str]
    pace: Pace | None = None
    _outcomes: list[messages.RankOutcome] = field(default_factory=list, repr=False)

    def __repr__(self) -> str:
        return f"Run(world_size={self.world_size}, results={reprlib.repr(self.results)})"

    @property
    def world_size(self) -> int:
        return len(self.results)

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline of the run: what every rank did, and when."""
        return make_timeline(self._outcomes, is_emulated=self.pace is not None)


def launch(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple = (),
    timeout: float = 60.0,
    pace: Pace | None = None,
    device: str = "cpu",
) -> Run:
    """Call fn(rank, *args) on `world_size` processes that talk through torch.distributed.

    fn: any function, also one defined in a notebook cell; it may use variables from around it. The process
        group is up when it starts, every rank is seeded differently and uses one thread.
    timeout: seconds after which the run is ended. Seconds in which ranks wait for a core that others use do not count
        (where the system counts them, as Linux does), but after ten times the limit it ends on any machine.
    pace: the devices and links to stand for, on an emulated clock; see `Pace`.
    device: "cpu" for gloo; "cuda" for NCCL and a GPU for each rank, on which its new tensors are. Tensors from outside
        of fn stay where they are: move them with .cuda().

    Raises RankFailed, Deadlock (or Mismatch), RankTimeout, RankDied, NotConnected or Stopped, all RunErrors, each with
    a table of what every rank was doing; ValueError or TypeError for arguments that make no sense.
    The next launch works in any case.
    """
    check_arguments(fn, world_size, args, timeout, pace, device)
    return run_on("launch", fn, world_size, args, timeout, pace, _uses_gpu(world_size, device))


def run_on(
    purpose: str, fn: Callable, world_size: int, args: tuple, timeout: float, pace: Pace | None, uses_gpu: bool
) -> Run:
    """Run on the pool kept for this purpose, and keep the pool if the run left nothing behind."""
    task = _pack(fn, args, pace)
    with contextlib.suppress(errors.NotConnected):  # on no rank the function has begun, and new workers may have luck
        return _run_once(purpose, task, world_size, timeout, uses_gpu)
    return _run_once(purpose, task, world_size, timeout, uses_gpu)


def _run_once(purpose: str, task: messages.Task, world_size: int, timeout: float, uses_gpu: bool) -> Run:
    display = make_display(fold=purpose == "cells")
    with fenced() as interrupt, pool.borrowed(purpose, world_size, uses_gpu, interrupt) as workers:
        monitor = RunMonitor(workers, timeout, display, interrupt)
        has_ended_well = False
        try:
            outcomes = monitor.run(task)
            has_ended_well = True
        finally:
            display.finish()
            may_go_on = has_ended_well or not uses_gpu  # what CUDA and NCCL have half done breaks the next run
            workers.is_tidy = may_go_on and monitor.is_clean(may_keep_changes=purpose == "cells")
    results = [_unpack(outcome, rank, monitor) for rank, outcome in enumerate(outcomes)]
    stdout = ["".join(texts) for texts in monitor.printed]
    return Run(results, stdout, task.pace, outcomes)


def _pack(fn: Callable, args: tuple, pace: Pace | None) -> messages.Task:
    try:
        function = _pickled((fn, args))
    except Exception as error:
        text = f"The function, an argument or something else that it uses cannot be sent to other processes ({error})."
        advice = "Files, locks, generators and connections stay where they were made: make them inside the function."
        raise errors.RankFailed(text, details=advice) from error
    return messages.Task(function, pace, os.getcwd(), list(sys.path), dict(os.environ))


class _Pickler(cloudpickle.Pickler):
    """Pickles modules of an unusual type by their names, like other modules.

    If a function uses both `dist` and some `config`, cloudpickle takes the module torch.distributed.config along.
    """

    def reducer_override(self, value: Any) -> Any:
        is_unusual = isinstance(value, types.ModuleType) and type(value) is not types.ModuleType
        if is_unusual and sys.modules.get(name := value.__name__) is value:
            return importlib.import_module, (name,)
        return super().reducer_override(value)


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _unpack(outcome: messages.RankOutcome, rank: int, monitor: RunMonitor) -> Any:
    assert outcome.value is not None
    try:
        return pickle.loads(outcome.value)
    except Exception as error:
        text = f"Rank {rank} returned something that cannot be rebuilt here ({type(error).__name__}: {error})."
        advice = "Return tensors, numbers, strings, lists or dictionaries."
        failed = errors.RankFailed(text, rank, advice)
        failed.report = make_report(monitor.statuses())
        raise failed from error


def check_arguments(fn: Any, world_size: Any, args: Any, timeout: Any, pace: Any, device: Any) -> None:
    """Raise TypeError or ValueError, naming the argument, its value and what would work."""
    if start.is_rank:
        raise RuntimeError("launch was called on a rank; ranks cannot launch ranks. Call it in the notebook itself.")
    if os.getpid() != _HOME:
        advice = "call it in the notebook itself, or start the process with multiprocessing's 'spawn'"
        raise RuntimeError(f"launch was called in a fork, which cannot start ranks; {advice}")
    if not callable(fn):
        raise TypeError(f"fn={fn!r} is not a function; launch(fn, {world_size!r}) calls fn(rank) on every rank")
    if not isinstance(world_size, int) or isinstance(world_size, bool) or not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"world_size={world_size!r} must be a whole number from 1 to {MAX_WORLD_SIZE}")
    if not isinstance(args, tuple | list):
        raise TypeError(f"args={args!r} must be a tuple; for one argument write args=({args!r},)")
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not number or not 0 < timeout < math.inf:
        raise ValueError(f"timeout={timeout!r} must be a number of seconds above 0")
    if pace is not None and not isinstance(pace, Pace):
        raise TypeError(f"pace={pace!r} must be a Pace, for instance Pace(device=0.02)")
    if pace is not None and (unknown := [rank for rank in pace.slow if rank >= world_size]):
        raise ValueError(f"slow={pace.slow!r} names {errors.listing(unknown)}, but the ranks are 0 to {world_size - 1}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} must be 'cpu' or 'cuda'")


def _uses_gpu(world_size: int, device: str) -> bool:
    if device == "cpu":
        return False
    import torch
    import torch.distributed as dist

    n_gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0  # Windows has no NCCL
    if n_gpus < world_size:
        raise ValueError(f"device='cuda' needs a GPU for each of the {world_size} ranks, but there are {n_gpus}")
    return True
