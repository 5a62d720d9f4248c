"""The errors of a run, in words. Each carries a table of what every rank was doing."""

from __future__ import annotations

import linecache
import os
from dataclasses import astuple, dataclass, fields

from course_lib.ranks.board import Operation


@dataclass(frozen=True)
class ReportRow:
    """The activity of one rank when the run ended. seconds: its duration so far; line: of the student's code."""

    rank: int
    state: str
    operation: str = ""
    peer: str = ""
    shape: str = ""
    seconds: float = 0.0
    line: str = ""


@dataclass(frozen=True, repr=False)
class Report:
    """One row for each rank, shown as a table."""

    rows: tuple[ReportRow, ...]

    def __repr__(self) -> str:
        table = [[column.name for column in fields(ReportRow)]]
        table += [[f"{x:.2f}" if isinstance(x, float) else str(x) for x in astuple(row)] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in table]
        return "\n".join(line.rstrip() for line in lines)


Calls = dict[int, Operation]  # by rank


class RunError(Exception):
    """The error of a run that failed.

    rank: the rank at fault, or None where no single one is.
    report: what every rank was doing.
    histories: the operations of every rank, oldest first, as far as the run came.
    calls: the operations that cannot end or do not fit, by rank.
    """

    def __init__(self, message: str, rank: int | None = None, details: str = "", calls: Calls | None = None) -> None:
        super().__init__(message)
        self.message, self.rank, self.report, self.details = message, rank, Report(()), details
        self.histories: list[list[Operation]] = []
        self.calls = calls or {}

    def __str__(self) -> str:
        parts = [self.message, self.details.strip(), str(self.report) if self.report.rows else ""]
        return "\n\n".join(part for part in parts if part)

    def _render_traceback_(self) -> list[str]:
        """The traceback that a notebook shows: the message, not the inside of this library."""
        return [f"{type(self).__name__}: {self}"]


class RankFailed(RunError):
    """A rank raised an exception, or returned something that could not be sent back."""


class NotConnected(RunError):
    """A rank could not connect to the others, so the function began on none."""


class Deadlock(RunError):
    """No rank can go on: every rank waits for something that no rank will do."""


class Mismatch(Deadlock):
    """Operations of the ranks do not match; they would hang, crash or mix up data."""


class RankTimeout(RunError):
    """The run took longer than its time limit."""


class RankDied(RunError):
    """A rank's process ended in the middle of the run."""


class Stopped(RunError, KeyboardInterrupt):
    """The run was stopped with the Stop button or Ctrl-C."""


def describe_line(line: str) -> str:
    """Describe `file:number` in words, with the source line if it can be read."""
    filename, _, number = line.rpartition(":")
    if not number.isdigit():
        return ""
    source = linecache.getline(filename, int(number)).strip()
    return f"{_name_of(filename)}, line {number}" + (f": {source}" if source else "")


def _name_of(filename: str) -> str:
    """The number of a notebook cell, or the name of a file."""
    try:
        from IPython import get_ipython

        _, cell = get_ipython().compile.format_code_name(filename)
        return f"cell {cell}"
    except (ImportError, AttributeError, TypeError):
        return os.path.basename(filename)


def listing(ranks: list[int]) -> str:
    """ "rank 3", "ranks 0 and 2", "ranks 0, 1 and 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
