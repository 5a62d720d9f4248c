"""Grading: the same checks with numbers that nobody has seen, where nothing that a notebook changed is in their way.

    ### BEGIN HIDDEN TESTS
    from course_lib.checks import grading as checks

    ### END HIDDEN TESTS
    checks.split_batch(split_batch).points(2)

While nbgrader grades, a check runs in a process of its own, which imports this library afresh and gets nothing of the
notebook but the function. So a notebook gains nothing by replacing `checks`, a verdict or a part of this library. What
cannot be prevented in Python: whoever replaces this module, or its files, grades himself. Read what is handed in.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle

from course_lib import checks
from course_lib.checks.verdict import Verdict, partial_credit

SEED = 1


@dataclass(frozen=True)
class Shown:
    """What another process would show, by MIME type."""

    bundle: dict[str, str]

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return self.bundle


@dataclass(frozen=True)
class Graded(Shown):
    """A verdict that another process came to."""

    share: float = 0.0
    idle: Shown | None = None

    def points(self, of: int) -> float:
        """Show the verdict; what it earns, as nbgrader reads it from the result of a cell."""
        from IPython.display import display

        display(self)
        return partial_credit(self.share, of)


def __getattr__(name: str) -> Callable[[Any], Verdict | Graded]:
    if name not in [part.name for part in checks.PARTS]:
        raise AttributeError(f"there is no check {name!r}")
    return partial(_grade, name)


def _grade(name: str, fn: Any) -> Verdict | Graded:
    if os.environ.get("NBGRADER_EXECUTION") != "autograde":
        return getattr(checks, name)(fn, SEED)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "graded"
        command = [sys.executable, "-m", "course_lib.checks.grading", name, str(answer)]
        here = Path(__file__).parents[2]
        done = subprocess.run(command, input=cloudpickle.dumps(fn), capture_output=True, cwd=here)
        if answer.exists():
            return pickle.loads(answer.read_bytes())
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return Graded({"text/plain": f"{name}: the check ended with code {done.returncode}. {' '.join(last)}"})


def _main(name: str, answer: str) -> None:
    """In that process: check the function that arrives, and leave plain data."""
    verdict: Verdict = getattr(checks, name)(cloudpickle.load(sys.stdin.buffer), SEED)
    idle = Shown(verdict.idle._repr_mimebundle_()) if verdict.idle else None
    graded = Graded(verdict._repr_mimebundle_(), verdict.share, idle)
    Path(answer).write_bytes(pickle.dumps(graded))


if __name__ == "__main__":
    from course_lib.checks import grading  # else what it leaves would be of __main__

    grading._main(*sys.argv[1:])
