"""The ten scenarios: cases in which one diagnoses and decides as engineers do, and sees the decision run.

    from course_lib import scenarios
    night = scenarios.load("S02_night_call")            scenarios.load("S02_night_call", seed=1): another cause
    night.evidence()

A case with a fault is a healthy job, what may be wrong with it, and what one may change: `faults`. A case that asks for
a plan is a model, a cluster and what the plan must reach: `plans`. Their prose is in sources/scenarios/.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from course_lib.scenarios.faults import Variant


def load(name: str, seed: int = 0) -> Variant:
    """A case with a fault. seed: which of its culprits, and other numbers.

    Raises ValueError for a name that is none.
    """
    known = sorted(path.stem for path in Path(__file__).parent.glob("S[0-9]*.py"))
    if name not in known:
        raise ValueError(f"name={name!r} is no scenario; choose one of {', '.join(known)}")
    return importlib.import_module(f"course_lib.scenarios.{name}").CASE.variant(seed)
