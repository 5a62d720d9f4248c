"""Q9, on real trainings in 16 and 32 bits."""

from __future__ import annotations

from typing import Any

import pytest

from course_lib import questions
from course_lib.questions import precision
from course_lib.questions.precision import Run


@pytest.mark.parametrize(("answer", "right"), [("a", False), ("b", False), ("c", False), ("d", True)])
def test_q9(answer: str, right: bool) -> None:
    outcome = questions.load("Q9").form.run(answer)
    assert (outcome.right, outcome.shown) == (right, True)
    assert ("nearly as well as" if right else "worse than") in outcome.happened


@pytest.mark.parametrize("change", [change for _, change in precision.REMEDIES.values()])
def test_each_answer_changes_one_thing(change: dict[str, Any]) -> None:
    (name,) = change
    assert getattr(Run(), name) != change[name]
