"""The cases of the course that a seed draws, by the names of their rooms."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from course_lib.classroom.scenarios.jobs.faults import Incident
from course_lib.classroom.scenarios.plans import Planning

ROOMS = sorted(path.parent.name for path in (Path(__file__).parents[2] / "lessons").glob("S*/case.py"))
CASES: dict[str, Any] = {
    room: case for room in ROOMS if (case := getattr(importlib.import_module(f"lessons.{room}.case"), "CASE", None))
}
FAULTS = [room for room, case in CASES.items() if isinstance(case, Incident)]
PLANS = [room for room, case in CASES.items() if isinstance(case, Planning)]


def load(room: str, seed: int = 0) -> Any:
    return CASES[room].variant(seed)
