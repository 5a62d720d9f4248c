"""Moves the controls of an explorer without a browser."""

from __future__ import annotations

from typing import Any

from course_lib.widgets.explorer import Explorer


def move(shown: Explorer, label: str, value: Any) -> None:
    """Set the control that is called so."""
    (control,) = (control for control in shown.controls if control.label == label)
    control.value = value
