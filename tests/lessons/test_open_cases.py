"""The runs of the open cases agree with their model answers."""

from __future__ import annotations

import functools

import pytest

from course_lib.classroom import questions
from course_lib.classroom.questions.question import Feedback


@functools.cache
def answered(name: str) -> Feedback:
    return questions.load(name).answer("I do not know yet.")


OPEN = (
    *("one_machine", "ideal_speed_up", "evaluate_replicas", "find_the_flaw", "data_distribution", "why_partition"),
    *("pipeline_efficiency", "pipelining_gain", "optimize_stages", "tune_a_pipeline"),
)


@pytest.mark.parametrize("name", OPEN)
def test_a_case_is_run_and_left_to_the_student_to_judge(name: str) -> None:
    feedback = answered(name)
    assert feedback.right is None
    assert feedback.outcome.shown
    assert "A good answer:" in str(feedback)
    assert feedback.outcome.happened


def test_the_flaw_is_seen_in_the_gradients() -> None:
    said = answered("find_the_flaw").outcome.happened
    assert "all gradients are equal to the last bit" in said
    assert "they are different" in said


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("one_machine", ["107 GB", "5.6e21", f"{6 * 6.66e9 * 140e9 / 9.9e14 / 86_400:.0f} days"]),
        ("ideal_speed_up", [f"{3.2 / 8:g} s", f"{3.2 / 0.56:.1f} times", f"{3.2 / 8 / 0.56:.0%}", f"{3.2 / 9:.2f} s"]),
        ("why_partition", [f"{16 * 20} GB", f"{16 * 20 / 8:g} GB", f"{16 * 20 / 32:g} GB"]),
        ("evaluate_replicas", [f"{10 / 16:.1%}", f"{128 // 16} samples for each device"]),
        ("pipeline_efficiency", [f"{2 / (2 + 4 - 1):.0%}", f"{8 / (8 + 4 - 1):.0%}"]),
        (
            "optimize_stages",
            [f"{1 / 8:.1%}", f"{39 / 32:.2f} s", f"{32 / 39:.0%}", f"{8 * 64 // 32} samples", f"{23 / 16:.2f} s"],
        ),
        ("pipelining_gain", [f"{(8 + 4 - 1) / 8:.3f} s", f"{4 * 8 / 11:.1f} times", f"{8 / 11:.0%}"]),
        ("tune_a_pipeline", [f"{7 / (8 + 7):.0%}", f"{7 / (32 + 7):.0%}", f"{7 / 2 / (32 + 7 / 2):.0%}"]),
    ],
)
def test_the_figures_of_model_answers(name: str, figures: list[str]) -> None:
    ((_, answer),) = questions.load(name).form.explanations()
    assert [figure for figure in figures if figure not in answer] == []
