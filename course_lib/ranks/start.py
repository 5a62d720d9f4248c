"""Where a worker process begins. The parent imports this, so it must not import torch."""

from __future__ import annotations

from typing import Any


def begin(*args: Any) -> None:
    from course_lib.ranks import worker

    worker.main(*args)
