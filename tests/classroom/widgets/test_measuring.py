"""The desk of whoever is on call, with a night in which nothing is run."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from course_lib.classroom.scenarios.jobs.job import Job
from course_lib.classroom.widgets import measuring


def test_what_other_cells_measure_is_on_the_bill_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: dict[str, Callable[[object], None]] = {}
    shell = SimpleNamespace(events=SimpleNamespace(register=heard.__setitem__))
    monkeypatch.setattr(measuring, "get_ipython", lambda: shell)
    monkeypatch.setattr(measuring, "checkpoints", lambda scene: [0])
    used: list[str] = []
    story = SimpleNamespace(used=used, scene=SimpleNamespace(job=Job()))
    night: Any = SimpleNamespace(
        story=story, culprits=("throttled",), measure=used.append, bill=lambda: f"paid {len(used)} times"
    )
    desk = measuring.Measuring(night)

    def shown() -> tuple[bool, str, str]:
        heard["post_run_cell"](None)
        return f"paid {len(used)} times" in desk.bill.value, desk.measure["samples"].label, desk.rehearse.label

    assert shown() == (True, "What each replica reads, 5 minutes", "Rehearse it, 15 minutes")
    used += ["samples", "rehearse throttled"]
    assert shown() == (True, "What each replica reads, paid", "Rehearse it, paid")
    used.clear()  # as after an act
    assert shown() == (True, "What each replica reads, 5 minutes", "Rehearse it, 15 minutes")
