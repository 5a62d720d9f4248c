"""Checks for the exercises: run a student's function on real ranks, and say what is right, wrong, and what it costs.

    from lessons.L02_data_parallelism import checks
    verdict = checks.ring_all_reduce(ring_all_reduce)     shows itself in a notebook
    verdict.points(5)                                     the same, and raises NotPassed unless it is right

Each check of a lesson is an `Exercise`: a right solution, cases to try, and wrong solutions that tell which idea a
student had. In a notebook, ranks start while the student reads: the first check need not wait for them.
"""

import sys

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import Case
from course_lib.classroom.checks.verdict import Cost, Idle, NotPassed, Verdict
from course_lib.ranks import prepare

if (shell := sys.modules.get("IPython")) and shell.get_ipython() is not None:
    prepare("launch", 4)
