"""Q5 and Q6, with bytes counted on real ranks."""

from __future__ import annotations

import pytest
import torch

from course_lib.classroom import questions
from course_lib.classroom.runs.training import train_layers
from lessons.L01_one_machine_is_not_enough.questions import TooLarge


@pytest.mark.parametrize(
    ("seed", "answer", "right"),
    [
        (0, "a", False),
        (0, "b", False),
        (0, "c", True),
        (0, "d", False),
        (0, "e", False),
        (1, "c", True),
        (2, "e", False),
    ],
)
def test_q5(seed: int, answer: str, right: bool) -> None:
    outcome = questions.load("Q5", seed).form.run(answer)
    assert (outcome.right, outcome.shown) == (right, True)
    assert ("holds all it needs" if right else "still runs out of memory") in outcome.happened


@pytest.mark.parametrize("seed", range(1, 9))
def test_the_model_of_q5_is_too_large_for_one_device_and_not_for_several(seed: int) -> None:
    text = questions.load("Q5", seed).text
    assert 16 * int(text.split(" billion")[0].split()[-1]) > 80


@pytest.mark.parametrize(
    ("seed", "answer", "right", "happened"),
    [
        (0, "a", False, "and waits, it still holds"),
        (0, "b", True, "on each of"),
        (0, "c", False, "on each of"),
        (0, "d", False, "on"),
        (1, "b", True, "on each of"),
        (2, "c", False, "on each of"),
    ],
)
def test_q6(seed: int, answer: str, right: bool, happened: str) -> None:
    outcome = questions.load("Q6", seed).form.run(answer)
    assert (outcome.right, outcome.shown) == (right, True)
    assert happened in outcome.happened


def test_weights_gradients_and_adams_state_take_16_bytes_for_each_parameter() -> None:
    ((states, peak),) = train_layers(1, 2, 4, False)
    parameters = 2 * (12 * 64**2 + 13 * 64)  # four matrices of attention, two of the MLP; biases and norms
    assert states == 16 * parameters
    assert peak > states


def test_a_share_of_the_layers_is_that_share_of_the_memory() -> None:
    ((whole, _),) = train_layers(1, 4, 4, False)
    assert [held.states for held in train_layers(4, 4, 4, True)] == [whole // 4] * 4
    assert train_layers(1, 4, 4, False, torch.bfloat16)[0].states == whole // 2


def test_the_memory_of_a_device_is_for_so_many_layers_and_no_more() -> None:
    case = TooLarge(8, 4, 13)
    assert train_layers(1, 3, 4, False)[0].peak <= case.capacity < train_layers(1, 5, 4, False)[0].peak
