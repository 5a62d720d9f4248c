"""The board is read while it is written: who looks finds an operation as it was or as it is, and never half of one."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import pytest

from course_lib.ranks.board import SLOT, Board, Operation

OPERATION = Operation(1, 3, 7, 77, name="all_reduce", detail="SUM", shape="4", dtype="float32", line="a.py:1", posted=1)


def blocks_and_ends(memory: Any) -> None:
    board = Board(memory)
    while True:
        for OPERATION.blocked, OPERATION.ended in ((2.0, 0.0), (2.0, 3.0)):
            board.write(0, OPERATION)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_an_operation_that_changes_is_never_seen_without_the_rest_of_it() -> None:
    context: Any = multiprocessing.get_context("fork")
    memory = context.RawArray("c", SLOT)
    board = Board(memory)
    board.post(0, OPERATION)
    writer = context.Process(target=blocks_and_ends, args=(memory,), daemon=True)
    writer.start()
    try:
        while (events := board.events(0)) < 1000:
            pass
        seen = set()
        while board.events(0) < events + 60_000:
            (op,) = board.operations(0)
            seen.add((op.number, op.order, op.group, op.name, op.detail, op.shape, op.dtype, op.line, op.posted))
    finally:
        writer.kill()
        writer.join()
    assert seen == {(1, 7, 77, "all_reduce", "SUM", "4", "float32", "a.py:1", 1.0)}
