"""Lessons 06 to 08 as a student goes through them: fewer bits, all mechanisms at once, and a plan for a cluster."""

from __future__ import annotations

from typing import Any

from tests.browser.hands import MOVE, cell, drag, go_through, press, says


def test_mixed_precision(lab: Any) -> None:
    go_through(lab, "06_mixed_precision")


def test_combining_mechanisms(lab: Any) -> None:
    go_through(lab, "07_combining_mechanisms")


def test_planning(lab: Any) -> None:
    page = go_through(lab, "08_planning")
    explorer = cell(page, "refresh.explorer()")
    says(explorer, "times as fast as before")
    press(explorer, "nodes", "ArrowRight")
    explorer.get_by_text("A step on 64 B200-180GB").wait_for(timeout=MOVE)
    drag(explorer, "network", 0.0)
    explorer.get_by_text("A step on 64 B200-180GB with Ethernet 25").wait_for(timeout=MOVE)
