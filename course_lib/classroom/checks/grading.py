"""Grading: the same checks with numbers that nobody has seen, out of reach of anything that a notebook changed.

    ### BEGIN HIDDEN TESTS
    from course_lib.classroom.checks import grading

    checks = grading.of("lessons.L02_data_parallelism.checks")
    ### END HIDDEN TESTS
    checks.split_batch(split_batch).points(2)

While nbgrader grades, checks run in a process of their own, which imports this library afresh and gets nothing of the
notebook but the functions. So a notebook gains nothing by replacing `checks`, a verdict or a part of this library.
Whatever ends that process costs the points of one check: the next one begins in a new process. Python cannot keep
somebody from replacing this module or its files: read what is handed in.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import cloudpickle

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.verdict import Verdict, partial_credit
from course_lib.ranks import discard_all

SEED = 1


@dataclass(frozen=True)
class Graded:
    """The output of another process, by MIME type: its verdict, or the idle time of one."""

    bundle: dict[str, str]
    share: float = 0.0
    idle: Graded | None = None

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return self.bundle

    def points(self, of: int) -> float:
        """Show the verdict and return its points, which nbgrader reads from the result of a cell."""
        from IPython.display import display

        display(self)
        return partial_credit(self.share, of)


@dataclass(frozen=True)
class of:
    """The checks of this module, each called with a function alone."""

    module: str

    def __getattr__(self, name: str) -> Callable[[Any], Verdict | Graded]:
        return functools.partial(_grade, self.module, name)


def _grade(module: str, name: str, fn: Any) -> Verdict | Graded:
    if os.environ.get("NBGRADER_EXECUTION") != "autograde":
        return _check(module, name)(fn, SEED)
    process, said = _grader()
    function = cloudpickle.dumps(fn)
    try:
        pickle.dump((module, name, function), process.stdin)
        process.stdin.flush()
        return pickle.load(process.stdout)
    except (EOFError, OSError):  # the grader has died
        _grader.cache_clear()
        code = process.wait()
        said.seek(0)
        last = said.read().decode(errors="replace").strip().splitlines()[-1:]
        return Graded({"text/plain": f"{name}: the check ended with code {code}. {' '.join(last)}"})
    except BaseException:  # the grader took too long; its late answer would be taken for the next one
        _grader.cache_clear()
        process.kill()
        raise


def _check(module: str, name: str) -> Exercise:
    """A check of a module. Raises AttributeError if there is no such check."""
    if not isinstance(exercise := getattr(importlib.import_module(module), name), Exercise):
        raise AttributeError(f"there is no check {name!r} in {module}")
    return exercise


@functools.cache
def _grader() -> tuple[Any, IO[bytes]]:
    """The process that checks, and the file of its errors. Its imports take seconds, so it is kept."""
    command, here = [sys.executable, "-m", "course_lib.classroom.checks.grading"], Path(__file__).parents[3]
    said = tempfile.TemporaryFile()  # noqa: SIM115  (it goes with the process)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, cwd=here), said


def _main() -> None:
    """The grading process: check each function that arrives, on fresh ranks, and answer plain data."""
    with open(os.dup(0), "rb") as questions, open(os.dup(1), "wb") as answers:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # prints of a function are no answer
        with contextlib.suppress(EOFError):
            while True:
                module, name, fn = pickle.load(questions)
                verdict: Verdict = _check(module, name)(cloudpickle.loads(fn), SEED)
                idle = Graded(verdict.idle._repr_mimebundle_()) if verdict.idle else None
                pickle.dump(Graded(verdict._repr_mimebundle_(), verdict.share, idle), answers)
                answers.flush()
                discard_all()


if __name__ == "__main__":
    from course_lib.classroom.checks import grading  # else classes of its results would belong to __main__

    grading._main()
