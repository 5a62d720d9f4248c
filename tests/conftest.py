"""What holds for every test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis

from course_lib.ranks import server

hypothesis.settings.register_profile("course", deadline=None)  # a busy machine is not a bug
hypothesis.settings.load_profile("course")

# Else every rank would import them on its own, to find its function in a test's file: a tenth of a second each.
server.PRELOAD[:0] = ["hypothesis", "pytest"]  # first, as what comes before course_lib's own is not garbage either
server.PRELOAD += ["torch.distributed.checkpoint", "torch.distributed.optim"]


def pytest_configure() -> None:
    # nbgrader and torchrun look for their companions on PATH, also when nobody activated the environment.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
