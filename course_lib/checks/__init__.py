"""Checks for the exercises: run a student's function on real ranks, and say what is right, wrong, and what it costs.

    verdict = checks.ring_all_reduce(ring_all_reduce)     shows itself in a notebook
    verdict.require()                                     the same, and raises NotPassed unless it is right

A check compares with plain torch in one process, never with the course's own mechanisms, and tells a wrong idea
from a slip of the keyboard: each file holds the misconceptions of one exercise, one small function for each.
"""

from course_lib.checks.averaging import average_gradients
from course_lib.checks.ring import ring_all_reduce
from course_lib.checks.splitting import split_batch
from course_lib.checks.verdict import Cost, Idle, NotPassed, Verdict

__all__ = ["Cost", "Idle", "NotPassed", "Verdict", "average_gradients", "ring_all_reduce", "split_batch"]
