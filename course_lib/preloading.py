"""The modules that the fork server imports once for all worker processes, in memory that they share.

A package whose functions run on ranks names the modules they use, and its folder. Code in that folder is a library's,
not a student's: it is not imported anew for each run, and no error points to its lines. `ranks`, which starts the
workers, knows nothing of the packages above it.
"""

from __future__ import annotations

modules: list[str] = []
folders: list[str] = []


def preload(*names: str) -> None:
    """Have the next fork server import these modules, too."""
    modules.extend(names)


def library(folder: str) -> None:
    """Treat the code in this folder as a library's, not as a student's."""
    if folder not in folders:
        folders.append(folder)
