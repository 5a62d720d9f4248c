"""What holds for every test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest

from course_lib.preloading import preload

ROOMS = Path(__file__).parents[1] / "lessons"
CHECKS = [f"lessons.{page.parent.name}.checks" for page in sorted(ROOMS.glob("*/checks.py"))]

# As on every rank, and before torch is imported: with two threads matrix products add up in another order, and two that
# wait for each other on busy cores took 200 ms for a step that takes one of them 6.
os.environ["OMP_NUM_THREADS"] = "1"

# A busy machine is not a bug. And the same examples each time, so that no change is blamed for what another draw finds;
# `--hypothesis-profile default` looks further.
hypothesis.settings.register_profile("course", deadline=None, derandomize=True)
hypothesis.settings.load_profile("course")

# Else every rank would import them on its own, to find its function in a test's file: a tenth of a second each.
preload("hypothesis", "pytest", "torch.distributed.checkpoint", "torch.distributed.optim", *CHECKS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first: no worker is then left with it when the others have nothing to do."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_configure() -> None:
    # nbgrader and torchrun look for their companions on PATH, also when nobody activated the environment.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
