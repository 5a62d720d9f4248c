"""Conclusions of a lesson, each confirmed away from the run that showed it.

What one run shows may come from its own setting. So each conclusion has a second ground: a run at another size on the
emulated clock, the planner or the simulator at real scale, or a published figure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.notebooks.lesson import lesson


class Conclusion(NamedTuple):
    """A sentence of a lesson, where else it was looked for, and whether it holds there."""

    sentence: str
    elsewhere: str
    holds: Callable[[], bool]


def confirm(name: str, conclusion: Conclusion) -> None:
    """Fail if the lesson no longer says it, or if it does not hold elsewhere."""
    assert lesson(name).says(conclusion.sentence), "the lesson no longer says this; take it out of the table"
    assert conclusion.holds(), f"does not hold elsewhere: {conclusion.elsewhere}"
