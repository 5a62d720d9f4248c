"""Reading the board while it is written: a reader finds the old operation or the new one, and never half of one."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from dataclasses import replace
from typing import Any

import pytest

from course_lib.ranks.board import SLOT, Board, Operation


def operation(number: int) -> Operation:
    """An operation whose texts differ from those of its neighbours and of the next one in its place."""
    name = ("send", "all_reduce", "recv")[number % 3]
    return Operation(number, 3, number, 77, name=name, detail=name, shape=name, dtype="x", line=name, posted=number)


def posts_and_ends(memory: Any) -> None:
    board = Board(memory)
    for number in itertools.count(1):
        op = operation(number)
        board.post(0, op)
        for op.blocked, op.ended in ((2.0, 0.0), (2.0, 3.0)):
            board.write(0, op)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_nobody_sees_half_of_an_operation() -> None:
    context: Any = multiprocessing.get_context("fork")
    memory = context.RawArray("c", SLOT)
    board = Board(memory)
    writer = context.Process(target=posts_and_ends, args=(memory,), daemon=True)
    writer.start()
    try:
        while not board.operations(0):
            pass
        for _ in range(1500):
            seen = board.operations(0)
            assert [replace(op, blocked=0.0, ended=0.0) for op in seen] == [operation(op.number) for op in seen]
    finally:
        writer.kill()
        writer.join()
