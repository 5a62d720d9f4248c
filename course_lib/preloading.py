"""The modules that every worker process finds imported: the fork server does it once, in memory that all share.

Whoever has functions that run on ranks names what these use, and says where that lies, which is no student's code: it
is not imported anew for each run, and no line of it is to blame. `ranks`, which starts the workers, knows none of it.
"""

from __future__ import annotations

modules: list[str] = []
folders: list[str] = []


def preload(*names: str) -> None:
    """Have the next fork server import these modules, too."""
    modules.extend(names)


def library(folder: str) -> None:
    """The code in this folder is a library's, and not the student's."""
    if folder not in folders:
        folders.append(folder)
