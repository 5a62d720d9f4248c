"""Settings for every test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest

from course_lib.preloading import preload

ROOMS = Path(__file__).parents[1] / "lessons"
# Files of a room with functions that run on ranks; a case warms ranks up, which the fork server must not.
ON_RANKS = ("checks", "questions", "runs", "explorer")
FILES = [f"lessons.{file.parent.name}.{file.stem}" for file in sorted(ROOMS.glob("*/*.py")) if file.stem in ON_RANKS]

# One thread, as on every rank, set before torch is imported: two threads add up matrix products in another order, and,
# waiting for each other on busy cores, took 200 ms for a step that takes one thread 6.
os.environ["OMP_NUM_THREADS"] = "1"

# No deadline, as a busy machine is not a bug. The same examples each time, so that a failure comes from a change, not
# from a draw; `--hypothesis-profile default` draws others.
hypothesis.settings.register_profile("course", deadline=None, derandomize=True)
hypothesis.settings.load_profile("course")

# Otherwise every rank would import these, to find its function in a test's file: up to two seconds each.
preload("hypothesis", "pytest", "torch.distributed.checkpoint", "torch.distributed.optim", "lessons.build", *FILES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long tests first, so that no worker is left with one when the others are done."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_configure() -> None:
    # nbgrader and torchrun look for other programs on PATH, even if the environment is not activated.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
