"""The memory behind Q5 and Q6, in bytes counted on real ranks."""

from __future__ import annotations

import torch

from course_lib.classroom.runs.training import train_layers
from lessons.L01_one_machine_is_not_enough.questions import TooLarge


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
