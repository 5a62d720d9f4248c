"""What ranks tell each other of their emulated times."""

from __future__ import annotations

import threading
from pathlib import Path

from course_lib.ranks.board import Operation
from course_lib.ranks.clock import Entries, Entry


def test_a_member_that_has_not_begun_its_run_is_waited_for(tmp_path: Path) -> None:
    came = Entry(group=7, peer=-1, tag=0, order=0, bytes=8, posted=1.5, arrival=0.0)

    def begin_and_come() -> None:
        Entries(str(tmp_path), rank=1, run=1).write(came)

    late = threading.Timer(0.05, begin_and_come)
    early = Entries(str(tmp_path), rank=0, run=1)
    late.start()
    assert early.of_member(1, Operation(number=0, members=0b11, order=0, group=7)) == came
    late.join()
