"""Run a function on N real ranks; see what each did; survive every mistake."""

from course_lib.ranks.errors import Deadlock, Mismatch, RankDied, RankFailed, RankTimeout, Report, RunError, Stopped
from course_lib.ranks.pace import Link, Pace
from course_lib.ranks.pool import discard_all
from course_lib.ranks.run import Run, launch
