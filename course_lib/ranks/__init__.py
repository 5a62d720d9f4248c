"""Run a function on N real ranks; see what each did; survive every mistake."""

from course_lib.ranks.errors import (
    Deadlock,
    Mismatch,
    NotConnected,
    RankDied,
    RankFailed,
    RankTimeout,
    Report,
    RunError,
    Stopped,
    listing,
)
from course_lib.ranks.pace import Link, Pace
from course_lib.ranks.parent.fork_server import warm_up
from course_lib.ranks.parent.interrupts import fenced
from course_lib.ranks.parent.pool import discard_all, prepare, renew
from course_lib.ranks.parent.run import Run, launch
