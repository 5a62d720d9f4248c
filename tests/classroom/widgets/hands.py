"""Functions that move the controls of an explorer without a browser."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from course_lib.classroom.widgets.explorer import Explorer


def move(shown: Explorer, label: str, value: Any) -> None:
    """Set the control with this label."""
    (control,) = (control for control in shown.controls if control.label == label)
    control.value = value


def in_a_kernel(action: Callable[[], object], during: Callable[[], object] = lambda: None) -> None:
    """Run an action in an event loop, and then more turns of the loop than there are views to make."""

    async def act() -> None:
        action()
        for _ in range(100):
            during()
            await asyncio.sleep(0)

    asyncio.run(act())
