"""Processes that grade, for a program that runs nothing of an answer and needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from multiprocessing import forkserver
from typing import Any, NamedTuple

from course_lib.classroom.answers import Answer
from course_lib.ranks.parent import fork_server


class Submission(NamedTuple):
    """An answer, and the check that grades it, by the names of its module and its part."""

    module: str
    part: str
    answer: Answer


class Grade(NamedTuple):
    """A verdict by MIME type, and its share of the points, 0 to 1."""

    bundle: dict[str, str]
    share: float


class Grader:
    """A process that grades one answer after the other, out of reach of signals for this one, and ends with it."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        fork_server.warm_up()  # all share it
        server: Any = forkserver._forkserver
        shared = {**os.environ, fork_server.SHARED: server._forkserver_address or ""}
        command, pipe = [sys.executable, "-m", "course_lib.classroom.checks.grading"], subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=shared, start_new_session=True)

    def grade(self, task: Submission) -> Grade:
        assert self.process.stdin and self.process.stdout
        text = json.dumps([task.module, task.part, task.answer.name, task.answer.text])
        print(text, file=self.process.stdin, flush=True)
        if line := self.process.stdout.readline():
            return Grade(*json.loads(line))
        code = self.process.wait()
        self.begin()
        return Grade({"text/plain": f"The check ended with code {code}. Please report this."}, 0.0)
