"""What holds for every test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest

from course_lib.ranks import fork_server

# As on every rank, and before torch is imported: with two threads matrix products add up in another order, and two that
# wait for each other on busy cores took 200 ms for a step that takes one of them 6.
os.environ["OMP_NUM_THREADS"] = "1"

# A busy machine is not a bug. And the same examples each time, so that no change is blamed for what another draw finds;
# `--hypothesis-profile default` looks further.
hypothesis.settings.register_profile("course", deadline=None, derandomize=True)
hypothesis.settings.load_profile("course")

# Else every rank would import them on its own, to find its function in a test's file: a tenth of a second each.
fork_server.PRELOAD[:0] = ["hypothesis", "pytest"]  # first, as what comes before course_lib's own is not garbage either
fork_server.PRELOAD += ["torch.distributed.checkpoint", "torch.distributed.optim", "course_lib.checks"]

# The longest files, which begin first: no worker is then left with one of them when the others have nothing to do.
LONGEST = (
    "exercises/test_autograde.py",
    "checks/test_bank.py",
    "scale_out/test_train.py",
    "mechanisms/test_hybrid.py",
    "planner/test_exact_bytes.py",
    "mechanisms/test_sharding.py",
    "mechanisms/test_tensor_parallel.py",
    "mechanisms/test_pipeline.py",
    "ranks/test_clock.py",
    "ranks/test_launch.py",
    "widgets/test_mixed_precision.py",
    "questions/test_step_order.py",
    "mechanisms/test_situations_sharding.py",
    "questions/test_precision.py",
    "experiments/test_ablations.py",
    "questions/test_strategies.py",
    "ranks/test_cells.py",
    "mechanisms/test_mixed_precision.py",
    "scale_out/test_checkpoint.py",
    "questions/test_efficiency.py",
    "questions/test_memory.py",
    "mechanisms/test_data_parallel.py",
    "mechanisms/test_layerwise.py",
    "mechanisms/test_mutations_sharding.py",
    "test_data.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_configure() -> None:
    # nbgrader and torchrun look for their companions on PATH, also when nobody activated the environment.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
