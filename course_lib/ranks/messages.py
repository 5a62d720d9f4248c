"""The messages between the parent and its workers."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, field
from typing import NamedTuple

from course_lib.ranks.board import Operation
from course_lib.ranks.pace import Pace
from course_lib.timeline import Span

MAX_RESULT_BYTES = 256 * 1024**2
MAX_PRINTED = 1_000_000  # characters kept of what one rank prints in one run

PRINTED, RAISED, FINISHED = b"P", b"R", b"F"  # the first byte of a worker's message


@dataclass
class Place:
    """The place of a worker: its rank, and the private directory of its pool."""

    rank: int
    directory: str
    uses_gpu: bool

    @property
    def log(self) -> str:
        """The file for the output of C++ code, such as warnings and the stack of a crash."""
        return os.path.join(self.directory, f"rank-{self.rank}.log")


class World(NamedTuple):
    """The ranks of a run, and the file of their rendezvous, which stays the same while they stay together."""

    size: int
    rendezvous: str


@dataclass
class Task:
    """One run, as sent to every worker. function: (fn, args) by cloudpickle.

    directory, path, environment: of the notebook, where the student may have changed them since the workers began.
    """

    function: bytes
    pace: Pace | None
    directory: str
    path: list[str]
    environment: dict[str, str]


@dataclass
class Failure:
    """An exception on a rank. kind: "raised", "exited", "joining" (the rank could not connect to the others), "arrival"
    (the function could not be unpickled), "result" (the result could not be pickled), "leftover"."""

    kind: str
    type: str
    message: str
    traceback: str = ""
    line: str = ""
    exception: bytes | None = None  # by cloudpickle, if that works

    @property
    def original(self) -> BaseException | None:
        """The exception that the rank raised, if it could be pickled."""
        try:
            return pickle.loads(self.exception) if self.exception else None
        except Exception:
            return None


@dataclass
class RankOutcome:
    """The outcome of a run on one rank, and all that the rank did.

    started, ended: on the machine's monotonic clock; the marks are on the clock of the run.
    untimed: kinds of marks that the run's pace has no seconds for.
    """

    started: float
    ended: float
    value: bytes | None = None
    failure: Failure | None = None
    operations: list[Operation] = field(default_factory=list)
    marks: list[Span] = field(default_factory=list)
    untimed: set[str] = field(default_factory=set)
    unfinished: list[int] = field(default_factory=list)  # numbers of operations that nobody waited for
    reusable: bool = True  # False if a thread or child process is left that could disturb the next run
    has_changes: bool = False  # whether new groups or changed settings would stay for the next run
