"""What holds for every test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest

TESTS = Path(__file__).parent
ALONE = ("faults",)  # their deadlines are real seconds

hypothesis.settings.register_profile("course", deadline=None)  # a busy machine is not a bug
hypothesis.settings.load_profile("course")


def pytest_configure() -> None:
    # nbgrader and torchrun look for their companions on PATH, also when nobody activated the environment.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if TESTS in item.path.parents else ""
        if folder == "browser":
            item.add_marker(pytest.mark.browser)
        if folder in ALONE:
            item.add_marker(pytest.mark.alone)
