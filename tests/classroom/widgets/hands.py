"""Moves the controls of an explorer without a browser."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from course_lib.classroom.widgets.explorer import Explorer


def move(shown: Explorer, label: str, value: Any) -> None:
    """Set the control that is called so."""
    (control,) = (control for control in shown.controls if control.label == label)
    control.value = value


def in_a_kernel(action: Callable[[], object], during: Callable[[], object] = lambda: None) -> None:
    """Do something in an event loop, and then let more turns of it pass than there are pieces to look at."""

    async def act() -> None:
        action()
        for _ in range(100):
            during()
            await asyncio.sleep(0)

    asyncio.run(act())
