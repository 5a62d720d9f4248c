"""Understand distributed training of language models by running it.

    from course_lib import launch
    run = launch(fn, world_size=4)      # fn(rank) on four real processes
    run.results, run.timeline, run.stdout

Other rooms are imported by name: course_lib.mechanisms, course_lib.figures and so on.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from course_lib.preloading import preload

if TYPE_CHECKING:
    from course_lib.ranks import *
    from course_lib.timeline import Span, Timeline

preload("course_lib.model", "course_lib.data", "course_lib.mechanisms.data_parallel")  # most functions use them
preload("course_lib.classroom.checks.tables")  # and all checks this

_HOME = {"Span": "course_lib.timeline", "Timeline": "course_lib.timeline"}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, so that `import course_lib` stays instant."""
    if name.startswith("_"):
        raise AttributeError(f"module 'course_lib' has no attribute {name!r}")
    if name == "launch":
        _warm_up()
    return getattr(importlib.import_module(_HOME.get(name, "course_lib.ranks")), name)


def _warm_up() -> None:
    """Start the fork server, which imports torch while the student reads."""
    from course_lib.ranks import warm_up

    warm_up()


def load_ipython_extension(shell: Any) -> None:
    """Register the cell magic %%ranks; called by `%load_ext course_lib`."""
    from course_lib.ranks.parent.magic import RanksMagic

    _warm_up()
    shell.register_magics(RanksMagic)
