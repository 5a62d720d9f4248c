"""The ten scenarios: cases in which one diagnoses and decides as engineers do, and sees the decision run.

    from course_lib import scenarios
    night = scenarios.load("S02_night_call")            scenarios.load("S02_night_call", seed=1): another cause
    night.evidence()

A case with a fault is a healthy job, what may be wrong with it, and what one may change: `faults`. A case that asks for
a plan is a model, a cluster and what the plan must reach: `plans`. Their prose is in sources/scenarios/.
"""

from __future__ import annotations

import importlib
from typing import Any

from course_lib.ranks import fork_server

FAULTS = ("S02_night_call", "S06_postmortem", "S07_regression", "S08_two_clusters")
PLANS = ("S01_single_node", "S03_fit_then_fast", "S09_refresh", "S10_memory_bound")


def load(name: str, seed: int = 0) -> Any:
    """A case with its evidence: a `faults.Variant` or a `plans.Variant`. seed: which cause, or which job and machine.

    Raises ValueError for a name that is none.
    """
    if name not in FAULTS + PLANS:
        raise ValueError(f"name={name!r} is no such case; choose one of {', '.join(sorted(FAULTS + PLANS))}")
    if name in FAULTS:
        fork_server.warm_up()  # it imports torch for the ranks while this process does
    return importlib.import_module(f"course_lib.scenarios.{name}").CASE.variant(seed)
