"""Grading: the same checks with numbers that nobody has seen, of answers that only ranks run.

    ### BEGIN HIDDEN TESTS
    from course_lib.classroom.checks import grading

    checks = grading.of("lessons.L02_data_parallelism.checks")
    ### END HIDDEN TESTS
    checks.split_batch(split_batch).points(2)

No kernel grades: `grade` takes the answer out of the sources of the cells, in a process that runs nothing of it, and
judges there what ranks report. So a notebook gains nothing by replacing `checks`, a verdict or a part of this library.
A rank is a Python process, too, and a program on it can look for the right solution, or report what it did not do. An
answer with words that this takes is not run: a person looks at it first.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from functools import partial
from types import SimpleNamespace

from course_lib.classroom.answers import PLACE, Answer
from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.prose import TEXTS
from course_lib.classroom.checks.verdict import Verdict
from course_lib.classroom.grader import Grade, Submission
from course_lib.ranks.worker.cells import remember_source

SEED = 1


def of(module: str) -> SimpleNamespace:
    """The checks of this module with numbers that nobody has seen, each called with a function alone."""
    if os.environ.get("NBGRADER_EXECUTION") == "autograde":
        raise RuntimeError("no kernel grades: copy nbgrader_config.py of the course into the folder of the class")
    known = vars(importlib.import_module(module)).items()
    return SimpleNamespace(**{name: partial(one, seed=SEED) for name, one in known if isinstance(one, Exercise)})


def grade(task: Submission) -> Grade:
    check, answer = getattr(importlib.import_module(task.module), task.part), task.answer
    remember_source(PLACE, answer.text)
    if not answer.text:
        verdict = Verdict(answer.name, "unwritten", TEXTS["nobody"])
    elif found := answer.suspicious():
        verdict = Verdict(answer.name, "held", TEXTS["suspicious"].format(words=", ".join(f"`{one}`" for one in found)))
    else:
        for case in check.all_cases(SEED):
            check.run_right(case)  # before an answer has run on the same ranks
        verdict = check(answer, SEED)
    return Grade(verdict._repr_mimebundle_(), verdict.share)


def _main() -> None:
    with open(os.dup(1), "w", encoding="utf-8") as grades:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what an answer prints is no grade
        for line in sys.stdin:
            module, part, *text = json.loads(line)
            print(json.dumps(grade(Submission(module, part, Answer(*text)))), file=grades, flush=True)


if __name__ == "__main__":
    _main()
