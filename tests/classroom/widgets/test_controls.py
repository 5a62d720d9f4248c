"""The slider, as the kernel sees it; tests/browser moves it with the mouse and with keys."""

from __future__ import annotations

import pytest

from course_lib.classroom.widgets.answers import Button
from course_lib.classroom.widgets.controls import Slider


def test_a_slider_has_the_value_of_the_option_it_is_at() -> None:
    slider = Slider("link", (1, 10, 100), 10, ["slow", "medium", "fast"])
    assert slider.value == 10
    slider.index = 2
    assert slider.value == 100
    slider.value = 10
    assert slider.index == 1


def test_options_are_written_as_they_are_unless_said_otherwise() -> None:
    assert Slider("ranks", range(1, 4), 2).texts == ["1", "2", "3"]
    assert Slider("link", (1, 10), 10, ["slow", "fast"]).texts == ["slow", "fast"]


def test_a_value_that_is_no_option_is_refused() -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        Slider("ranks", range(1, 4), 5)


def test_a_button_whose_action_fails_can_be_pressed_again() -> None:
    presses = list[int]()

    def fail() -> None:
        presses.append(button.clicks)
        raise ValueError("no")

    button = Button(fail, "Try")
    for click in (1, 2):
        with pytest.raises(ValueError, match="no"):
            button.clicks = click
        assert button.enabled
    assert presses == [1, 2]
